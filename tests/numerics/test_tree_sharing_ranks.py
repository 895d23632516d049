"""Rows packed as trees, on many ranks: against one rank without sharing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parallel_training import (
    Job,
    Trained,
    assert_metrics_agree,
    joined,
    make_trainer,
    part_of,
    record_gradients,
)
from support.rank_processes import RankContext, RankPool
from support.tiny_families import write_tiny_decoder
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch, with_shared_prompts
from support.updates import update_whole

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.specs import PpoPolicyLossSpec, PpoValueLossSpec

GRADIENT_TOLERANCE = 8e-6
"""Relative, of each gradient's norm: float32 sums in another order (test_parallel_training), here
also over tokens that are computed once and not in each row. The gradient of a head's norm is eight
numbers, sums over all tokens and heads that cancel: 5.2e-6 on a CPU with AVX-512 and no AMX."""

GROUP = 4
PROMPTS = (12,) * GROUP + (1,) * GROUP + (17,) * GROUP
COMPLETIONS = (4, 0, 9, 2, 5, 1, 3, 3, 12, 7, 0, 6)
VOCAB = 280

LAYOUTS = {
    "one rank": TrainLayout(),
    "tp2": TrainLayout(tp=2),
    "tp4 (2 kv heads)": TrainLayout(tp=4),
    "pp2": TrainLayout(pp=2),
    "dp2": TrainLayout(dp=2),
    "fsdp2": TrainLayout(dp=2, fsdp=2),
    "tp2-pp2-fsdp2": TrainLayout(tp=2, pp=2, dp=2, fsdp=2),
    "cp2": TrainLayout(dp=2, cp=2),
    "cp4 (2 kv heads)": TrainLayout(dp=4, cp=4),
    "tp2-pp2-cp2-fsdp2": TrainLayout(tp=2, pp=2, dp=2, cp=2, fsdp=2),
}


def update(at: RankContext, job: Job) -> tuple[Trained, int]:
    """A step over the whole batch, groups kept together; and rows that this rank shared in it."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        gradients = record_gradients(trainer)
        num_shared = 0
        run = trainer.rank_model.run

        def counting(passes: Any, *args: Any, **options: Any) -> None:
            nonlocal num_shared
            num_shared += sum(len(one.rows) for one in passes if one.shares)
            run(passes, *args, **options)

        trainer.rank_model.run = counting  # type: ignore[method-assign]
        metrics = update_whole(
            trainer, job.batch, job.loss, epochs=1, mini_batch_rows=12, seed=5, rows_per_unit=GROUP
        )
        return part_of(trainer, metrics, gradients), num_shared


@pytest.fixture(scope="module")
def batch() -> Experience:
    rows = with_shared_prompts(
        token_batch(prompt_lengths=PROMPTS, completion_lengths=COMPLETIONS, vocab_size=VOCAB), GROUP
    )
    old = rows["advantages"]
    noise_N = 0.3 * torch.randn(len(old.values), generator=torch.Generator().manual_seed(2))
    return rows | Experience(
        {"logprobs": Column(ColumnKind.COMPLETION, noise_N - 5.0, old.offsets)}
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "smollm2": write_tiny_llama(
            tmp_path_factory.mktemp("llama"), seed=4, vocab_size=VOCAB, num_layers=3
        ),
        "qwen3": write_tiny_decoder(
            tmp_path_factory.mktemp("qwen3"), "qwen3", vocab_size=VOCAB, tie_word_embeddings=True
        ),
    }


def _job(folder: Path, batch: Experience, kind: str, **model: Any) -> Job:
    loss = PpoPolicyLossSpec(entropy_coefficient=0.01) if kind == "policy" else PpoValueLossSpec()
    return Job(
        folder,
        batch,
        loss,
        kind=kind,  # type: ignore[arg-type]
        model={"micro_batch_tokens": 64, **model},
    )


