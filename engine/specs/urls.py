"""URLs as they may be shown, and hosts as they may be trusted."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

_USER_AND_PASSWORD = re.compile(r"//[^\s/]*@")


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


def masked_text(text: str) -> str:
    """A text of others, e.g. an error, with the URLs in it without users and passwords."""
    return _USER_AND_PASSWORD.sub("//***@", text)


def without_passwords(value: Any) -> Any:
    """The same plain JSON values, with the URLs in them as they may be shown."""
    match value:
        case dict():
            return {key: without_passwords(inner) for key, inner in value.items()}
        case list() | tuple():
            return [without_passwords(inner) for inner in value]
        case str():
            return masked_url(value) if "://" in value else value
    return value


def is_loopback(host: str) -> bool:
    """Whether a host is this one by its name alone, so that nothing sent to it leaves."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
