"""How people write where a service is."""

from __future__ import annotations

SCHEME = "grpc://"


def plain_address(address: str) -> str:
    """The host:port of "grpc://host:port"; anything else as it is."""
    return address.removeprefix(SCHEME).removesuffix("/") if address.startswith(SCHEME) else address
