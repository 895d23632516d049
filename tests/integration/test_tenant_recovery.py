"""A service that two runs share is killed: both go on from their cuts, to the same bits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.learning_runs import ServiceOfRole, learn
from support.learning_tasks import LETTERS, model_of, sampled_recipe, write_task
from support.run_results import learnt, written

STEPS = 4
SEEDS = (1, 2)


@dataclass(frozen=True)
class Case:
    """How the actor is spread."""

    flags: tuple[str, ...]
    section: Mapping[str, Any]


CASES = {
    "one rank": Case((), {}),
    "two slices": Case(("--layout", "tp=2"), {"train": {"tp": 2}, "generate": {"tp": 1}}),
}


def _recipe(task: Path, seed: int, case: Case) -> dict[str, Any]:
    recipe = sampled_recipe(task, {"type": "grpo"}, seed=seed, steps=STEPS, worth={LETTERS: 1.0})
    recipe["actor"]["model"] = {**model_of(task / "model"), "adapter": {"rank": 4}}
    recipe["actor"] |= case.section
    recipe["run"]["name"] = f"seed-{seed}"
    return recipe


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[] if name == "one rank" else pytest.mark.slow)
        for name, case in CASES.items()
    ],
)
async def test_a_killed_service_is_had_again_by_both_of_its_runs(
    case: Case, tmp_path: Path
) -> None:
    task = write_task(tmp_path / "task", 1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    flags = {"actor": ("--runs", "2", "--port", port, *case.flags), "reward": ("--runs", "2")}

    async def made(seed: int, folder: str) -> None:
        await learn(_recipe(task, seed, case), addresses, tmp_path / folder / str(seed))

    (tmp_path / "services").mkdir()
    started = {
        role: ServiceOfRole(role, tmp_path / "services", *own) for role, own in flags.items()
    }
    try:
        addresses = {role: str(one.announced()["address"]) for role, one in started.items()}
        for seed in SEEDS:
            await made(seed, "alone")
        runs = asyncio.gather(*(made(seed, "together") for seed in SEEDS))
        marks = [tmp_path / "together" / str(seed) / "metrics.jsonl" for seed in SEEDS]
        while not all(mark.exists() and mark.read_text().count("\n") for mark in marks):
            assert not runs.done()
            await asyncio.sleep(0.05)
        started["actor"].kill()
        # Steps of both are lost, or still to be made.
        assert all(mark.read_text().count("\n") < STEPS for mark in marks)
        started["actor"] = ServiceOfRole("actor", tmp_path / "services", *flags["actor"])
        await runs
    finally:
        for one in started.values():
            one.kill()
    for seed in SEEDS:
        alone, together = (tmp_path / folder / str(seed) for folder in ("alone", "together"))
        assert learnt(together) == learnt(alone)
        assert written(together) == written(alone)
