"""An interface is found by its address."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys

import psutil

from actors.network import LOOPBACK, Rendezvous, gloo_interface


def test_gloo_is_told_the_interface_that_has_the_address() -> None:
    addresses = {
        each.address: name
        for name, all_of_it in psutil.net_if_addrs().items()
        for each in all_of_it
        if each.family == socket.AF_INET
    }
    assert LOOPBACK in addresses
    for address, name in addresses.items():
        assert gloo_interface(address) == {"GLOO_SOCKET_IFNAME": name}


def test_gloo_is_told_nothing_for_an_address_that_is_not_of_this_machine() -> None:
    # Kept for documentation by RFC 5737: no machine has it.
    assert gloo_interface("203.0.113.1") == {}


def test_the_address_of_the_ranks_is_read_without_torch() -> None:
    """The supervisor reads it, while the ranks wait for it."""
    pickled = pickle.dumps(Rendezvous(address="127.0.0.1", port=1))
    code = (
        "import pickle, sys; found = pickle.load(sys.stdin.buffer); "
        "sys.exit('torch' in sys.modules or found.port != 1)"
    )
    read = subprocess.run([sys.executable, "-c", code], input=pickled, check=False)
    assert read.returncode == 0
