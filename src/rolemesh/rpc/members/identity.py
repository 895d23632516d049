"""Identity of a member of the mesh: its key, its certificate, and the authority that it trusts.

Every member has a certificate of the mesh's own authority. Its name is a URI,
`rolemesh://mesh/coordinator`, `rolemesh://mesh/actor` (all ranks of the actor) or
`rolemesh://mesh/client/drive`. With an identity, servers take connections only from members, and
say to themselves which one calls; channels talk only to servers of the mesh. Both sides then
encrypt (TLS 1.3 where both have it).

All of it stands in one PEM file, readable by its owner only: the key, the certificate, and the
authority's certificate. `authority.py` makes what stands in it; `rolemesh certs` writes such files.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import re
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

logger = logging.getLogger(__name__)

URI_PREFIX = "rolemesh://mesh/"
"""Beginning of the names of members."""

SERVER_NAME = "rolemesh"
"""DNS name in the certificates of all servers of a mesh. Addresses of services change, and prove
nothing: that the authority has signed this name does."""

NOT_TRUSTED = "CERTIFICATE_VERIFY_FAILED"
"""What gRPC says of a server whose certificate is not the mesh's."""

CLOSED = "Socket closed"
"""What it says of one that does not take the client's."""

_MAX_BYTES = 64 << 10
_PEM = re.compile(rb"-----BEGIN ([A-Z ]+)-----\n.+?\n-----END \1-----\n?", re.DOTALL)


class Scope(enum.Enum):
    """What a client may do. Each includes those before it."""

    READ = "read"
    """Look: status, metrics, samples, logs."""
    DRIVE = "drive"
    """Make the steps of a run."""
    ADMIN = "admin"
    """Everything: begin runs, initialize and end services."""


class IdentityError(ValueError):
    """A file holds no identity, or others can read it."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Key, certificate and trusted authority of one member, as PEM.

    Example: `open_channel(address, identity=Identity.read(Path("certs/actor.pem")))`.
    """

    key: bytes = field(repr=False)
    certificate: bytes
    authority: bytes

    @classmethod
    def parse(cls, pem: bytes, source: str) -> Identity:
        """Takes a PEM file apart.

        Args:
            pem: Key, certificate, authority, in any order but for the two certificates.
            source: Where it comes from, for messages.

        Raises:
            IdentityError: It holds something else.
        """
        keys, certificates = _blocks(pem)
        if len(keys) != 1 or len(certificates) != 2:
            raise IdentityError(
                f"{source} holds {len(keys)} keys and {len(certificates)} certificates: give one "
                "key, one certificate and that of the mesh's authority, as `rolemesh certs issue` "
                "writes them"
            )
        return cls(key=keys[0], certificate=certificates[0], authority=certificates[1])

    @classmethod
    def read(cls, path: Path) -> Identity:
        """Reads an identity from its file.

        Raises:
            IdentityError: There is no such file, it holds something else, or users other than its
                owner can read it.
        """
        return cls.parse(_read_private(path, "identity"), f"identity {path}")

    def pem(self) -> bytes:
        """What `parse` reads."""
        return self.key + self.certificate + self.authority

    @property
    def mesh(self) -> str:
        """Name of the mesh: 16 hexadecimal digits, the same for all whom its authority signed."""
        return hashlib.sha256(b"".join(self.authority.split())).hexdigest()[:16]

    @property
    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """Options of such a channel."""
        return CHANNEL_OPTIONS

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a channel to a server of the mesh; see CHANNEL_OPTIONS."""
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)


@dataclass(frozen=True, slots=True)
class Trust:
    """Which server a client without an identity takes for the right one, over TLS.

    Example: `open_channel("mesh.example:50050", identity=Trust(Path("ca.crt").read_bytes()))`.
    """

    authority: bytes | None = None
    """PEM of a certificate that has signed the server's, or is the server's own; None: the public
    authorities that gRPC knows."""
    server_name: str | None = None
    """Name that the server's certificate has to have; None: that of the address."""

    @property
    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """Options of such a channel."""
        name = self.server_name
        return () if name is None else (("grpc.ssl_target_name_override", name),)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a channel to that server."""
        return grpc.ssl_channel_credentials(self.authority)


def read_certificate(path: Path) -> tuple[bytes, tuple[bytes, ...]]:
    """Reads what a server shows to clients that have no identity.

    Args:
        path: PEM file of the owner alone with a private key, the server's certificate, and those
            that have signed it: that of an identity, or of another authority.

    Returns:
        The key, and the certificates from the server's own on.

    Raises:
        IdentityError: There is no such file, it holds something else, or users other than its owner
            can read it.
    """
    keys, certificates = _blocks(_read_private(path, "certificate"))
    if len(keys) != 1 or not certificates:
        raise IdentityError(
            f"certificate {path} holds {len(keys)} keys and {len(certificates)} certificates: give "
            "a PEM file with one key and the certificates that go with it, the server's own first"
        )
    load_certificate(path)
    return keys[0], tuple(certificates)


def load_certificate(path: Path) -> ssl.SSLContext:
    """TLS of a server with a certificate of read_certificate.

    Raises:
        IdentityError: Its key is another one's, or needs a password.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without a password OpenSSL would ask for one on the terminal, and wait.
        context.load_cert_chain(path, password=lambda: "")
    except (OSError, ValueError) as error:
        raise IdentityError(
            f"certificate {path} cannot be used ({error}): give the key of its first certificate, "
            "without a password"
        ) from error
    return context


