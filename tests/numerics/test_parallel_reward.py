"""Losses on pairs and a reward model on many ranks against one: pairs stay whole everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.parallel_training import Job, Trained, assert_metrics_agree, joined, near_policy, train
from support.rank_processes import RankPool
from support.tiny_models import write_tiny_classifier, write_tiny_llama
from support.token_batches import token_batch

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.engine.specs import BradleyTerryLossSpec, DpoLossSpec

GRADIENT_TOLERANCE = 5e-6
"""Relative, of the norm of each gradient; see test_parallel_training."""
STEP_TOLERANCE = 2e-5
"""Absolute, of a weight after two steps of 1e-3; see test_parallel_training."""
CASES = {
    "reward tp2": ("reward", TrainLayout(tp=2)),
    "reward pp2": ("reward", TrainLayout(pp=2)),
    "reward fsdp2": ("reward", TrainLayout(dp=2, fsdp=2)),
    "reward dp4": ("reward", TrainLayout(dp=4)),
    "dpo pp2-dp2": ("dpo", TrainLayout(pp=2, dp=2)),
    "dpo dp4": ("dpo", TrainLayout(dp=4)),
    "reward cp2-fsdp4": ("reward", TrainLayout(dp=4, cp=2, fsdp=4)),
    "dpo pp2-cp2": ("dpo", TrainLayout(pp=2, dp=2, cp=2)),
}
"""dp4 deals two pairs of a mini-batch to four replicas: two have none."""


def _pairs() -> Experience:
    """Four pairs of neighbours."""
    preference = torch.tensor([1, -1, -1, 1, 1, -1, 1, -1], dtype=torch.float32)
    return token_batch() | Experience(
        {
            "pair_ids": Column(ColumnKind.ROW, torch.arange(8) // 2),
            "preference": Column(ColumnKind.ROW, preference),
        }
    )


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    classifier = write_tiny_classifier(tmp_path_factory.mktemp("classifier"), seed=4)
    llama = write_tiny_llama(tmp_path_factory.mktemp("llama"), seed=4)
    batch = _pairs()
    logprobs = -torch.rand(
        len(batch["loss_mask"].values), generator=torch.Generator().manual_seed(3)
    )
    column = Column(ColumnKind.COMPLETION, logprobs, batch["loss_mask"].offsets)
    options: dict[str, Any] = {"mini_batch_rows": 4, "rows_per_unit": 2}
    return {
        "reward": Job(
            classifier, batch, BradleyTerryLossSpec(centering=0.01), kind="reward", **options
        ),
        "dpo": Job(llama, near_policy(batch, column), DpoLossSpec(), **options),
    }


@pytest.fixture(scope="module")
def alone(rank_pool: RankPool, jobs: dict[str, Job]) -> dict[str, Trained]:
    return {name: joined(rank_pool.run(train, 1, job), job.layout) for name, job in jobs.items()}


@pytest.mark.parametrize(("kind", "layout"), CASES.values(), ids=CASES)
def test_two_steps_on_pairs_agree_with_one_rank(
    rank_pool: RankPool,
    jobs: dict[str, Job],
    alone: dict[str, Trained],
    kind: str,
    layout: TrainLayout,
) -> None:
    job = replace(jobs[kind], layout=layout)
    found = joined(rank_pool.run(train, layout.world_size, job), layout)
    expected = alone[kind]
    assert_metrics_agree(found, expected)
    # The first step's alone: later ones are gradients of weights that already differ.
    for name, gradient in expected.gradients[0].items():
        size = gradient.double().norm().clamp_min(1e-12)
        distance = (found.gradients[0][name].double() - gradient.double()).norm() / size
        assert float(distance) < GRADIENT_TOLERANCE, name
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=STEP_TOLERANCE)
