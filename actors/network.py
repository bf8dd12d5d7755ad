"""Network interfaces and addresses of this machine, and the HTTP proxy of Ray Serve."""

from __future__ import annotations

import ipaddress
import os

import psutil

LOOPBACK = "127.0.0.1"
HAPROXY_VARIABLE = "RAY_SERVE_ENABLE_HA_PROXY"


def gloo_interface(address: str) -> dict[str, str]:
    """Return the environment variable that makes torch's gloo use the interface of `address`.

    Without this variable gloo resolves the host name for each process group. If no name server
    answers, that takes ten seconds for each group. If the name resolves to 127.0.1.1, as with
    Debian's /etc/hosts, other nodes cannot reach this node.

    Returns: an empty dictionary if no interface has the address.
    Example: 127.0.0.1 -> {"GLOO_SOCKET_IFNAME": "lo"}
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def uses_haproxy() -> bool:
    """Return whether Serve uses HAProxy, by the environment variable RAY_SERVE_ENABLE_HA_PROXY.

    The variable must have the same value on every node; without it Serve uses its own proxy.
    HAProxy sends requests directly to the replicas of an application's ingress, which listen at
    their own ports on every interface of their nodes. Everyone who can connect to a node can
    therefore connect to its replicas, even if `service.host` is a local address. With HAProxy,
    Serve refuses an ingress that has a router of its own.
    """
    return os.environ.get(HAPROXY_VARIABLE, "0") == "1"
