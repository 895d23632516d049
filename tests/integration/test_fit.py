"""Tests of `rolemesh fit` as people call it: a table, JSON, and what to change."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import warm_processes
from support.public_models import config_folder

from rolemesh.coordinator.recipe.loading import load_recipe

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = sorted((REPOSITORY / "recipes" / "gpu").glob("*.yaml"))

ON_CPU = "pools={main: {devices: [cpu], roles: [actor, critic, reference, reward]}}"

RECIPE = """
run: {{name: fit, steps: 1, prompts_per_step: 8}}
algorithm: {{type: ppo, sampling: {{max_new_tokens: 96}}}}
actor:
  model: {{path: {model}, micro_batch_tokens: 256}}
  rollout: {{type: vllm, max_model_len: 128}}
  data: {{type: jsonl, path: data.jsonl}}
critic: {{model: {{path: {model}, micro_batch_tokens: 256}}}}
reference: {{model: {{path: {model}, micro_batch_tokens: 256}}}}
reward: {{source: {{type: arithmetic}}}}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fit")
    model = config_folder(directory, "Qwen2.5-0.5B-Instruct", num_hidden_layers=2)
    path = directory / "recipe.yaml"
    path.write_text(RECIPE.format(model=model))
    return path


def fit(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rolemesh.coordinator.commands.cli", "fit", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "COLUMNS": "100", **warm_processes.everything()},
    )


@pytest.mark.slow
def test_every_role_and_moment_is_told(recipe: Path) -> None:
    completed = fit(recipe, "--gpu", "h100", "--count", "1", "--json")
    assert completed.returncode == 0, completed.stderr
    told = json.loads(completed.stdout)
    assert told["gpu"]["bytes_each"] == 80 * 10**9
    (pool,) = told["pools"]
    assert {moment["what"] for moment in pool["moments"]} == {
        "actor trains",
        "actor samples",
        "critic trains",
        "reference scores",
    }
    actor, critic = told["roles"]["actor"], told["roles"]["critic"]
    assert actor["peak"] == sum(actor["at_peak"].values()) > actor["rest"] > 0
    # Its head is one row, and the embedding is no head.
    assert critic["at_peak"]["weights"] == pytest.approx(actor["at_peak"]["weights"], rel=0.01)
    assert critic["at_peak"]["head"] < actor["at_peak"]["head"]
    assert pool["headroom"] == 80 * 10**9 - max(m["total"] for m in pool["moments"])


def test_adapters_take_their_base_and_factors(recipe: Path) -> None:
    """The actor scores as the reference does; vLLM has a slot, and gets the factors alone."""
    adapters = [f"{role}.model.adapter={{rank: 8}}" for role in ("actor", "critic")]
    settings = [f"--set={one}" for one in (*adapters, "reference.model=null")]
    completed = fit(recipe, "--gpu", "h100", "--count", "1", "--json", *settings)
    assert completed.returncode == 0, completed.stderr
    told = json.loads(completed.stdout)
    assert set(told["roles"]) == {"actor", "critic"}
    factors = 2 * 8 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864))
    for role in told["roles"].values():
        assert role["at_rest"]["optimizer"] == pytest.approx(8 * factors, rel=0.01)
        assert role["at_rest"]["weights"] < 2.2 * (151936 * 896 + 2 * 15e6)
    assert told["roles"]["actor"]["sampler"]["arriving"] == 4 * factors


def test_what_does_not_fit_is_told_with_keys_to_change(recipe: Path) -> None:
    completed = fit(recipe, "--gpu", "4", "--count", "1")
    assert completed.returncode == 1, completed.stderr
    assert "does not fit" in completed.stdout
    assert "-> actor.optimizer.offload: true" in completed.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--gpu", "h1000", "--count", "1"], "--gpu is 'h1000': give one of a100-40"),
        (["--gpu", "h100"], "--count is missing"),
        (["--gpu", "h100", "--count", "1", "--set", ON_CPU], "devices [cpu]"),
        (["--gpu", "h100", "--count", "1", "--set", "actor.model.path=none"], "no config.json"),
    ],
)
def test_bad_input_is_named(recipe: Path, arguments: list[str], text: str) -> None:
    completed = fit(recipe, *arguments)
    assert completed.returncode == 2, completed.stderr
    assert text in completed.stderr


def test_there_are_recipes_for_one_to_eight_gpus() -> None:
    numbers = []
    for path in RECIPES:
        loaded = load_recipe([path])
        assert loaded.run.name == path.stem
        assert "Needs at most" in path.read_text()
        numbers.append(
            max(
                len(pool.devices)
                for pool in loaded.pools.values()
                if any(role in loaded.roles and loaded.has_model(role) for role in pool.roles)
            )
        )
    assert sorted(numbers) == [1, 1, 1, 2, 4, 8, 8, 8]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_for_gpus_needs_what_it_says(path: Path, tmp_path: Path) -> None:
    """Minutes: the whole models."""
    text = path.read_text()
    loaded = load_recipe([path])
    settings = []
    for role in ("actor", "critic", "reference"):
        section = getattr(loaded, role)
        # A reference without a model is the actor's base.
        if section is not None and section.model is not None:
            folder = config_folder(tmp_path, section.model.path.name)
            settings += ["--set", f"{role}.model.path={folder}"]
    (gpu, count) = re.findall(r"--gpu (\S+) --count (\d+)", text)[0]
    (needs,) = re.findall(r"Needs at most (\d+) GiB", text)
    completed = fit(path, "--gpu", gpu, "--count", count, "--json", *settings)
    assert completed.returncode == 0, completed.stderr
    told = json.loads(completed.stdout)
    (pool,) = told["pools"]
    most = max(moment["total"] for moment in pool["moments"])
    assert int(needs) * 2**30 * 0.85 < most <= int(needs) * 2**30
    assert pool["advice"] == []
    if "7b" in path.stem:
        assert pool["headroom"] > 0.2 * pool["gpu_bytes"]
