"""Tests of who may use a coordinator."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rolemesh.coordinator.api.coordinator_service import serve_coordinator
from rolemesh.coordinator.api.credentials import (
    TOKEN_VARIABLE,
    check_exposure,
    read_token,
    refusal,
)
from rolemesh.coordinator.api.doors import open_doors
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.engine.specs.urls import is_loopback
from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import RolemeshError
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


def test_only_this_machine_is_let_in_without_a_token() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert is_loopback(host)
        check_exposure(host, None)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""):
        assert not is_loopback(host)
        check_exposure(host, TOKEN)
        with pytest.raises(ValueError, match=TOKEN_VARIABLE):
            check_exposure(host, None)


def test_a_token_is_compared_whole_and_its_absence_told_apart() -> None:
    assert refusal(f"Bearer {TOKEN}", TOKEN) is None
    assert refusal(f"bearer  {TOKEN} ", TOKEN) is None
    missing = refusal(None, TOKEN)
    assert missing is not None
    assert missing.reason == "TOKEN_MISSING"
    for sent in (
        "",
        TOKEN,
        f"Basic {TOKEN}",
        "Bearer",
        f"Bearer {TOKEN}x",
        "Bearer s3cre",
        "Bearer é",
    ):
        wrong = refusal(sent, TOKEN)
        assert wrong is not None
        assert wrong.reason == "TOKEN_INVALID"


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
    for sent in (TOKEN, "another", TOKEN[:-1]):
        assert (refusal(f"Bearer {sent}", TOKEN) is None) is verdict
    assert compared == [(sent.encode(), TOKEN.encode()) for sent in (TOKEN, "another", TOKEN[:-1])]


@pytest.fixture
async def channel() -> AsyncIterator[MeshChannel]:
    operations = StoreOperations(MemoryStateStore())
    server, port = await serve_coordinator(operations, token=TOKEN)
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


async def test_no_door_is_opened_to_others_without_a_token() -> None:
    operations = StoreOperations(MemoryStateStore())
    settings = {"host": "0.0.0.0", "grpc_port": 0, "http_port": None}
    with pytest.raises(ValueError, match="others can reach"):
        async with open_doors(operations, token=None, **settings):  # type: ignore[arg-type]
            pass
    async with open_doors(operations, token=TOKEN, **settings) as doors:  # type: ignore[arg-type]
        assert doors.address.startswith("127.0.0.1:")
        async with grpc.aio.insecure_channel(doors.address) as channel:
            await channel.channel_ready()
