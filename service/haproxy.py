"""Whether Ray Serve receives HTTP through HAProxy instead of its own proxy, as users may choose.

HAProxy sends requests directly to the replicas of an application's ingress, at their own ports, on
every interface of their nodes. So anyone who reaches the node reaches them, with any
`service.host`; and Serve refuses an ingress with its own router.
"""

from __future__ import annotations

import os

VARIABLE = "RAY_SERVE_ENABLE_HA_PROXY"


def uses_haproxy() -> bool:
    """Return whether Serve uses HAProxy, by the variable that Serve reads.

    The variable must have the same value on every node.
    """
    return os.environ.get(VARIABLE, "0") == "1"
