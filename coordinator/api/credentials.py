"""Tokens of a coordinator, and what each of them, or a certificate of the mesh, allows.

The policy of a method (`callers` in coordinator.proto) says who may call it. REST routes are held
to the policy of the method of the same name.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import grpc

from rolemesh.coordinator.recipe.sections.api_section import ApiSpec
from rolemesh.coordinator.state.files import checked_secret, read_secret, write_atomically
from rolemesh.engine.specs.urls import is_loopback
from rolemesh.rpc.errors import ForbiddenError, RolemeshError
from rolemesh.rpc.members.identity import Scope
from rolemesh.rpc.policy import method_policy

SERVICE = "rolemesh.v1.CoordinatorService"

TOKEN_VARIABLE = "ROLEMESH_API_TOKEN"

TOKEN_FILE = "api-token"
"""In the folder of a run or a coordinator that was given no token: the one that it made."""

CLIENT_FILE = "client.pem"
"""In the folder of a run that a client drives, while its coordinator lives: the identity by which
its services know the client. AttachRun hands it out."""

_OWN_TOKEN_BYTES = 32

_caller: ContextVar[str | None] = ContextVar("rolemesh_coordinator_caller", default=None)
"""Whose request the current task serves; None where no door has let one in."""


class UnauthenticatedError(RolemeshError):
    """The caller has not shown a token."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNAUTHENTICATED
    default_reason: ClassVar[str] = "TOKEN_MISSING"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """The tokens of a coordinator. Without any, every caller may do everything."""

    by_scope: Mapping[Scope, str] = field(default_factory=dict, repr=False)
    file: Path | None = None
    """Holds the token of the scope admin; None where no file does."""
    is_own: bool = False
    """Whether that token was made here, and not given by the owner."""

    def scope_of(self, sent: str | None) -> Scope:
        """What a caller may do.

        Args:
            sent: Value of the caller's header "authorization", None where there is none.

        Raises:
            UnauthenticatedError: It holds none of the tokens.
        """
        if not self.by_scope:
            return Scope.ADMIN
        if sent is None:
            raise UnauthenticatedError(
                "send the token of this coordinator: authorization: Bearer <token>; without one of "
                f"your own it is in the file {TOKEN_FILE} of the folder of the run or coordinator"
            )
        scheme, _, given = sent.partition(" ")
        # As bytes: compare_digest refuses text beyond ASCII. All are compared, so that the time
        # says nothing of which one was nearly right.
        found = [
            scope
            for scope, token in self.by_scope.items()
            if hmac.compare_digest(given.strip().encode(), token.encode())
        ]
        if scheme.lower() != "bearer" or not found:
            raise UnauthenticatedError(
                f"that is not the token of this coordinator: see {TOKEN_VARIABLE} or the file that "
                f"it was started with, else the file {TOKEN_FILE} of its folder",
                reason="TOKEN_INVALID",
            )
        return found[0]


def check_caller(full_method: str, member: str) -> None:
    """Refuses a caller whose rights are too small; notes who it is for `check_caller_may`.

    Args:
        full_method: Method of the coordinator, as gRPC spells it.
        member: "client/" and the scope of the caller's token, or the name in its certificate.

    Raises:
        ForbiddenError: CALLER_DENIED.
        ValueError: The method has no policy, and so is for no caller.
    """
    _caller.set(member)
    _check(full_method, member, full_method.rpartition("/")[2])


def check_caller_may(name: str, doing: str) -> None:
    """Refuses a request that comes to the same as a method that its caller may not call.

    Args:
        name: Of that method of CoordinatorService.
        doing: What the caller wants, for the error.

    Raises:
        ForbiddenError: CALLER_DENIED.
    """
    member = _caller.get()
    if member is not None:
        _check(f"/{SERVICE}/{name}", member, doing)


def _check(full_method: str, member: str, doing: str) -> None:
    policy = method_policy(full_method)
    if policy.allows(member, "coordinator"):
        return
    wanted = [one.value for one in Scope if policy.allows(f"client/{one.value}", "coordinator")]
    remedy = f"the scope {wanted[0]}" if wanted else "another member of the mesh"
    raise ForbiddenError(
        f"{doing} is not for {member}: it needs {remedy}; ask with a "
        "token or a certificate that has it",
        reason="CALLER_DENIED",
        metadata={"caller": member},
    )


