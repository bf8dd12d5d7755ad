"""Whether Ray Serve takes HTTP through HAProxy in place of its own proxy, as its users choose.

HAProxy sends requests to the replicas of an application's ingress itself, at ports of their own,
on every interface of their nodes. So whoever reaches the node reaches them, whatever
`service.host`; and Serve refuses an ingress with a router of its own.
"""

from __future__ import annotations

import os

VARIABLE = "RAY_SERVE_ENABLE_HA_PROXY"


def uses_haproxy() -> bool:
    """Return whether Serve uses HAProxy, by the variable that Serve reads.

    The variable must have the same value on every node.
    """
    return os.environ.get(VARIABLE, "0") == "1"
