"""Authority of a mesh: makes the identities of its members, which trust each other by it.

A coordinator that starts all services of a run makes an authority for that run alone, in memory.
For services that start by themselves, `rolemesh certs` keeps one in a folder.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rolemesh.rpc.members.identity import SERVER_NAME, URI_PREFIX, Identity, IdentityError, Scope

RUN_DAYS = 366
"""How long certificates of a run are good. A service that is started again gets a new one."""

_SKEW = datetime.timedelta(minutes=5)
"""Clocks of hosts differ: a certificate is good from a little before it was made."""

_ROLE = re.compile(r"[a-z][a-z0-9_]{0,31}")
_CLIENTS = tuple(f"client/{scope.value}" for scope in Scope)


@dataclass(frozen=True, slots=True)
class Authority:
    """The key that signs certificates of members, and its own certificate.

    Example: `Authority.make().issue("actor")` is the identity of an actor.
    """

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def make(cls, *, days: float = RUN_DAYS) -> Authority:
        """A new one, good for so many days."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rolemesh authority")])
        certificate = (
            _begin(name, key.public_key(), days)
            .issuer_name(name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate)

    @classmethod
    def parse(cls, pem: bytes, source: str) -> Authority:
        """Takes what `pem` has written.

        Args:
            pem: Key and certificate.
            source: Where it comes from, for messages.

        Raises:
            IdentityError: It holds something else.
        """
        try:
            key = load_pem_private_key(pem, password=None)
            certificate = x509.load_pem_x509_certificate(pem)
        except ValueError as error:
            raise IdentityError(
                f"{source} holds no authority ({error}): give the folder that `rolemesh certs "
                "init` made"
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise IdentityError(f"{source} holds a key of another kind than EC: make a new one")
        return cls(key, certificate)

    def pem(self) -> bytes:
        """What `parse` reads."""
        return _pem(self.key) + self.certificate.public_bytes(Encoding.PEM)

    def issue(self, member: str, *, hosts: Sequence[str] = (), days: float = RUN_DAYS) -> Identity:
        """The identity of a member, with a new key.

        Args:
            member: "coordinator", a role ("actor", for all of its ranks), or "client/read",
                "client/drive" or "client/admin".
            hosts: Names and IP addresses by which clients outside of the mesh know a server.
            days: How long it is good for; not longer than the authority.

        Raises:
            ValueError: The member has another name.
        """
        is_client = member in _CLIENTS
        if not is_client and not _ROLE.fullmatch(member):
            raise ValueError(
                f"member is {member!r}: give coordinator, a role such as actor, or one of "
                f"{', '.join(_CLIENTS)}"
            )
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(URI_PREFIX + member)]
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if not is_client:
            # A client cannot stand in for a server.
            uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
            names += [x509.DNSName(SERVER_NAME), *map(_host, hosts)]
        end = self.certificate.not_valid_after_utc
        certificate = (
            _begin(
                x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, member)]),
                key.public_key(),
                days,
                latest=end,
            )
            .issuer_name(self.certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), False
            )
            .sign(self.key, hashes.SHA256())
        )
        return Identity(
            key=_pem(key),
            certificate=certificate.public_bytes(Encoding.PEM),
            authority=self.certificate.public_bytes(Encoding.PEM),
        )


def _begin(
    name: x509.Name,
    key: ec.EllipticCurvePublicKey,
    days: float,
    latest: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(end if latest is None else min(end, latest))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
