"""Find out whether Ray Serve receives HTTP requests through HAProxy or through its own proxy.

Users choose one of them by an environment variable. HAProxy sends requests directly to the replicas
of an application's ingress, which listen at their own ports on every interface of their nodes.
Everyone who can connect to a node can therefore connect to its replicas, even if `service.host` is
a local address. With HAProxy, Serve refuses an ingress that has a router of its own.
"""

from __future__ import annotations

import os

VARIABLE = "RAY_SERVE_ENABLE_HA_PROXY"


def uses_haproxy() -> bool:
    """Return whether Serve uses HAProxy, by the environment variable RAY_SERVE_ENABLE_HA_PROXY.

    The variable must have the same value on every node.
    """
    return os.environ.get(VARIABLE, "0") == "1"
