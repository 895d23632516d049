"""Where programs ask the policy of a service, as it is told to people."""

from __future__ import annotations

from urllib.parse import urlsplit

MAX_URL_CHARACTERS = 512


def base_url(told: str, address: str) -> str:
    """The base URL of a service's endpoint, for clients of OpenAI's protocol.

    Args:
        told: What the service said of its endpoint, e.g. "http://127.0.0.1:8000"; empty where it
            has none. A service may be of any make: what is no plain URL of a host is as if it had
            said nothing, and nobody is shown a user or a password.
        address: "host:port" of the service.

    Returns:
        E.g. "http://127.0.0.1:8000/v1". An endpoint at all addresses of its machine ("0.0.0.0") has
        the host of the service instead; loopback stays, since nothing else reaches it.
    """
    try:
        parts = urlsplit(told)
        port = parts.port
    except ValueError:
        return ""
    host = parts.hostname or ""
    is_plain = told == f"{parts.scheme}://{parts.netloc}" and "@" not in parts.netloc
    if parts.scheme not in ("http", "https") or not is_plain or port is None or not host:
        return ""
    if len(told) > MAX_URL_CHARACTERS or not told.isascii() or not told.isprintable():
        return ""
    if host in ("0.0.0.0", "::"):
        host = address.rpartition(":")[0].strip("[]") or host
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}:{port}/v1"
