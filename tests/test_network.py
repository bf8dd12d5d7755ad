"""Tests that gloo's network interface is found by its address."""

from __future__ import annotations

import socket

import psutil

from actors.network import LOOPBACK, gloo_interface


def test_gloo_gets_the_interface_that_has_the_address() -> None:
    addresses = {
        each.address: name
        for name, all_of_it in psutil.net_if_addrs().items()
        for each in all_of_it
        if each.family == socket.AF_INET
    }
    assert LOOPBACK in addresses
    for address, name in addresses.items():
        assert gloo_interface(address) == {"GLOO_SOCKET_IFNAME": name}


def test_gloo_gets_no_interface_for_an_address_of_another_machine() -> None:
    # RFC 5737 reserves this address for documentation, so that no machine has it.
    assert gloo_interface("203.0.113.1") == {}
