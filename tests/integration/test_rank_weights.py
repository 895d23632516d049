"""Tests of what a service of several ranks reports of its weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import json_format, struct_pb2
from support import warm_processes
from support.services import operation_key, wait_for_announcement
from support.tiny_models import write_tiny_llama

from rolemesh.engine.models.scoring_model import VALUE_HEAD, ScoringModel
from rolemesh.engine.rollout.checksums import tensor_checksum
from rolemesh.engine.specs import ModelSpec
from rolemesh.rpc.channel import open_channel
from rolemesh.v1 import weights_pb2, weights_pb2_grpc, worker_pb2, worker_pb2_grpc


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a critic of two tensor slices."""
    announce = tmp_path_factory.mktemp("critic") / "announce.json"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "rolemesh.services.critic"),
            *("--layout", "tp=2", "--announce", str(announce)),
        ],
        env={**os.environ, **warm_processes.services(), "PYTHONSAFEPATH": "1"},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield wait_for_announcement(process, announce)["address"]
    finally:
        process.terminate()
        assert process.wait(30) == 0


async def test_manifest_is_whole_and_checksums_are_those_of_each_ranks_parts(
    critic: str, model: Path
) -> None:
    spec = {"model": {"path": str(model)}, "train": {"tp": 2}}
    async with open_channel(critic) as channel:
        async for _ in worker_pb2_grpc.WorkerServiceStub(channel).Initialize(
            worker_pb2.InitializeRequest(
                key=operation_key("initialize"),
                spec=json_format.ParseDict(spec, struct_pb2.Struct()),
            )
        ):
            pass
        weights = weights_pb2_grpc.WeightsServiceStub(channel)
        manifest = await weights.GetManifest(weights_pb2.GetManifestRequest())
        checksums = await weights.GetChecksums(
            weights_pb2.GetChecksumsRequest(holder=weights_pb2.WEIGHTS_HOLDER_TRAINER)
        )
    whole = dict(ScoringModel(ModelSpec(path=model), VALUE_HEAD).named_weights())
    assert {one.name: tuple(one.shape) for one in manifest.parameters} == {
        name: tuple(weight.shape) for name, weight in whole.items()
    }
    name = "model.layers.0.mlp.gate_proj.weight"
    halves = whole[name].detach().chunk(2)
    found = [checksums.checksums[name], checksums.other_ranks[0].checksums[name]]
    assert found == [tensor_checksum(half) for half in halves]
    norm = "model.norm.weight"
    assert checksums.checksums[norm] == checksums.other_ranks[0].checksums[norm]
