"""Roles as services on a GPU: a step, sleep by what the driver says is free, and a second run.

Plain pytest: no plugins there. Not run on a GPU yet.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic", reason="pydantic is not installed: services need it")
pytest.importorskip("transformers", reason="transformers is not installed: services need it")
pytest.importorskip("grpc_status", reason="grpc_status is not installed: services need it")
pytest.importorskip("grpc_health", reason="grpc_health is not installed: services need it")
pytest.importorskip("grpc_reflection", reason="grpc_reflection is not installed: services need it")
pytest.importorskip("psutil", reason="psutil is not installed: services need it")
pytest.importorskip(
    "prometheus_client", reason="prometheus_client is not installed: services need it"
)
pytest.importorskip("opentelemetry", reason="opentelemetry is not installed: services need it")

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.rollout_services import Caller
from support.services import operation_key, serving
from support.tiny_models import write_tiny_llama

from rolemesh.engine.hardware.devices import free_bytes, give_back_memory
from rolemesh.services.actor.servicers import ActorRole
from rolemesh.services.critic.servicers import CriticRole
from rolemesh.services.reference.servicers import ReferenceRole
from rolemesh.v1 import experience_pb2, worker_pb2, worker_pb2_grpc

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
SLACK = 192 << 20
"""What libraries keep for good after their first use: cuBLAS's workspace, kernels."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 150M parameters: 0.6 GB of float32 weights, far above SLACK."""
    return write_tiny_llama(
        tmp_path_factory.mktemp("gpu") / "model", hidden_size=2048, num_layers=6
    )


def data_of(path: Path) -> dict[str, Any]:
    """Given rows, so that no generator of tasks is needed."""
    path.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n' * 8)
    return {"type": "jsonl", "path": str(path)}


async def sleep_and_second_run(role: Any, spec: dict[str, Any], samples: bool) -> None:
    async with serving(role) as server:
        caller = Caller(server.runtime.address)
        worker = worker_pb2_grpc.WorkerServiceStub(caller.channel)
        free: list[int] = []
        try:
            for run in (1, 2):
                await caller.initialize(**spec)
                if samples:
                    sampled = await caller.generate(run, count=2)
                    assert await caller.train(sampled.experience, version=0) > 0
                    report: experience_pb2.CallReport = sampled.report
                    sources = {entry.source for entry in report.memory}
                    assert sources == {experience_pb2.MEMORY_SOURCE_DEVICE}
                awake = free_bytes(DEVICE)
                key = operation_key("sleep", sequence=900 + run)
                freed = await worker.Sleep(worker_pb2.SleepRequest(key=key))
                assert freed.freed_bytes > SLACK
                assert free_bytes(DEVICE) >= awake + freed.freed_bytes - SLACK
                key = operation_key("wake", sequence=910 + run)
                await worker.Wake(worker_pb2.WakeRequest(key=key))
                await worker.Drain(worker_pb2.DrainRequest())
                free.append(free_bytes(DEVICE))
        finally:
            await caller.channel.close()
    # The second run found all of it again.
    assert abs(free[1] - free[0]) < SLACK


@pytest.mark.parametrize("kind", [ActorRole, CriticRole, ReferenceRole], ids=lambda r: r.name)
def test_sleep_and_the_end_of_a_run_give_the_memory_back(
    kind: Any, model: Path, tmp_path: Path
) -> None:
    give_back_memory(DEVICE)
    before = free_bytes(DEVICE)
    spec: dict[str, Any] = {"model": {"path": str(model)}, "data": None}
    if kind is ActorRole:
        spec["data"] = data_of(tmp_path / "rows.jsonl")
        spec["rollout"] = {"type": "hf", "max_model_len": 64, "max_num_seqs": 8}
    asyncio.run(sleep_and_second_run(kind(), spec, samples=kind is ActorRole))
    give_back_memory(DEVICE)
    assert free_bytes(DEVICE) > before - 2 * SLACK
