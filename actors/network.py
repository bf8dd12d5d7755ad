"""Network interfaces and addresses of this machine."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

import psutil

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The address of torch.distributed's store, through which the trainer's ranks find each other.

    Rank 0 opens the store. This class is not in a module of the trainer, because the supervisor
    receives it and must not import torch.
    """

    address: str
    port: int


def gloo_interface(address: str) -> dict[str, str]:
    """Return the environment variable that makes torch's gloo use the interface of `address`.

    Without it gloo resolves the host name for each process group: if no name server answers, that
    takes ten seconds a group, and if the name resolves to 127.0.1.1, as in Debian's /etc/hosts,
    other nodes cannot reach it.

    Returns: {} if no interface has the address. Example: 127.0.0.1 -> {"GLOO_SOCKET_IFNAME": "lo"}
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
