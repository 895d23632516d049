"""TLS of the HTTP server: a certificate from a file, and its successor when it is renewed."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from rolemesh.rpc.identity import IdentityError, read_certificate

logger = logging.getLogger(__name__)


def tls_context(path: Path) -> ssl.SSLContext:
    """Context of a server. A file that was replaced counts for the connections from then on.

    Args:
        path: See read_certificate.

    Raises:
        IdentityError: It cannot be used now.
    """
    known = _written_at(path)
    current = _loaded(path)
    first = _loaded(path)

    def renew(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called at the begin of each connection."""
        nonlocal known, current
        now = _written_at(path)
        # A file that was removed changes nothing.
        if now not in (None, known):
            known = now
            try:
                current = _loaded(path)
            except IdentityError as error:
                logger.error("the certificate stays what it was: %s", error)
        connection.context = current

    first.sni_callback = renew
    return first


def _loaded(path: Path) -> ssl.SSLContext:
    read_certificate(path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(path)
    except ssl.SSLError as error:
        raise IdentityError(
            f"certificate {path} cannot be used ({error}): give the key of the first certificate"
        ) from error
    return context


def _written_at(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
