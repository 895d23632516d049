"""Requests that the actor refuses, with the reasons that its contracts name; no model is loaded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.services import ToySpec, operation_key, serving

from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.services.actor.servicers import ActorRole
from rolemesh.services.runtime.calls.role import InitializeResult
from rolemesh.v1 import (
    rollout_pb2,
    rollout_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)


class EmptyActorRole(ActorRole):
    """An actor that holds a run, but no model."""

    spec_class = ToySpec

    def initialize(
        self, spec: Any, run_seed: int, progress: Any, mesh: RankMesh
    ) -> InitializeResult:
        return InitializeResult()


@pytest.fixture
async def channel() -> AsyncIterator[MeshChannel]:
    async with serving(EmptyActorRole()) as server, open_channel(server.runtime.address) as opened:
        request = worker_pb2.InitializeRequest(key=operation_key("initialize"))
        async for _ in worker_pb2_grpc.WorkerServiceStub(opened).Initialize(request):
            pass
        yield opened


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", 0.0, "temperature is 0.0"),
        ("samples_per_prompt", 0, "samples_per_prompt is 0"),
        ("top_k", -2, "top_k is -2"),
    ],
)
async def test_wrong_sampling_names_the_field(
    channel: MeshChannel, field: str, value: float, words: str
) -> None:
    good = {"samples_per_prompt": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1}
    sampling = rollout_pb2.Sampling(**{**good, "max_new_tokens": 8, field: value})
    request = rollout_pb2.GenerateRequest(key=operation_key(), sampling=sampling)
    with pytest.raises(InvalidRequestError, match=words) as caught:
        async for _ in rollout_pb2_grpc.RolloutServiceStub(channel).Generate(request):
            pass
    assert caught.value.reason == "SAMPLING_INVALID"


@pytest.mark.parametrize("directory", ["relative/folder", "", "EMPTY"])
async def test_a_checkpoint_that_is_not_there_is_a_wrong_path(
    channel: MeshChannel, directory: str, tmp_path: Path
) -> None:
    given = str(tmp_path) if directory == "EMPTY" else directory
    request = weights_pb2.LoadCheckpointRequest(key=operation_key(), directory=given)
    with pytest.raises(InvalidRequestError, match="directory is") as caught:
        async for _ in weights_pb2_grpc.WeightsServiceStub(channel).LoadCheckpoint(request):
            pass
    assert caught.value.reason == "PATH_INVALID"
