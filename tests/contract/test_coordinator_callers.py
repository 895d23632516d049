"""Every method and every route of a coordinator is for the callers that its policy names alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from support.fake_run import fill_store
from support.rest_servers import client_of, refused, tokens_of

from rolemesh.coordinator.api.credentials import Tokens
from rolemesh.coordinator.api.doors.coordinator_service import serve_coordinator
from rolemesh.coordinator.api.http.app import make_app
from rolemesh.coordinator.api.http.guard import SCOPE_HEADER
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState
from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import RolemeshError
from rolemesh.rpc.policy import method_policy, rolemesh_methods

SERVICE = "/rolemesh.v1.CoordinatorService/"

SCOPES = ("read", "drive", "admin")

SCOPE_OF = {
    **dict.fromkeys(
        (
            *("GetRun", "ListRuns", "ListServices", "WatchRun", "GetMetrics", "GetDataflow"),
            *("GetPlan", "ListSamples", "GetExpertLoads", "GetDeviceUse", "ListAlerts", "ReadLog"),
        ),
        "read",
    ),
    **dict.fromkeys(("StopRun", "PauseRun", "ResumeRun", "CheckpointRun"), "drive"),
    **dict.fromkeys(("AttachRun", "LogStep"), "drive"),
    "CreateRun": "admin",
}
"""The least scope of each method, written down a second time on purpose."""

OPEN_PATHS = {"/openapi.json", "/healthz", "/readyz"}
"""Routes without a token, besides the files of the page: they tell nothing of a run."""

UNREADABLE = b"\xff\xff\xff"
"""Bytes that are no message, and no JSON."""


def tokens() -> Tokens:
    return tokens_of(**{scope: f"may-{scope}" for scope in SCOPES})


def test_the_protos_name_the_callers_of_every_method() -> None:
    methods = [name for name in rolemesh_methods() if name.startswith(SERVICE)]
    assert {name.removeprefix(SERVICE) for name in methods} == set(SCOPE_OF)
    for name in methods:
        policy = method_policy(name)
        allowed = [scope for scope in SCOPES if policy.allows(f"client/{scope}", "coordinator")]
        assert allowed == list(SCOPES[SCOPES.index(SCOPE_OF[name.removeprefix(SERVICE)]) :]), name
        # Roles of the mesh have no business here.
        for member in ("coordinator", "actor", "client/root", "", "nobody"):
            assert not policy.allows(member, "coordinator"), (name, member)


@pytest.fixture
async def channel() -> AsyncIterator[MeshChannel]:
    operations = StoreOperations(MemoryStateStore())
    server, port = await serve_coordinator(operations, tokens=tokens())
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def reason_of(channel: MeshChannel, method: str, sent: bytes, token: str | None) -> str:
    """Why a call is refused; empty where it is answered."""
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    call: Any = channel.unary_stream if method == "WatchRun" else channel.unary_unary
    try:
        answer = call(f"{SERVICE}{method}")(sent, timeout=10, metadata=metadata)
        if method == "WatchRun":
            async for _ in answer:
                break
        else:
            await answer
    except RolemeshError as error:
        return error.reason
    return ""


@pytest.mark.parametrize("method", sorted(SCOPE_OF))
async def test_a_method_is_for_its_scope_and_those_above(channel: MeshChannel, method: str) -> None:
    # Of a caller who may not call, the request is not even looked at.
    for sent in (b"", UNREADABLE):
        assert await reason_of(channel, method, sent, None) == "TOKEN_MISSING"
        assert await reason_of(channel, method, sent, "may-nothing") == "TOKEN_INVALID"
    least = SCOPES.index(SCOPE_OF[method])
    for place, scope in enumerate(SCOPES):
        for sent in (b"", UNREADABLE):
            reason = await reason_of(channel, method, sent, f"may-{scope}")
            if place < least:
                assert reason == "CALLER_DENIED", (scope, sent)
            else:
                assert reason not in ("TOKEN_MISSING", "TOKEN_INVALID", "CALLER_DENIED"), scope
                assert (reason == "MESSAGE_MALFORMED") or sent == b"", (scope, reason)


async def test_a_refusal_says_what_is_needed(channel: MeshChannel) -> None:
    right = (("authorization", "Bearer may-read"),)
    with pytest.raises(RolemeshError) as caught:
        await channel.unary_unary(f"{SERVICE}CreateRun")(b"", timeout=10, metadata=right)
    assert "CreateRun is not for client/read: it needs the scope admin" in caught.value.message
    assert caught.value.metadata["caller"] == "client/read"


def routes() -> list[tuple[str, str]]:
    """Method and path of every route, with names for what a path leaves open."""
    app = make_app(StoreOperations(MemoryStateStore()))
    return [
        (method, route.path.format(run_id="made", log="actor"))
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in sorted(route.methods)
    ]


def test_every_route_has_a_scope_or_is_open() -> None:
    app = make_app(StoreOperations(MemoryStateStore()))
    for route in app.routes:
        path = route.path  # type: ignore[attr-defined]
        if path.startswith("/api/"):
            words = route.name.split("_")  # type: ignore[attr-defined]
            assert "".join(word.title() for word in words) in SCOPE_OF, path
        elif path != "/metrics" and path not in OPEN_PATHS:
            # A file of the page, which holds no data.
            assert not isinstance(route, APIRoute), path


def scope_of(method: str, path: str) -> str | None:
    if path == "/metrics":
        return "read"
    if path in OPEN_PATHS:
        return None
    if method == "GET":
        return "read"
    return "admin" if path == "/api/v1/runs" else "drive"


@pytest.mark.parametrize(("method", "path"), routes())
async def test_a_route_is_for_its_scope_and_those_above(method: str, path: str) -> None:
    wanted = scope_of(method, path)

    async def ask(client: httpx.AsyncClient, token: str | None) -> httpx.Response:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        # A body that nothing can read is not looked at before the caller is known.
        content = UNREADABLE if method == "POST" else None
        return await client.request(method, path, headers=headers, content=content)

    async with client_of(StoreOperations(MemoryStateStore()), tokens=tokens()) as client:
        if wanted is None:
            assert (await ask(client, None)).status_code == 200
            return
        refused(await ask(client, None), 401, "TOKEN_MISSING")
        refused(await ask(client, "may-nothing"), 401, "TOKEN_INVALID")
        for place, scope in enumerate(SCOPES):
            answer = await ask(client, f"may-{scope}")
            if place < SCOPES.index(wanted):
                told = refused(answer, 403, "CALLER_DENIED")["detail"]
                assert f"it needs the scope {wanted}" in told
                assert SCOPE_HEADER not in answer.headers
            else:
                assert answer.status_code not in (401, 403, 500), answer.text
                assert answer.headers[SCOPE_HEADER] == scope


@pytest.mark.parametrize("state", [RunState.PAUSED, RunState.FAILED, RunState.STOPPED])
async def test_a_driver_lets_a_run_go_on_and_starts_none_again(
    state: RunState, tmp_path: Path
) -> None:
    store = MemoryStateStore()
    await fill_store(store, "made", tmp_path, num_steps=2, is_live=True)
    await store.update_run("made", state=state, pause_requested=True)
    async with client_of(StoreOperations(store), tokens=tokens()) as client:

        async def resume(scope: str) -> httpx.Response:
            headers = {"authorization": f"Bearer may-{scope}"}
            return await client.post("/api/v1/runs/made/resume", headers=headers)

        answer = await resume("drive")
        if state is RunState.PAUSED:
            assert answer.status_code == 200
            assert not (await store.get_run("made")).pause_requested
            return
        told = refused(answer, 403, "CALLER_DENIED")["detail"]
        assert "to start run 'made' again is not for client/drive: it needs the scope admin" in told
        # This coordinator starts none, for its owner either.
        refused(await resume("admin"), 409, "RESUME_UNAVAILABLE")


async def test_what_is_no_route_is_told_to_callers_with_a_token_alone() -> None:
    async with client_of(StoreOperations(MemoryStateStore()), tokens=tokens()) as client:
        for method, path, status in (("GET", "/api/v1/no", 404), ("PUT", "/api/v1/runs", 405)):
            assert (await client.request(method, path)).status_code == 401
            headers = {"authorization": "Bearer may-read"}
            assert (await client.request(method, path, headers=headers)).status_code == status
