"""Connection of a client to its coordinator: the address, who is trusted there, and a token."""

from __future__ import annotations

from pathlib import Path

from rolemesh.coordinator.api.doors.known_doors import known_door
from rolemesh.engine.specs.urls import is_loopback
from rolemesh.rpc.address import host_of
from rolemesh.rpc.members.identity import Identity, Trust

_TLS = "https://"


class Connection:
    """What a client was given, and what this user's coordinators on this host have noted.

    Example: `Connection("127.0.0.1:50050").metadata()` has the token of the coordinator there, if
    it is one of this user's.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None,
        identity: Identity | None,
        authority: Path | None,
        allow_remote: bool,
    ) -> None:
        """Checks the arguments of AsyncClient.

        Raises:
            ValueError: They contradict each other, would send the token in clear, or the
                authority's file cannot be read.
        """
        if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
            # gRPC refuses such a header with an error of its own. The text must not show the token.
            raise ValueError("token has blanks, line ends or other letters than ASCII: strip() it")
        if identity is not None and (token is not None or authority is not None):
            raise ValueError(
                "identity says who the client is and whom it trusts: leave out token and authority"
            )
        self.address = address.removeprefix(_TLS).removesuffix("/")
        """"host:port"."""
        if token is None and identity is None:
            self.address = _noted_as(self.address)
        self._token = token
        self._finds_token = token is None and identity is None
        self.trust: Identity | Trust | None = identity
        """Who the client is, or whom it trusts; None: in clear."""
        if identity is None:
            if authority is not None:
                self.trust = Trust(_certificate(authority))
            elif address.startswith(_TLS):
                self.trust = Trust()
            elif (known := known_door(self.address)) is not None:
                self.trust = known.trust
        host = host_of(self.address)
        if self.trust is None and token is not None and not is_loopback(host) and not allow_remote:
            raise ValueError(
                f"address is {address!r} and there is a token, which others could read on its way: "
                f"give {_TLS}{self.address}, with authority=Path(...) where the coordinator's "
                "certificate is not of a public one, or allow_remote=True if the network is private"
            )

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with each call. A token of this host is looked for each time.

        The port of a coordinator that has ended may be another user's by now.
        """
        token = self._token
        if self._finds_token:
            known = known_door(self.address)
            token = None if known is None else known.token()
        return () if token is None else (("authorization", f"Bearer {token}"),)


def _noted_as(address: str) -> str:
    """The address of a coordinator of this user that a client means by "localhost".

    The name may lead to two addresses, and at the other one another user's server may listen.
    """
    host, _, port = address.rpartition(":")
    if host == "localhost":
        for one in (f"127.0.0.1:{port}", f"[::1]:{port}"):
            if known_door(one) is not None:
                return one
    return address


def _certificate(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(
            f"authority {file} cannot be read ({error.strerror}): give the PEM file of a "
            "certificate, e.g. authority.crt of `rolemesh certs`"
        ) from error
