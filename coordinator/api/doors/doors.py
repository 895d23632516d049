"""The doors of a coordinator: gRPC, and REST with the dashboard, over the same operations."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rolemesh.coordinator.api.credentials import Tokens, check_exposure, read_tokens
from rolemesh.coordinator.api.doors.coordinator_service import serve_coordinator
from rolemesh.coordinator.api.doors.known_doors import noted
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.recipe.sections.api_section import ApiSpec
from rolemesh.engine.specs.urls import is_loopback
from rolemesh.rpc.address import host_and_port
from rolemesh.rpc.members.identity import Identity, Scope, read_certificate

logger = logging.getLogger(__name__)

_GRACE_S = 1.0
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Address at which this machine reaches a server that listens on all addresses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Doors:
    """Addresses of a coordinator, as seen from this machine."""

    address: str
    """"host:port" of CoordinatorService."""
    url: str | None
    """URL of REST and the dashboard; None where they are not served."""
    member_address: str | None
    """"host:port" of CoordinatorService for members of the mesh; None where it is not served."""
    tokens: Tokens
    """What the clients of the other two show."""

    def facts(self) -> dict[str, str | int | None]:
        """Where it is, for other programs, with the process that serves it. Holds no secret."""
        file = self.tokens.file
        return {
            "address": self.address,
            "url": self.url,
            "pid": os.getpid(),
            "token_file": None if file is None else str(file),
        }

    def told(self, *, to_person: bool) -> str:
        """Where it is, in a line.

        Args:
            to_person: Whether only the owner sees it, on a terminal. The address of the dashboard
                then has the token in it, if it was made here.
        """
        words = [f"gRPC: {self.address}"]
        if self.member_address is not None:
            words.append(f"gRPC for members of the mesh: {self.member_address}")
        if self.url is not None:
            # A browser keeps what stands behind # to itself.
            with_token = to_person and self.tokens.is_own
            after = f"#token={self.tokens.by_scope[Scope.ADMIN]}" if with_token else ""
            words.insert(0, f"dashboard and REST: {self.url}{after}")
        if self.tokens.is_own and not to_person:
            words.append(f"token: {self.tokens.file}")
        return " - ".join(words)


def check_doors(api: ApiSpec, certificates: Path | None, environment: Mapping[str, str]) -> None:
    """Raises ValueError for the first thing for which open_doors would refuse these settings.

    Args:
        api: The settings.
        certificates: Folder of the mesh's certificates, if there is one.
        environment: Environment of this process; it may hold a token.
    """
    check_exposure(api, certificates, read_tokens(api, environment))
    certificate = _certificate(api, certificates)
    if certificate is not None:
        read_certificate(certificate)
    if api.member_port is not None:
        Identity.read(_of_member_port(api, certificates))


def _certificate(api: ApiSpec, certificates: Path | None) -> Path | None:
    """What the doors for clients with a token show; None: they speak in clear."""
    if api.certificate is not None or certificates is None:
        return api.certificate
    # A browser on this machine would not know the mesh's authority.
    is_clear = is_loopback(api.host) or api.allow_remote
    return None if is_clear else certificates / "coordinator.pem"


def _of_member_port(api: ApiSpec, certificates: Path | None) -> Path:
    found = api.certificate if certificates is None else certificates / "coordinator.pem"
    if found is None:
        raise ValueError(
            f"api.member_port is {api.member_port}, and there is no certificate by which members "
            "of the mesh know the coordinator: give certificates, or api.certificate with "
            "coordinator.pem of `rolemesh certs`"
        )
    return found


@asynccontextmanager
async def open_doors(
    operations: StoreOperations,
    api: ApiSpec,
    *,
    folder: Path | None,
    certificates: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Doors]:
    """Serves gRPC and REST until the end of the block.

    Args:
        operations: The operations that all doors serve.
        api: Where, and to whom.
        folder: Where a token is kept that is made here; None makes none.
        certificates: Folder of the mesh's certificates, if there is one.
        environment: Environment that may hold a token; None: that of this process.

    Raises:
        ValueError: A port is in use, others could ask without a token, or a file is not as it
            should be.
        OSError: The folder cannot be written.
    """
    if api.host == "localhost":
        # Where the name has two addresses, another user may hold the port at the other one.
        api = api.model_copy(update={"host": "127.0.0.1"})
    environment = os.environ if environment is None else environment
    check_doors(api, certificates, environment)
    tokens = read_tokens(api, environment, folder=folder)
    certificate = _certificate(api, certificates)
    host = _ANYWHERE.get(api.host, api.host)
    async with AsyncExitStack() as stack:

        def note(port: int) -> None:
            # Before anything is answered: a client that follows a coordinator to its next process
            # finds the token here at its first call.
            door = noted(host_and_port(host, port), token_file=tokens.file, certificate=certificate)
            try:
                stack.enter_context(door)
            except OSError as error:
                logger.warning("clients have to be given the token (%s)", error)

        server, port = await serve_coordinator(
            operations,
            host=api.host,
            port=api.grpc_port,
            tokens=tokens,
            certificate=certificate,
            tell_port=note,
        )
        stack.push_async_callback(server.stop, _GRACE_S)
        address, member_address = host_and_port(host, port), None
        if api.member_port is not None:
            members, member_port = await serve_coordinator(
                operations,
                host=api.host,
                port=api.member_port,
                certificate=_of_member_port(api, certificates),
                members_only=True,
            )
            stack.push_async_callback(members.stop, _GRACE_S)
            member_address = host_and_port(host, member_port)
        url = None
        if api.http_port is not None:
            # FastAPI takes a third of a second to import, which no other command has to wait for.
            from rolemesh.coordinator.api.http.app import make_app
            from rolemesh.coordinator.api.http.server import serve_http

            app = make_app(operations, tokens=tokens)
            web, web_port = await serve_http(app, api.host, api.http_port, certificate=certificate)
            stack.push_async_callback(web.stop)
            scheme = "http" if certificate is None else "https"
            url = f"{scheme}://{host_and_port(host, web_port)}/"
        yield Doors(address=address, url=url, member_address=member_address, tokens=tokens)
