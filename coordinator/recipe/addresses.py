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


def masked_url(url: str) -> str:
    """The URL as it may be shown: without user, password and parameters.

    Works on what is no valid URL as well, and masks too much rather than too little. A text
    without // is no URL and stays as it is.
    """
    scheme, separator, rest = url.partition("//")
    place, question, parameters = rest.partition("?")
    if "@" in parameters:
        # Either a password with a ? in it or a parameter with an @ in it.
        return f"{scheme}{separator}***"
    _, at, host = place.rpartition("@")
    return f"{scheme}{separator}{at and '***@'}{host}{question and '?***'}"