def _blocks(pem: bytes) -> tuple[list[bytes], list[bytes]]:
    """Keys and certificates of a PEM file."""
    blocks = [(match[1], match[0]) for match in _PEM.finditer(pem[:_MAX_BYTES])]
    keys = [block for kind, block in blocks if kind.endswith(b"PRIVATE KEY")]
    return keys, [block for kind, block in blocks if kind == b"CERTIFICATE"]


def _read_private(path: Path, what: str) -> bytes:
    """Reads a file that its owner alone can read."""
    try:
        mode = path.stat().st_mode
        pem = path.read_bytes()
    except OSError as error:
        raise IdentityError(
            f"{what} {path} cannot be read ({error.strerror}): give the file that `rolemesh certs "
            "issue` wrote for this member"
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise IdentityError(
            f"{what} {path} can be read by others (mode {mode & 0o777:o}): chmod 600 it, and issue "
            "a new one if others may have read it"
        )
    return pem


def server_credentials(path: Path, *, members_only: bool = True) -> grpc.ServerCredentials:
    """Credentials of a server.

    A file that was replaced counts for the connections that come from then on. One that cannot be
    used is logged, and the one before stays.

    Args:
        path: File of the server's identity.
        members_only: Whether clients have to show that they are members of the mesh. If not, it is
            a file for `read_certificate`, and clients show none.

    Raises:
        IdentityError: It cannot be used now.
    """

    def configuration() -> grpc.ServerCertificateConfiguration:
        if not members_only:
            key, certificates = read_certificate(path)
            return grpc.ssl_server_certificate_configuration([(key, b"".join(certificates))])
        own = Identity.read(path)
        return grpc.ssl_server_certificate_configuration(
            [(own.key, own.certificate)], root_certificates=own.authority
        )

    def written_at() -> int | None:
        try:
            return path.stat().st_mtime_ns
        except OSError:
            # It was removed, which is allowed: what was read of it stays.
            return None

    known = written_at()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal known
        now = written_at()
        if now is None or now == known:
            return None
        known = now
        try:
            return configuration()
        except IdentityError as error:
            logger.error("the identity stays what it was: %s", error)
            return None

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        fetch,  # type: ignore[arg-type]  # gRPC documents None as "no change"
        require_client_authentication=members_only,
    )


CHANNEL_OPTIONS: tuple[tuple[str, str], ...] = (("grpc.ssl_target_name_override", SERVER_NAME),)
"""Options of a channel with an identity: the server must have a certificate with SERVER_NAME."""


def member_of(context: grpc.aio.ServicerContext[Any, Any]) -> str | None:
    """Name of the member that makes a call, e.g. "actor" or "client/read".

    Returns:
        None where the connection has no certificate, as without TLS.
    """
    for value in context.auth_context().get("x509_subject_alternative_name", ()):
        name = value.decode("utf-8", "replace")
        if name.startswith(URI_PREFIX):
            return name.removeprefix(URI_PREFIX)
    return None
