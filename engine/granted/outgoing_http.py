"""Connections to servers that a recipe names: requests go there, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx


def outgoing_client(
    url: str,
    token: str | None,
    limits: httpx.Limits,
    *,
    timeout: httpx.Timeout | None = None,
    headers: Mapping[str, str] | None = None,
) -> httpx.AsyncClient:
    """A client for one server, which opens no connection yet.

    It follows no redirect, takes no cookie and uses no proxy of the environment. It asks for
    uncompressed answers, so that a limit counts what arrives.

    Args:
        url: Of the server; it is checked, and given again with each request.
        token: Bearer token to send; None: none.
        limits: Of connections.
        timeout: Where a request gives none; None: httpx's own.
        headers: Further ones.

    Raises:
        ValueError: The URL cannot be used.
    """
    try:
        _ = httpx.URL(url).host  # decodes it
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"urls leads to {url!r}, which is no URL ({error})") from error
    sent = {**(headers or {}), "Accept-Encoding": "identity"}
    if token is not None:
        sent["Authorization"] = f"Bearer {token}"
    client = httpx.AsyncClient(
        headers=sent,
        limits=limits,
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
        follow_redirects=False,
        trust_env=False,
    )
    if timeout is not None:
        client.timeout = timeout
    return client
