"""Addresses of hosts with names, IPv4 and IPv6 addresses."""

from __future__ import annotations

import pytest

from rolemesh.rpc.address import host_and_port, host_of


@pytest.mark.parametrize(
    ("host", "address", "bare"),
    [
        ("actor-1.mesh", "actor-1.mesh:6001", "actor-1.mesh"),
        ("10.0.0.2", "10.0.0.2:6001", "10.0.0.2"),
        ("fd00::2", "[fd00::2]:6001", "fd00::2"),
        ("[fd00::2]", "[fd00::2]:6001", "fd00::2"),
        ("[::]", "[::]:6001", "::"),
    ],
)
def test_an_ipv6_host_stands_in_brackets_once(host: str, address: str, bare: str) -> None:
    assert host_and_port(host, 6001) == address
    assert host_of(address) == bare