@pytest.fixture(scope="module")
def unshared(rank_pool: RankPool) -> Any:
    """One rank without sharing, each job once."""
    known: dict[str, Trained] = {}

    def run(job: Job) -> Trained:
        key = f"{job.folder} {job.kind}"
        if key not in known:
            [(found, num_shared)] = rank_pool.run(
                update, 1, replace(job, model={**job.model, "share_prefixes": "never"})
            )
            assert num_shared == 0
            known[key] = joined([found], TrainLayout())
        return known[key]

    return run


def _assert_agree(rank_pool: RankPool, job: Job, layout: TrainLayout, expected: Trained) -> None:
    job = replace(job, layout=layout)
    parts = rank_pool.run(update, layout.world_size, job)
    # 12 rows in 3 groups; every rank of a replica has the same passes.
    by_replica = {layout.coordinates(rank).dp: shared for rank, (_, shared) in enumerate(parts)}
    assert sum(by_replica.values()) >= 2 * GROUP
    found = joined([part for part, _ in parts], layout)
    assert found.metrics["computed_fraction"] < expected.metrics["computed_fraction"] == 1
    assert_metrics_agree(found, expected)
    for name, gradient in expected.gradients[0].items():
        distance = (found.gradients[0][name].double() - gradient.double()).norm()
        assert float(distance / gradient.double().norm()) < GRADIENT_TOLERANCE, name


QUICK = {
    "policy": ("tp4 (2 kv heads)", "dp2", "cp4 (2 kv heads)", "tp2-pp2-cp2-fsdp2"),
    # A critic is spread as a policy is, but for its head.
    "critic": ("tp2-pp2-fsdp2",),
}
"""Of each way the most ranks; stages and FSDP are in the layouts of several ways."""


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(
            *(kind, layout),
            id=f"{kind}-{name}",
            marks=[] if name in names else [pytest.mark.slow],
        )
        for kind, names in QUICK.items()
        for name, layout in LAYOUTS.items()
    ],
)
def test_gradients_agree_with_one_rank_that_shares_nothing(
    rank_pool: RankPool,
    folders: dict[str, Path],
    batch: Experience,
    unshared: Any,
    kind: str,
    layout: TrainLayout,
) -> None:
    job = _job(folders["smollm2"], batch, kind)
    _assert_agree(rank_pool, job, layout, unshared(job))


@pytest.mark.parametrize("recompute", [pytest.param("selective", marks=pytest.mark.slow), "full"])
def test_recomputed_activations_agree_on_all_axes(
    rank_pool: RankPool,
    folders: dict[str, Path],
    batch: Experience,
    unshared: Any,
    recompute: str,
) -> None:
    job = _job(folders["smollm2"], batch, "policy", recompute=recompute)
    _assert_agree(rank_pool, job, LAYOUTS["tp2-pp2-fsdp2"], unshared(job))


def test_slices_that_share_tokens_share_prompts_too(
    rank_pool: RankPool, folders: dict[str, Path], batch: Experience, unshared: Any
) -> None:
    job = _job(folders["qwen3"], batch, "policy")
    # A group in a pass: 42, 27 and 13 tokens, which two slices do not divide evenly.
    options = {"sequence_parallel": True, "recompute": "full", "micro_batch_tokens": 30}
    sharing = replace(job, model=options)
    _assert_agree(rank_pool, sharing, LAYOUTS["tp2"], unshared(job))
    # Of a rank's part of a row, too: 21, 14 and 7 tokens.
    _assert_agree(rank_pool, sharing, TrainLayout(tp=2, dp=2, cp=2), unshared(job))


@pytest.mark.parametrize(
    "name", ["tp4 (2 kv heads)", pytest.param("tp2-pp2-fsdp2", marks=pytest.mark.slow)], ids=str
)
def test_norms_of_heads_agree(
    rank_pool: RankPool, folders: dict[str, Path], batch: Experience, unshared: Any, name: str
) -> None:
    job = _job(folders["qwen3"], batch, "policy")
    _assert_agree(rank_pool, job, LAYOUTS[name], unshared(job))
