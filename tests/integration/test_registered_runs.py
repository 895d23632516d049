"""Runs whose recipe names roles alone, over services in processes that register."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import warm_processes
from support.mesh_runs import CliRun, tiny_model, tiny_recipe
from support.registered_processes import certificates, member_address, started
from support.run_results import learnt, written

ROLES = ("actor", "critic", "reference", "reward", "rollout")
CHANGING = ("rollout", "reward")
STEPS = 10


@pytest.mark.slow
def test_a_run_finds_its_services_and_one_that_came_back_elsewhere(tmp_path: Path) -> None:
    """The same bits as a run that starts all of them."""
    model = tiny_model(tmp_path / "model")
    recipe = tiny_recipe(model, run__steps=4, run__recovery__pause_s=0.0)
    plain = tmp_path / "plain"
    plain.mkdir()
    undisturbed = CliRun(recipe, plain)
    try:
        assert undisturbed.wait(600) == 0, undisturbed.output
    finally:
        undisturbed.close()
    folder = tmp_path / "found"
    folder.mkdir()
    certs = certificates(folder / "certs", "coordinator", "actor", "critic", "reference", "reward")
    for role in ("reference", "reward"):
        recipe["services"][role] = {"registers": True}
    recipe |= {"certificates": str(certs), "api": {"member_port": 0}}
    run = CliRun(recipe, folder)
    try:
        at = member_address(run)
        with (
            started("reference", at, folder, f"--folder={model}"),
            started("reward", at, folder) as first,
        ):
            run.wait_until(lambda: len(run.metrics()) >= 1, 600)
            os.kill(warm_processes.forked(first.pid), signal.SIGKILL)
            first.wait(10)
            with started("reward", at, folder):
                assert run.wait(600) == 0, run.output
    finally:
        run.close()
    assert learnt(run.out) == learnt(undisturbed.out)
    assert written(run.out) == written(undisturbed.out)
    (recovered,) = json.loads((run.out / "summary.json").read_text())["recoveries"]
    assert (recovered["restarted"], recovered["lost_steps"]) == (["reward"], 0)


def test_a_run_says_which_services_have_not_come(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    roles = ("actor", "critic", "reference", "reward")
    certs = certificates(tmp_path / "certs", "coordinator", *roles)
    recipe = tiny_recipe(model, run__recovery__wait_s=1.0)
    recipe["services"] = {role: {"registers": True} for role in roles}
    recipe |= {"certificates": str(certs), "api": {"member_port": 0}}
    began = time.monotonic()
    run = CliRun(recipe, tmp_path)
    try:
        assert run.wait(120) != 0
    finally:
        run.close()
    assert "not registered within 1 s (run.recovery.wait_s): actor (rolemesh serve actor), " in (
        run.stderr
    )
    assert time.monotonic() - began < 120


def recipe_of_blocks(model: Path) -> dict[str, Any]:
    """One whose calls are the same, whatever the number of rollout and reward services."""
    recipe = tiny_recipe(
        model, run__steps=STEPS, schedule__sampler={"type": "sync", "batch_size": 2}
    )
    actor = recipe["actor"]
    recipe["rollout"] = {
        "model": {"path": str(model)},
        **{name: actor[name] for name in ("rollout", "data")},
    }
    recipe["pools"] = {role: {"roles": [role]} for role in ROLES}
    return recipe


def without_numbers(directory: Path) -> list[dict[str, float]]:
    return [
        {name: value for name, value in record.items() if not name.startswith("services/")}
        for record in learnt(directory)
    ]


def numbers(run: CliRun, role: str) -> list[float]:
    """Services of the role that each step began with."""
    return [record[f"services/{role}"] for record in run.metrics()]


def assert_joined_and_left(run: CliRun, role: str, method: str) -> None:
    """The second service of the role made calls of the steps that it was there for, no others."""
    there = numbers(run, role)
    joined, left = there.index(2.0), STEPS - there[::-1].index(2.0)
    assert 1 <= joined <= left - 2
    assert left < STEPS
    assert there == [1.0] * joined + [2.0] * (left - joined) + [1.0] * (STEPS - left)
    (first,) = re.findall(rf"{role}-1 at \S+ joins: it takes part from step (\d+) on", log(run))
    assert int(first) == joined + 1
    # Between two steps, the one that is made next is named.
    (named,) = re.findall(
        rf"{role}-1 leaves in step (\d+): it drains; its calls are made by", log(run)
    )
    assert int(named) in (left, left + 1)
    asked = [
        [node["role"] for node in json.loads(line)["nodes"] if node["method"] == method]
        for line in (run.out / "dataflow.jsonl").read_text().splitlines()
    ]
    assert [f"{role}-1" in roles for roles in asked[: left - 1]] == [
        step >= joined for step in range(left - 1)
    ]


def wish(run: CliRun, what: str) -> None:
    run_id = json.loads((run.out / "run.json").read_text())["run_id"]
    httpx.post(
        f"{run.url}api/v1/runs/{run_id}/{what}", headers=run.authorization
    ).raise_for_status()


def test_rollout_and_reward_services_join_a_run_and_leave_it_and_change_nothing(
    tmp_path: Path,
) -> None:
    model = tiny_model(tmp_path / "model")
    recipe = recipe_of_blocks(model)
    (tmp_path / "alone").mkdir()
    alone = CliRun(recipe, tmp_path / "alone")
    try:
        assert alone.wait(600) == 0, alone.output
    finally:
        alone.close()
    folder = tmp_path / "changing"
    folder.mkdir()
    for role in CHANGING:
        recipe["services"][role] = {"registers": True, "most_replicas": 2}
    recipe |= {
        "certificates": str(certificates(folder / "certs", "coordinator", *ROLES)),
        "api": {"member_port": 0},
    }
    run = CliRun(recipe, folder)
    try:
        at = member_address(run)
        grants = (f"--folder={model}",)
        with started("rollout", at, folder, *grants), started("reward", at, folder):
            run.wait_until(lambda: len(run.metrics()) >= 1, 600)
            # A step is shorter than the start of a process.
            wish(run, "pause")
            with (
                started("rollout", at, folder, "--number", "1", *grants) as rollout,
                started("reward", at, folder, "--number", "1") as reward,
            ):
                run.wait_until(
                    lambda: all(f"{role}-1 is ready" in log(run) for role in CHANGING), 600
                )
                wish(run, "resume")
                run.wait_until(
                    lambda: all(numbers(run, role).count(2.0) >= 2 for role in CHANGING), 600
                )
                for second in (rollout, reward):
                    second.send_signal(signal.SIGTERM)
                # They have ended in order, though the run went on.
                assert [rollout.wait(60), reward.wait(60)] == [0, 0]
            assert run.wait(600) == 0, run.output
    finally:
        run.close()
    assert_joined_and_left(run, "rollout", "generate")
    assert_joined_and_left(run, "reward", "compute_reward")
    assert json.loads((run.out / "summary.json").read_text())["recoveries"] == []
    assert without_numbers(run.out) == without_numbers(alone.out)
    assert written(run.out) == written(alone.out)


def log(run: CliRun) -> str:
    return (run.out / "logs" / "coordinator.log").read_text()
