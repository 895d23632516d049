"""URLs as they may be shown, and hosts as they may be trusted."""

from __future__ import annotations

import ipaddress
import re
from typing import Any
from urllib.parse import urlsplit

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


def as_tuple(urls: Any) -> Any:
    """One URL that is written without a list is a list of one; for fields of several."""
    return (urls,) if isinstance(urls, str) else urls


def check_url(url: str, schemes: tuple[str, ...]) -> None:
    """Refuses what is no URL of a server.

    Raises:
        ValueError: It is none, has a user or password in it, or none of the schemes.
    """
    wanted = " or ".join(f"{scheme}://host:port" for scheme in schemes)
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        shown = masked_url(url)
        raise ValueError(f"urls has {shown!r}, which is no URL ({error}): give {wanted}") from None
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "urls has a URL with a user or password in it, which would be logged: put a token into "
            "an environment variable of the service, and its name into token_variable"
        )
    if parts.scheme not in schemes or not host:
        raise ValueError(f"urls has {url!r}: give {wanted}")


def check_token_is_safe(url: str) -> None:
    """Refuses a URL to which a token would travel where others can read it.

    Raises:
        ValueError: It is not encrypted, and leaves the host.
    """
    parts = urlsplit(url)
    if parts.scheme in ("http", "grpc") and not is_loopback(parts.hostname or ""):
        raise ValueError(
            f"urls has {url!r}, to which token_variable would send a token that is not encrypted: "
            f"give {parts.scheme}s://, or a server or proxy on 127.0.0.1, or no token"
        )
