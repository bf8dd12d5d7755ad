"""Which of this machine's network interfaces has an address."""

from __future__ import annotations

import psutil

LOOPBACK = "127.0.0.1"


def gloo_interface(address: str) -> dict[str, str]:
    """The variable by which torch's gloo speaks over the interface that has `address`.

    Without it gloo asks for the addresses of the host name for each process group: where no name
    server answers that takes ten seconds a group, and where the name means 127.0.1.1, as in
    Debian's /etc/hosts, other nodes cannot reach it.

    Example: 127.0.0.1 -> {"GLOO_SOCKET_IFNAME": "lo"}; {} for an address that no interface has.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return {"GLOO_SOCKET_IFNAME": name}
    return {}
