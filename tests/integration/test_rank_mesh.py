"""Whole runs whose roles are spread over ranks: the real command line, real services, real vLLM."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from support.commands import command_of
from support.mesh_runs import CliRun, tiny_model, tiny_recipe
from support.tiny_models import write_tiny_classifier

pytestmark = pytest.mark.slow

START_S = 300
"""A rank imports torch and vLLM in seconds on a quiet machine; here eight processes do at once."""

LOSS_DEADLINE_S = 10
"""A lost rank ends the run within this time."""

SAME_CURVE = 1e-4
"""Relative difference of metrics after three steps of two optimizer steps each. Sums over ranks
round otherwise than sums within one, by 1e-7 a step; Adam's first steps divide by their own size,
which makes more of it (seen: 4e-6)."""

NOISE = 1e-6
"""Metrics this close to 0 are differences of equal numbers, e.g. the KL before the first update."""

SPREAD = {
    "actor__train": {"tp": 2, "dp": 2, "fsdp": 1},
    "actor__generate": {"tp": 1},
    "critic__train": {"dp": 2},
    "reference__layout": {"pp": 2},
    "reward__layout": {"dp": 2},
}
"""The actor is the paper's 1-2-2 -> 1-1-2-2; the critic cuts its weights over two ranks (FSDP), the
reference has two pipeline stages."""


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    """What all runs have in common: a policy, a judge with rewards that differ, real vLLM."""
    folder = tmp_path_factory.mktemp("models")
    judge = write_tiny_classifier(folder / "judge", seed=4)
    return {
        "model": tiny_model(folder / "tiny"),
        "run__steps": 3,
        "actor__rollout": {
            "type": "vllm",
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 8,
        },
        "reward__source": {
            "type": "classifier",
            "model": {"path": str(judge), "compute_dtype": "float32"},
        },
    }


def begin(folder: Path, shape: dict, *, is_warm: bool = True, **changes) -> CliRun:
    parts = {name: value for name, value in shape.items() if name != "model"}
    return CliRun(tiny_recipe(shape["model"], **(parts | changes)), folder, is_warm=is_warm)


@pytest.fixture(scope="module")
def runs(shape, tmp_path_factory):
    """One run with a rank a role, and one whose roles are spread over ten ranks."""
    finished = {}
    for name, changes in (("alone", {}), ("spread", SPREAD)):
        run = begin(tmp_path_factory.mktemp(name), shape, **changes)
        try:
            assert run.wait(START_S) == 0, run.output
        finally:
            run.close()
        finished[name] = run
    return finished


def test_ranks_give_the_curve_of_one_rank(runs):
    alone, spread = runs["alone"].metrics(), runs["spread"].metrics()
    assert len(alone) == len(spread) == 3
    compared = 0
    for one, many in zip(alone, spread, strict=True):
        for name, value in one.items():
            if not name.endswith(("_loss", "/mean", "grad_norm")):
                continue
            compared += 1
            assert math.isclose(value, many[name], rel_tol=SAME_CURVE, abs_tol=NOISE), name
    assert compared >= 3 * 6


def test_ranks_sample_the_very_tokens_of_one_rank(runs):
    lengths = [[step["completion_length/mean"] for step in run.metrics()] for run in runs.values()]
    assert lengths[0] == lengths[1]


def test_sampler_and_trainer_agree_over_ranks(runs):
    for step in runs["spread"].metrics():
        assert step["sampler_logprob_diff_mean"] < 1e-5


def test_half_of_a_model_travels_to_each_rank_and_none_to_one_rank(runs):
    # 1-2-2 -> 1-1-2-2 with float32 weights: a rank has one of two slices; norms are on both.
    weights = load_file(runs["spread"].out / "model" / "model.safetensors")
    cut = sum(weight.numel() for weight in weights.values() if weight.dim() == 2)
    # The untrained weights came with the evaluation before the first step.
    received = [step["weight_sync_bytes"] for step in runs["spread"].metrics()]
    assert received == [0, 4 * cut / 2, 4 * cut / 2]
    assert [step["weight_sync_bytes"] for step in runs["alone"].metrics()] == [0] * 3


def test_memory_is_reported_for_each_rank_and_phase(runs):
    for step in runs["spread"].metrics():
        for phase in ("generate", "weight_sync", "update_actor", "update_critic", "values"):
            assert step[f"memory/{phase}_peak_bytes"] > 50 << 20
    graph = (runs["spread"].out / "dataflow.jsonl").read_text().splitlines()[-1]
    nodes = {
        f"{node['role']}.{node['method']}": node["peak_bytes"]
        for node in json.loads(graph)["nodes"]
    }
    assert set(nodes["actor.update"]["compute"]) == {"0", "1", "2", "3"}


def test_the_exported_models_are_alike(runs):
    one, many = (load_file(run.out / "model" / "model.safetensors") for run in runs.values())
    assert one.keys() == many.keys()
    for name, tensor in one.items():
        # bfloat16 in the file: a value near a rounding border may fall to the other side.
        difference = (tensor.float() - many[name].float()).abs().max()
        assert float(difference) <= 2**-7 * float(tensor.float().abs().max()), name


def test_the_summary_is_that_of_a_run_like_any_other(runs):
    summary = json.loads((runs["spread"].out / "summary.json").read_text())
    assert summary["steps"] == 3


def test_a_killed_rank_ends_a_run_that_does_not_recover_and_is_named(shape, tmp_path):
    changes = {"run__steps": 200, "run__recovery": {"attempts": 0}}
    run = begin(tmp_path, shape, is_warm=False, **(SPREAD | changes))
    try:
        run.wait_until(lambda: len(run.metrics()) >= 1, START_S)
        family = run.descendants()
        victim = next(
            process
            for process in family
            if "rolemesh.services.actor" in command_of(process)
            and process.environ().get("RANK") == "3"
        )
        started = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        assert run.wait(60) == 1
        assert time.monotonic() - started < LOSS_DEADLINE_S
        assert f"actor rank 3 (pid {victim.pid}) was killed by signal 9 (SIGKILL)" in run.stderr
        assert "error: step" in run.stderr
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive, alive
    finally:
        run.close()
