"""Addresses of services, as people write them."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")

SCHEME = "grpc://"


def plain_address(address: T) -> str | T:
    """The host:port of "grpc://host:port"; anything else, of whatever type, as it is."""
    if isinstance(address, str) and address.startswith(SCHEME):
        return address.removeprefix(SCHEME).removesuffix("/")
    return address
