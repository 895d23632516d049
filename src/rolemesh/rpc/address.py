"""Addresses "host:port", in which an IPv6 host stands in brackets."""

from __future__ import annotations


def host_and_port(host: str, port: int) -> str:
    """The address of a port of a host.

    Args:
        host: A name or an IP address; an IPv6 address with or without its brackets.
        port: Port.
    """
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def host_of(address: str) -> str:
    """The host of "host:port", without brackets."""
    return address.rpartition(":")[0].strip("[]")
