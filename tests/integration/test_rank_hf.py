"""A run whose actor samples with transformers on the ranks that train, against one rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
from safetensors.torch import load_file
from support.mesh_runs import CliRun, tiny_model, tiny_recipe
from support.tiny_models import write_tiny_classifier

RUN_S = 300
"""A run of seconds, on a machine that may start many others."""

SAME_CURVE = 1e-4
"""Relative difference of metrics after two steps of two optimizer steps each: sums over ranks round
otherwise than sums within one, by 1e-7 a step, and Adam's first steps divide by their own size."""

NOISE = 1e-6
"""Metrics this close to 0 are differences of equal numbers."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    # 1-2-1 -> 1-1: float32 weights of which each rank has a slice, so it shares what it has.
    "tensor slices": {"actor__train": {"tp": 2}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CliRun]:
    folder = tmp_path_factory.mktemp("models")
    # Rewards that differ: a critic that learns from rounding alone learns something else each time.
    judge = {"path": str(write_tiny_classifier(folder / "judge", seed=4))}
    shape = {
        "actor__rollout": {"type": "hf", "max_model_len": 256},
        "reward__source": {"type": "classifier", "model": judge | {"compute_dtype": "float32"}},
    }
    model = tiny_model(folder / "tiny")
    finished = {}
    for name, changes in LAYOUTS.items():
        recipe = tiny_recipe(model, **(shape | changes))
        run = CliRun(recipe, tmp_path_factory.mktemp("run"))
        try:
            assert run.wait(RUN_S) == 0, run.output
        finally:
            run.close()
        finished[name] = run
    return finished


def test_two_ranks_sample_the_tokens_of_one_and_train_alike(runs: dict[str, CliRun]) -> None:
    alone, spread = runs["one rank"].metrics(), runs["tensor slices"].metrics()
    assert len(alone) == len(spread) == 2
    compared = 0
    for one, many in zip(alone, spread, strict=True):
        assert one["completion_length/mean"] == many["completion_length/mean"]
        for name, value in one.items():
            if name.endswith(("_loss", "/mean", "grad_norm")):
                compared += 1
                assert math.isclose(value, many[name], rel_tol=SAME_CURVE, abs_tol=NOISE), name
        # The sampler has the trainer's weights of this very step.
        assert many["sampler_logprob_diff_mean"] < 1e-5
    assert compared >= 2 * 6


def test_each_rank_receives_the_slice_that_it_lacks(runs: dict[str, CliRun]) -> None:
    weights = load_file(runs["tensor slices"].out / "model" / "model.safetensors")
    cut = sum(weight.numel() for weight in weights.values() if weight.dim() == 2)
    # Scores and training take the shared weights back, so that each generation after them brings
    # weights; those of the first came with the evaluation before the first step.
    received = {
        name: [step["weight_sync_bytes"] for step in run.metrics()] for name, run in runs.items()
    }
    assert received == {
        "one rank": [0, 0],
        "tensor slices": [0, 4 * cut / 2],
    }
