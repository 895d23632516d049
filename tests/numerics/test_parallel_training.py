"""Training on many ranks against training on one: losses, every gradient, three steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parallel_training import Job, Tensors, Trained, joined, near_policy, train
from support.rank_processes import RankPool
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch

from rolemesh.engine.layout import TrainLayout
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec, PpoValueLossSpec
from rolemesh.engine.train.trainer import Trainer

GRADIENT_TOLERANCE = 5e-6
"""Relative, of the norm of each gradient: float32 sums in another order (over slices, over rows
that lie on other ranks). With weights as wide as these, one rank's own gradients are 1.3e-6 from
float64 (test_trainer), and both sides err."""
STEP_TOLERANCE = 2e-5
"""Absolute, of a weight after three steps of 1e-3: a step is the rate times a ratio of moments, and
where the second moment is small, the last bits of a gradient are a hundredth of it."""
METRIC_TOLERANCE = 1e-5
"""Relative (absolute below 1): sums of float32 numbers that differ in their last bits."""

POLICY_LOSS = PpoPolicyLossSpec(entropy_coefficient=0.01, kl_in_loss=0.1)
VALUE_LOSS = PpoValueLossSpec()
LAYERS = 3
"""Not a multiple of two stages."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Tied and untied."""
    return {
        tied: write_tiny_llama(
            tmp_path_factory.mktemp("llama"), seed=4, tied=tied, num_layers=LAYERS
        )
        for tied in (True, False)
    }


@pytest.fixture(scope="module")
def jobs(folders: dict[bool, Path]) -> dict[tuple[str, bool], Job]:
    """By kind and tied."""
    made = {}
    for tied, folder in folders.items():
        batch = token_batch()
        trainer = Trainer.policy(ModelSpec(path=folder, compute_dtype="float32"), OptimizerSpec())
        scored = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
        made["policy", tied] = Job(folder, near_policy(batch, scored), POLICY_LOSS)
        made["critic", tied] = Job(folder, batch, VALUE_LOSS, kind="critic")
    return made


@pytest.fixture(scope="module")
def alone(rank_pool: RankPool) -> Any:
    """Trains a job on one rank, once: in a process like the others, with as many threads."""
    known: dict[str, Trained] = {}

    def run(job: Job) -> Trained:
        job = replace(job, layout=TrainLayout(), model={})
        key = f"{job.folder} {job.kind} {job.mini_batch_rows} {job.optimizer}"
        if key not in known:
            known[key] = joined(rank_pool.run(train, 1, job), job.layout)
        return known[key]

    return run


def _spread(pool: RankPool, job: Job) -> Trained:
    return joined(pool.run(train, job.layout.world_size, job), job.layout)


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left.double() - right.double()).norm() / right.double().norm().clamp_min(1e-12))


def _assert_gradients_agree(found: list[Tensors], expected: list[Tensors]) -> None:
    assert len(found) == len(expected) == 3
    # The first step's alone: later ones are gradients of weights that already differ.
    assert found[0].keys() == expected[0].keys()
    for name, gradient in expected[0].items():
        assert _distance(found[0][name], gradient) < GRADIENT_TOLERANCE, name


def _assert_agree(found: Trained, expected: Trained) -> None:
    assert found.metrics.keys() == expected.metrics.keys()
    for name, number in expected.metrics.items():
        assert found.metrics[name] == pytest.approx(
            number, rel=METRIC_TOLERANCE, abs=METRIC_TOLERANCE
        ), name
    _assert_gradients_agree(found.gradients, expected.gradients)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=STEP_TOLERANCE)


LAYOUTS = {
    "tp2": TrainLayout(tp=2),
    "tp4 (2 kv heads)": TrainLayout(tp=4),
    "pp2": TrainLayout(pp=2),
    "pp3": TrainLayout(pp=3),
    "fsdp2": TrainLayout(dp=2, fsdp=2),
    "dp2": TrainLayout(dp=2),
    "hsdp2x2": TrainLayout(dp=4, fsdp=2),
    "tp2-dp2": TrainLayout(tp=2, dp=2),
    "tp2-fsdp2": TrainLayout(tp=2, dp=2, fsdp=2),
    "pp2-fsdp2": TrainLayout(pp=2, dp=2, fsdp=2),
    "pp2-dp2": TrainLayout(pp=2, dp=2),
    "tp2-pp2-fsdp2": TrainLayout(tp=2, pp=2, dp=2, fsdp=2),
    "tp2-pp2-dp2": TrainLayout(tp=2, pp=2, dp=2, order="tp-dp-pp"),
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_three_steps_of_a_policy_agree_with_one_rank(
    rank_pool: RankPool,
    jobs: dict[tuple[str, bool], Job],
    alone: Any,
    layout: TrainLayout,
    tied: bool,
) -> None:
    job = replace(jobs["policy", tied], layout=layout)
    _assert_agree(_spread(rank_pool, job), alone(job))
