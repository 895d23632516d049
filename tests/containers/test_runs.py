"""Runs on a mesh of containers, as docs/containers.md says to make them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.container_mesh import FIRST_RUN, HEALTHY_TIMEOUT_S, RUN_TIMEOUT_S, ContainerMesh
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1200)]

NUM_STEPS = 2
NUM_HELD_OUT = 16


@pytest.fixture(scope="module")
def exit_status(mesh: ContainerMesh) -> int:
    """How `up -d` and `wait` say that the first run ended."""
    mesh.compose("up", "--detach", "coordinator", timeout_s=HEALTHY_TIMEOUT_S)
    waited = mesh.compose("wait", "coordinator", timeout_s=RUN_TIMEOUT_S, check=False)
    return waited.returncode


@pytest.fixture(scope="module")
def files(
    mesh: ContainerMesh, exit_status: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The first run's files, copied out of the volume."""
    target = tmp_path_factory.mktemp("copied") / "runs"
    mesh.compose("cp", "coordinator:/mesh/runs", str(target), timeout_s=300.0)
    yield target / FIRST_RUN
    # Model and checkpoints are 2.4 GB, and pytest keeps its folders.
    shutil.rmtree(target)


def read_metrics(files: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (files / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_succeeds_ends_its_container_with_0(
    mesh: ContainerMesh, exit_status: int
) -> None:
    assert exit_status == 0, mesh.compose("logs", "coordinator").stdout
    assert mesh.state("coordinator")["ExitCode"] == 0


def test_every_step_of_a_run_learned_from_rewards(files: Path) -> None:
    steps = read_metrics(files)
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    for step in steps:
        assert all(math.isfinite(value) for value in step.values())
        assert 0.0 <= step["reward/min"] <= step["reward/mean"] <= step["reward/max"] <= 1.0
        assert step["entropy"] > 0.0
        assert step["actor/grad_norm"] > 0.0
        assert step["critic/grad_norm"] > 0.0
        assert step["tokens"] > 0
    # The second step's trajectories come from weights that the first one made.
    assert steps[1]["policy_version/min"] > steps[0]["policy_version/max"]


def test_the_summary_holds_the_score_on_held_out_prompts(files: Path) -> None:
    summary = json.loads((files / "summary.json").read_text())
    assert summary["state"] == "succeeded"
    assert summary["steps"] == NUM_STEPS
    for moment in ("before", "after"):
        evaluation = summary["held_out"][moment]
        assert evaluation["num_prompts"] == NUM_HELD_OUT
        assert 0.0 <= evaluation["score"] <= 1.0
        assert 0.0 <= evaluation["metrics"]["accuracy/mean"] <= 1.0


def test_the_trained_model_loads_from_the_copied_folder(files: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(files / "model", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(files / "model", local_files_only=True)
    assert model.num_parameters() > 100_000_000
    prompt = tokenizer("2 + 2 =", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=2).shape[1] > prompt["input_ids"].shape[1]
