"""Tests that a trainer delivers to vLLM what vLLM loads from its export, bit by bit.

Slow: each test loads vLLM in several processes, which takes minutes on two cores.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.family_cases import CASES
from support.parallel_training import Job, make_trainer, near_policy
from support.planned_bytes import planned_received
from support.rank_processes import RankContext, RankPool
from support.tiny_families import write_tiny_decoder
from support.tiny_models import HEAD_DIM, write_tiny_llama
from support.token_batches import token_batch
from support.updates import update_whole

from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import (
    ModelSpec,
    OptimizerSpec,
    PpoPolicyLossSpec,
    SamplingSpec,
    VllmSpec,
)
from rolemesh.engine.train.trainer import Trainer
from rolemesh.engine.transport.base import TransferFailedError
from rolemesh.engine.weights.resharding import Resharder

pytestmark = pytest.mark.slow

SPEC = VllmSpec(dtype="float32", max_model_len=64, max_num_seqs=8)
LOAD_TIMEOUT_S = 500.0
"""For two loads of vLLM in four processes on a machine that does other work."""

PAPER = HybridLayout(TrainLayout(tp=2, dp=2, fsdp=2), GenerateLayout(tp=1))
"""1-2-2 to 1-1-2-2, the trained weights cut once more by FSDP."""
SLICES = HybridLayout(TrainLayout(tp=4), GenerateLayout(tp=2))
"""More training slices than key-value heads, and slices on both sides."""


@dataclass
class Delivered:
    """What the sampler of a rank held."""

    before: dict[str, str]
    """Checksums with the weights that training began with."""
    resharded: dict[str, str]
    """After one optimizer step and one run of the resharder."""
    loaded: dict[str, str]
    """Of another engine, which loaded the export itself."""
    received_bytes: int
    planned_bytes: int


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    # Not the session's: a process that has imported vLLM is two gigabytes larger.
    with RankPool(4) as ranks:
        yield ranks


def make_job(folder: Path, layout: TrainLayout) -> Job:
    batch = token_batch()
    trainer = Trainer.policy(ModelSpec(path=folder, compute_dtype="float32"), OptimizerSpec())
    scored = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
    return Job(folder, near_policy(batch, scored), PpoPolicyLossSpec(), layout=layout)


def step_and_deliver(at: RankContext, job: Job, layout: HybridLayout, export: Path) -> Delivered:
    """One optimizer step; its weights by the resharder, and by a fresh load of the export."""
    with at.connect(layout, timeout_s=LOAD_TIMEOUT_S) as mesh:
        trainer = make_trainer(job, at, mesh)
        backend = VllmBackend(SPEC, job.folder, mesh)
        assert isinstance(trainer.model, CausalLm)
        with Resharder(trainer.model, "float32") as resharder:
            checksums = []
            for _ in range(2):
                version = trainer.policy_version
                shards = resharder.run(dict(trainer.named_weights()), policy_version=version)
                backend.update_shard(shards, version)
                assert backend.policy_version == version
                checksums.append(dict(backend.weight_checksums()))
                if version == 0:
                    rows = len(job.batch["tokens"].lengths())
                    update_whole(
                        trainer, job.batch, job.loss, epochs=1, mini_batch_rows=rows, seed=5
                    )
            assert trainer.policy_version == 1
            received, planned = resharder.received_bytes, planned_received(resharder.plan, at.rank)
        trainer.export(export, "float32")
        backend.close()
        backend = VllmBackend(SPEC, export, mesh, folder_version=1)
        checksums.append(dict(backend.weight_checksums()))
        backend.close()
        return Delivered(*checksums, received_bytes=received, planned_bytes=planned)


def assert_delivered(ranks: list[Delivered]) -> None:
    for rank in ranks:
        assert rank.resharded == rank.loaded
        # Every parameter moved, so that a tensor left as it was would show; no gradient moves
        # a bias of experts.
        assert rank.before.keys() == rank.resharded.keys()
        unmoved = [name for name, _ in rank.before.items() & rank.resharded.items()]
        assert all(name.endswith(".e_score_correction_bias") for name in unmoved), unmoved
        assert rank.received_bytes == rank.planned_bytes


def test_a_tied_llama_arrives_as_its_export_loads(pool: RankPool, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "llama", tied=True)
    job = make_job(folder, PAPER.train)
    ranks = pool.run(step_and_deliver, 4, job, PAPER, tmp_path / "export", timeout_s=LOAD_TIMEOUT_S)
    assert_delivered(ranks)
    # Four samplers of one slice: all hold the same.
    assert all(rank.resharded == ranks[0].resharded for rank in ranks)


def test_a_qwen2_with_biases_arrives_as_its_export_loads(pool: RankPool, tmp_path: Path) -> None:
    folder = write_tiny_decoder(
        tmp_path / "qwen2",
        "qwen2",
        vocab_size=512,
        eos_token_id=2,
        hidden_size=4 * HEAD_DIM,
        head_dim=HEAD_DIM,
        tie_word_embeddings=False,
    )
    job = make_job(folder, SLICES.train)
    ranks = pool.run(
        step_and_deliver, 4, job, SLICES, tmp_path / "export", timeout_s=LOAD_TIMEOUT_S
    )
    assert_delivered(ranks)
    assert "model.layers.0.self_attn.q_proj.bias" in ranks[0].resharded
    # Two samplers of two slices each: ranks 0 and 2, ranks 1 and 3.
    assert ranks[0].resharded == ranks[1].resharded != ranks[2].resharded == ranks[3].resharded


@pytest.mark.parametrize(
    ("name", "train", "generate"),
    [
        ("phi3", TrainLayout(tp=2), GenerateLayout(tp=1)),
        ("olmo2", TrainLayout(tp=2), GenerateLayout(tp=2)),
        ("qwen3_moe", TrainLayout(tp=2, dp=2, fsdp=2, ep=2), GenerateLayout(tp=2)),
        ("glm4_moe", TrainLayout(dp=4, fsdp=4, ep=2), GenerateLayout()),
    ],
    ids=["fused files, joined", "norms that vLLM holds whole", "experts", "experts and a bias"],
)
def test_what_vllm_cuts_otherwise_arrives_as_its_export_loads(
    pool: RankPool, tmp_path: Path, name: str, train: TrainLayout, generate: GenerateLayout
) -> None:
    family, fields = CASES[name]
    sizes = {"vocab_size": 512, "eos_token_id": 2, "hidden_size": 4 * HEAD_DIM}
    sizes["head_dim"] = HEAD_DIM
    if "moe_intermediate_size" in fields:
        # Few enough, and chosen by enough tokens, that a step moves each of them.
        sizes |= {"moe_intermediate_size": 64, "num_experts": 4, "n_routed_experts": 4}
    folder = write_tiny_decoder(tmp_path / "model", family, **{**fields, **sizes})
    layout = HybridLayout(train, generate)
    job = make_job(folder, layout.train)
    ranks = pool.run(
        step_and_deliver,
        layout.world_size,
        job,
        layout,
        tmp_path / "export",
        timeout_s=LOAD_TIMEOUT_S,
    )
    assert_delivered(ranks)


def die_after_one(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    for number, pair in enumerate(tensors):
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield pair


def lose_a_rank(at: RankContext, folder: Path, layout: HybridLayout) -> tuple[str, int, str]:
    """Error of the update, version afterwards, and how vLLM refuses to generate."""
    with at.connect(layout, timeout_s=LOAD_TIMEOUT_S) as mesh:
        trainer = Trainer.policy(
            ModelSpec(path=folder, compute_dtype="float32"), OptimizerSpec(), mesh=mesh
        )
        backend = VllmBackend(SPEC, folder, mesh)
        assert isinstance(trainer.model, CausalLm)
        resharder = Resharder(trainer.model, "float32")
        weights = dict(trainer.named_weights())
        backend.update_shard(resharder.run(weights, policy_version=1), 1)
        tensors = resharder.run(weights, policy_version=2)
        with pytest.raises(TransferFailedError) as caught:
            backend.update_shard(die_after_one(tensors) if at.rank == 1 else tensors, 2)
        with pytest.raises(WeightsStaleError) as refused:
            backend.generate([RolloutRequest(row=0, prompt_tokens=[5], seed=0)], SamplingSpec())
        return str(caught.value), backend.policy_version, str(refused.value)


def test_vllm_is_quarantined_when_a_rank_is_killed_mid_transfer(
    pool: RankPool, tmp_path: Path
) -> None:
    folder = write_tiny_llama(tmp_path / "llama")
    layout = HybridLayout(TrainLayout(tp=2), GenerateLayout(tp=1))
    survivor, killed = pool.outcomes(lose_a_rank, 2, folder, layout, timeout_s=LOAD_TIMEOUT_S)
    assert "died with exit code -9" in str(killed.failure)
    assert survivor.failure is None, survivor.failure
    error, version, refusal = survivor.value
    assert "with rank 1 over process memory" in error
    assert version == -1
    assert f"the update to policy_version 2 failed: {error}" in refusal