def read_tokens(
    api: ApiSpec, environment: Mapping[str, str], *, folder: Path | None = None
) -> Tokens:
    """The tokens of a coordinator.

    Args:
        api: Names the files of tokens.
        environment: Environment of this process; its TOKEN_VARIABLE may hold a token.
        folder: Where to keep a token that is made if the owner has given none; None makes none.

    Raises:
        ValueError: A file cannot be read, what it holds cannot be a token, two hold the same one,
            or there are tokens and no caller would have to show one.
        OSError: The folder cannot be written.
    """
    given = {
        Scope.READ: _read(api.tokens.read, "api.tokens.read"),
        Scope.DRIVE: _read(api.tokens.drive, "api.tokens.drive"),
        Scope.ADMIN: read_token(api.token_file, environment),
    }
    by_scope = {scope: token for scope, token in given.items() if token is not None}
    if len(set(by_scope.values())) < len(by_scope):
        raise ValueError(
            f"api.tokens: two of {', '.join(scope.value for scope in by_scope)} are the same "
            "token: give each scope its own"
        )
    if api.open_to_every_local_user:
        if by_scope:
            raise ValueError(
                "api.open_to_every_local_user is set, and there is a token: leave out the one or "
                f"the other ({TOKEN_VARIABLE}, api.token_file, api.tokens)"
            )
        return Tokens()
    if Scope.ADMIN in by_scope or folder is None:
        file = None if api.token_file is None else api.token_file.absolute()
        return Tokens(by_scope=by_scope, file=file)
    place = folder / TOKEN_FILE
    own = {**by_scope, Scope.ADMIN: _own_token(place)}
    return Tokens(by_scope=own, file=place, is_own=True)


def read_token(token_file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The token that allows everything, as it was given; None where none was.

    Args:
        token_file: File that holds the token; it takes precedence over the variable.
        environment: Environment of this process; its TOKEN_VARIABLE may hold the token.

    Raises:
        ValueError: The file cannot be read, or what it holds cannot be a token.
    """
    if token_file is not None:
        return _read(token_file, "token_file")
    text = environment.get(TOKEN_VARIABLE)
    return None if text is None else checked_secret(text, TOKEN_VARIABLE)


def _read(file: Path | None, name: str) -> str | None:
    return None if file is None else read_secret(file, name)


def _own_token(place: Path) -> str:
    """The token in a file of this user alone. It stays, for clients that knew it before a restart.

    A file that another user may have written or read is replaced.
    """
    try:
        found = place.lstat()
    except FileNotFoundError:
        found = None
    is_private = (
        found is not None
        and stat.S_ISREG(found.st_mode)
        and found.st_uid == os.geteuid()
        and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    )
    if not is_private:
        token = secrets.token_urlsafe(_OWN_TOKEN_BYTES)
        write_atomically(place, f"{token}\n", is_private=True)
    return read_secret(place, "token")


def check_exposure(api: ApiSpec, certificates: Path | None, tokens: Tokens) -> None:
    """Refuses to listen where other machines reach it, without a token or in clear.

    Args:
        api: Says where.
        certificates: Folder of the mesh's certificates, if there is one.
        tokens: Those that were given.

    Raises:
        ValueError: The host is not of the loopback interface, and something is missing.
    """
    if is_loopback(api.host):
        return
    host = f"host is {api.host!r}, which others can reach"
    if Scope.ADMIN not in tokens.by_scope:
        raise ValueError(
            f"{host}, and there is no token: a machine that can reach a coordinator can start "
            f"programs here. Set {TOKEN_VARIABLE}, or give a token file, or listen on 127.0.0.1"
        )
    if api.certificate is None and certificates is None and not api.allow_remote:
        raise ValueError(
            f"{host}, and without a certificate the token and all data travel in clear: give "
            "api.certificate (--certificate; see `rolemesh certs`), or listen on 127.0.0.1, or "
            "give api.allow_remote (--allow-remote) if the network is private"
        )
