"""TLS of the HTTP server: a certificate from a file, and its successor when it is renewed."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from rolemesh.rpc.members.identity import IdentityError, load_certificate, read_certificate

logger = logging.getLogger(__name__)


def tls_context(path: Path) -> ssl.SSLContext:
    """Context of a server. A file that was replaced counts for the connections from then on.

    Args:
        path: See read_certificate.

    Raises:
        IdentityError: It cannot be used now.
    """
    known = _written_at(path)
    read_certificate(path)
    first = current = load_certificate(path)

    def renew(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called at the begin of each connection."""
        nonlocal known, current
        now = _written_at(path)
        # A file that was removed changes nothing.
        if now not in (None, known):
            known = now
            try:
                read_certificate(path)
                current = load_certificate(path)
            except IdentityError as error:
                logger.error("the certificate stays what it was: %s", error)
        connection.context = current

    first.sni_callback = renew
    return first


def _written_at(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
