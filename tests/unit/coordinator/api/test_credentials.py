"""Tests of who may use a coordinator."""

from __future__ import annotations

import contextlib
import hmac
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.rest_servers import tokens_of

from rolemesh.coordinator.api.credentials import (
    TOKEN_FILE,
    TOKEN_VARIABLE,
    UnauthenticatedError,
    read_token,
    read_tokens,
)
from rolemesh.coordinator.api.doors.coordinator_service import serve_coordinator
from rolemesh.coordinator.api.doors.doors import check_doors
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.recipe.sections.api_section import ApiSpec
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.engine.specs.urls import is_loopback
from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import RolemeshError
from rolemesh.rpc.members.authority import Authority
from rolemesh.rpc.members.identity import Scope
from rolemesh.v1 import coordinator_pb2, coordinator_pb2_grpc

TOKEN = "s3cret"


def test_the_file_goes_before_the_variable(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert read_token(file, {TOKEN_VARIABLE: "other"}) == TOKEN
    assert read_token(None, {TOKEN_VARIABLE: "other"}) == "other"
    assert read_token(None, {}) is None


@pytest.mark.parametrize("text", ["", "two words", "naïve", "bell\a"])
def test_what_cannot_be_a_token_is_refused_and_not_shown(text: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(ValueError, match="holds no secret") as refused:
        read_token(file, {})
    assert not text or text not in str(refused.value)


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent.* cannot be read"):
        read_token(tmp_path / "absent", {})


def api(**fields: Any) -> ApiSpec:
    return ApiSpec.model_validate(fields)


def test_each_scope_has_a_file_of_its_own(tmp_path: Path) -> None:
    files = {}
    for scope in ("read", "drive", "admin"):
        files[scope] = tmp_path / scope
        files[scope].write_text(f"may-{scope}\n")
    tokens = read_tokens(
        api(
            token_file=files["admin"],
            tokens={"read": files["read"], "drive": files["drive"]},
        ),
        {},
        folder=tmp_path,
    )
    for scope in Scope:
        assert tokens.scope_of(f"Bearer may-{scope.value}") is scope
    assert (tokens.file, tokens.is_own) == (files["admin"], False)
    assert "may-" not in repr(tokens)
    assert not (tmp_path / TOKEN_FILE).exists()


def test_two_scopes_cannot_share_a_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    with pytest.raises(
        ValueError, match=r"api\.tokens: two of read, admin are the same"
    ) as refused:
        read_tokens(api(tokens={"read": file}), {TOKEN_VARIABLE: TOKEN})
    assert TOKEN not in str(refused.value)


def test_without_a_token_one_is_made_that_its_owner_alone_can_read(tmp_path: Path) -> None:
    made = read_tokens(api(), {}, folder=tmp_path)
    place = tmp_path / TOKEN_FILE
    assert (made.file, made.is_own) == (place, True)
    assert place.stat().st_mode & 0o777 == 0o600
    token = place.read_text().strip()
    # 32 random bytes.
    assert len(token) == 43
    assert made.scope_of(f"Bearer {token}") is Scope.ADMIN
    for sent in (None, "", "Bearer ", f"Bearer {token[:-1]}"):
        with pytest.raises(UnauthenticatedError):
            made.scope_of(sent)
    # Clients that know it go on after a restart; another folder has another one.
    assert read_tokens(api(), {}, folder=tmp_path) == made
    other = tmp_path / "other"
    other.mkdir()
    assert read_tokens(api(), {}, folder=other).by_scope != made.by_scope
    # A token with less than all rights is no reason to make none.
    (tmp_path / "look").write_text("look")
    with_less = read_tokens(api(tokens={"read": tmp_path / "look"}), {}, folder=tmp_path)
    assert with_less.by_scope == {Scope.READ: "look", Scope.ADMIN: token}


@pytest.mark.parametrize("kind", ["readable", "link", "foreign"])
def test_a_token_that_another_user_may_know_is_replaced(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / TOKEN_FILE
    if kind == "link":
        (tmp_path / "known").write_text("known-to-others")
        (tmp_path / "known").chmod(0o600)
        place.symlink_to(tmp_path / "known")
    else:
        place.write_text("known-to-others")
        place.chmod(0o644 if kind == "readable" else 0o600)
    if kind == "foreign":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    tokens = read_tokens(api(), {}, folder=tmp_path)
    assert "known-to-others" not in tokens.by_scope.values()
    assert not place.is_symlink()
    assert place.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["link", "readable"])
def test_a_token_is_not_written_into_what_lies_there_already(kind: str, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    draft = tmp_path / f".{TOKEN_FILE}.{os.getpid()}"
    if kind == "link":
        draft.symlink_to(theirs)
    else:
        draft.touch(mode=0o666)
        draft.chmod(0o666)
    read_tokens(ApiSpec(), {}, folder=tmp_path)
    assert not theirs.exists()
    assert (tmp_path / TOKEN_FILE).stat().st_mode & 0o777 == 0o600


def test_a_coordinator_is_open_where_its_owner_says_so_and_has_no_token(tmp_path: Path) -> None:
    is_open = api(open_to_every_local_user=True)
    tokens = read_tokens(is_open, {}, folder=tmp_path)
    assert tokens.scope_of(None) is Scope.ADMIN
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="open_to_every_local_user is set, and there is a token"):
        read_tokens(is_open, {TOKEN_VARIABLE: TOKEN}, folder=tmp_path)


def test_no_door_is_opened_to_others_without_a_token() -> None:
    given = {TOKEN_VARIABLE: TOKEN}
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert is_loopback(host)
        check_doors(api(host=host), None, {})
        check_doors(api(host=host, open_to_every_local_user=True), None, {})
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""):
        assert not is_loopback(host)
        for without in ({}, {"allow_remote": True}, {"open_to_every_local_user": True}):
            with pytest.raises(ValueError, match=f"there is no token.*{TOKEN_VARIABLE}"):
                check_doors(api(host=host, **without), None, {})
        with pytest.raises(ValueError, match=r"travel in clear: give api\.certificate"):
            check_doors(api(host=host), None, given)
        check_doors(api(host=host, allow_remote=True), None, given)


def test_what_a_door_would_show_is_looked_at_before_anything_starts(tmp_path: Path) -> None:
    authority = Authority.make()
    (tmp_path / "coordinator.pem").touch(mode=0o600)
    place = tmp_path / "coordinator.pem"
    given = {TOKEN_VARIABLE: TOKEN}
    remote = {"host": "0.0.0.0"}
    for certificates, fields in ((None, {"certificate": place}), (tmp_path, {})):
        with pytest.raises(ValueError, match=r"coordinator\.pem holds 0 keys and 0 cert"):
            check_doors(api(**remote, **fields), certificates, given)
    with pytest.raises(ValueError, match=r"api\.member_port is 0, and there is no certificate"):
        check_doors(api(member_port=0), None, {})
    place.write_bytes(authority.issue("coordinator").pem())
    check_doors(api(**remote, certificate=place), None, given)
    check_doors(api(**remote), tmp_path, given)
    check_doors(api(member_port=0), tmp_path, {})
    # A key that is another one's, or that has a password, is told before a port is opened.
    mine = authority.issue("coordinator")
    locked = load_pem_private_key(mine.key, None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word")
    )
    for key in (authority.issue("coordinator").key, locked):
        place.write_bytes(key + mine.certificate)
        with pytest.raises(ValueError, match=r"coordinator\.pem cannot be used .* without a pass"):
            check_doors(api(certificate=place), None, {})
    # One's own certificate has no authority of the mesh.
    own = authority.issue("coordinator")
    place.write_bytes(own.key + own.certificate)
    check_doors(api(**remote, certificate=place), None, given)
    with pytest.raises(ValueError, match="1 keys and 1 certificates"):
        check_doors(api(member_port=0, certificate=place), None, {})


def test_a_token_is_compared_whole_and_its_absence_told_apart() -> None:
    tokens = tokens_of(TOKEN, read="look")
    assert tokens.scope_of(f"Bearer {TOKEN}") is Scope.ADMIN
    assert tokens.scope_of(f"bearer  {TOKEN} ") is Scope.ADMIN
    assert tokens.scope_of("Bearer look") is Scope.READ
    with pytest.raises(UnauthenticatedError) as missing:
        tokens.scope_of(None)
    assert missing.value.reason == "TOKEN_MISSING"
    for sent in (
        "",
        TOKEN,
        f"Basic {TOKEN}",
        "Bearer",
        f"Bearer {TOKEN}x",
        "Bearer s3cre",
        "Bearer \u00e9",
    ):
        with pytest.raises(UnauthenticatedError) as wrong:
            tokens.scope_of(sent)
        assert wrong.value.reason == "TOKEN_INVALID"


@pytest.mark.parametrize("verdict", [True, False])
def test_a_token_is_compared_in_constant_time(
    verdict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but hmac decides: a comparison that ends at the first difference tells the token."""
    compared = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return verdict

    monkeypatch.setattr(hmac, "compare_digest", compare)
    tokens, tries = tokens_of(TOKEN, read="look"), (TOKEN, "another", TOKEN[:-1])
    for sent in tries:
        with contextlib.nullcontext() if verdict else pytest.raises(UnauthenticatedError):
            tokens.scope_of(f"Bearer {sent}")
    # Also the second one is looked at where the first one was right.
    known = (b"look", TOKEN.encode())
    assert compared == [(sent.encode(), token) for sent in tries for token in known]


@pytest.fixture
async def channel() -> AsyncIterator[MeshChannel]:
    operations = StoreOperations(MemoryStateStore())
    server, port = await serve_coordinator(operations, tokens=tokens_of(TOKEN))
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def test_every_call_of_the_coordinator_needs_the_token(channel: MeshChannel) -> None:
    stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
    right, wrong = (("authorization", f"Bearer {TOKEN}"),), (("authorization", "Bearer no"),)
    assert list((await stub.ListRuns(coordinator_pb2.ListRunsRequest(), metadata=right)).runs) == []
    for metadata, reason in ((wrong, "TOKEN_INVALID"), ((), "TOKEN_MISSING")):
        with pytest.raises(RolemeshError) as unary:
            await stub.ListRuns(coordinator_pb2.ListRunsRequest(), metadata=metadata)
        with pytest.raises(RolemeshError) as stream:
            async for _ in stub.WatchRun(coordinator_pb2.WatchRunRequest(), metadata=metadata):
                pass
        assert unary.value.reason == stream.value.reason == reason


async def test_health_and_reflection_are_open(channel: MeshChannel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service="rolemesh.v1.CoordinatorService")
    assert (await health.Check(request, timeout=5)).status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    answers = [a async for a in reflection.ServerReflectionInfo(asked, timeout=5)]
    names = {service.name for service in answers[0].list_services_response.service}
    assert "rolemesh.v1.CoordinatorService" in names
