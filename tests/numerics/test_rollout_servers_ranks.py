"""An actor of two ranks that samples at vLLM servers: one adapter for both, or one broadcast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from support.fake_vllm import FakeVllm, fake_vllm
from support.fake_workers import FakeGroup, FakeSender
from support.rank_processes import RankContext, RankPool
from support.tiny_models import write_tiny_llama

from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.parallel.agreement import gather_facts
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.rollout.servers.sampler import VllmServerBackend
from rolemesh.engine.specs import (
    AdapterSpec,
    ModelSpec,
    OptimizerSpec,
    SamplingSpec,
    VllmServerSpec,
)
from rolemesh.engine.train.trainer import Trainer
from rolemesh.engine.weights.resharding import Resharder

LAYOUT = HybridLayout(TrainLayout(tp=2), GenerateLayout(pp=1, tp=1))
ADAPTER = AdapterSpec(rank=4, alpha=8.0)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("ranks") / "model", tied=True)


def _trainer(folder: Path, mesh: RankMesh, adapter: AdapterSpec | None) -> Trainer:
    torch.manual_seed(0)
    spec = ModelSpec(path=folder, compute_dtype="float32", adapter=adapter)
    return Trainer.policy(spec, OptimizerSpec(learning_rate=1e-3), mesh=mesh)


def _spec(urls: list[str], shared: Path) -> VllmServerSpec:
    return VllmServerSpec(
        urls=tuple(urls), shared_folder=shared, max_model_len=64, deadline_s=1.0, timeout_s=10
    )


def _rows(backend: VllmServerBackend, rank: int) -> list[int]:
    asked = [RolloutRequest(row=row, prompt_tokens=[5, 9], seed=row) for row in (rank, rank + 2)]
    found = backend.generate(asked, SamplingSpec(max_new_tokens=4))
    return sorted(one.row for one in found)


@dataclass
class Seen:
    """By one rank."""

    names: list[str | None] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    refusal: str = ""


def _with_an_adapter(at: RankContext, folder: Path, urls: list[str], shared: Path) -> Seen:
    seen = Seen()
    with at.connect(LAYOUT) as mesh:
        trainer = _trainer(folder, mesh, ADAPTER)
        assert isinstance(trainer.model, CausalLm)
        backend = VllmServerBackend(_spec(urls, shared), folder, mesh, adapter=ADAPTER)
        resharder = Resharder(trainer.model, "float32", is_whole=backend.takes_whole)
        for version in range(3):
            weights = dict(trainer.named_weights())
            with torch.no_grad():
                for tensor in weights.values():
                    tensor.add_(0.01)
            shards = resharder.run(weights, policy_version=version)
            backend.update_shard(shards, version)
            seen.names.append(backend._held.served.model)
            seen.rows = _rows(backend, at.rank)
        if at.rank == 1:
            # One rank alone cannot reach its servers: both are told.
            for server in backend._fleet.servers:
                server.client.url = "http://127.0.0.1:9"
                server.is_admitted = False
        try:
            shards = resharder.run(dict(trainer.named_weights()), policy_version=3)
            backend.update_shard(shards, 3)
        except RuntimeError as error:
            seen.refusal = str(error)
        backend.close()
        resharder.close()
    return seen


def test_ranks_hand_over_one_adapter_and_fail_together(
    rank_pool: RankPool, folder: Path, tmp_path: Path
) -> None:
    with fake_vllm() as first, fake_vllm() as second:
        urls = [first.url, second.url]
        seen = rank_pool.run(_with_an_adapter, 2, folder, urls, tmp_path)
        loads = [body for route, body in first.calls if route == "/v1/load_lora_adapter"]
    assert seen[0].names == seen[1].names
    assert len(set(seen[0].names)) == 3
    assert (seen[0].rows, seen[1].rows) == ([0, 2], [1, 3])
    # Whoever came second was told that it is there already, under a name that means this alone.
    assert {body["lora_name"] for body in loads} >= set(seen[0].names)
    assert all("none of the 2 servers" in one.refusal for one in seen)


@contextlib.contextmanager
def _servers(at: RankContext, group: FakeGroup) -> Iterator[list[FakeVllm]]:
    """In the process of rank 0, where the sender is."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(fake_vllm()) for _ in range(2 * (at.rank == 0))]
        for server in servers:
            server.is_dev, server.workers = True, group
        yield servers


def _with_whole_weights(at: RankContext, folder: Path) -> tuple[bool, list[int]]:
    group = FakeGroup()
    with at.connect(LAYOUT) as mesh, _servers(at, group) as servers:
        urls = gather_facts([one.url for one in servers], mesh.world, CPU)[0]
        trainer = _trainer(folder, mesh, None)
        assert isinstance(trainer.model, CausalLm)
        backend = VllmServerBackend(
            _spec(urls, folder), folder, mesh, sender=FakeSender(group), device=CPU
        )
        resharder = Resharder(trainer.model, "bfloat16", is_whole=backend.takes_whole)
        shards = resharder.run(dict(trainer.named_weights()), policy_version=7)
        backend.update_shard(shards, 7)
        rows = _rows(backend, at.rank)
        # Both name them alike, and neither would take those of a server that was started anew.
        assert len(set(gather_facts(backend._held.served.salt, mesh.world, CPU))) == 1
        expected = dict(_trainer(folder, RankMesh.single(), None).named_weights())
        is_right = True
        for server in servers:
            received = dict(group.received[server.url])
            is_right = is_right and received.keys() == expected.keys()
            for name, tensor in received.items():
                is_right = is_right and torch.equal(tensor, expected[name].to(torch.bfloat16))
        gather_facts(None, mesh.world, CPU)
        backend.close()
        resharder.close()
    return is_right, rows


def test_slices_are_put_together_and_broadcast_once(rank_pool: RankPool, folder: Path) -> None:
    assert rank_pool.run(_with_whole_weights, 2, folder) == [(True, [0, 2]), (True, [1, 3])]
