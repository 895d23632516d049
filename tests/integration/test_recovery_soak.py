"""A run whose processes are killed again and again: memory stays flat, and nothing is left behind.

It takes three minutes; ROLEMESH_TEST_SOAK_S says how many seconds instead.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import time
from collections import deque
from pathlib import Path

import psutil
import pytest
from support import warm_processes
from support.commands import command_of
from support.mesh_runs import CliRun, tiny_model, tiny_recipe

from rolemesh.coordinator.state.server.embedded import MAX_RESTARTS, RESTART_WINDOW_S

SOAK_S = float(os.environ.get("ROLEMESH_TEST_SOAK_S", "180"))
START_S = 240
VICTIMS = ("actor", "critic", "reward", "actor", "critic", "reward", "store")
"""The reference and the coordinator survive."""
PAUSE_S = 4.0
STORE_KILLS = MAX_RESTARTS - 1
SHARED_MEMORY = Path("/dev/shm")
MOST_GROWTH = 24 * 2**20
"""Bytes. A survivor that leaked at each kill or step would grow without end; allocators settle."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SOAK_S + 3 * START_S)]


def victim_of(run: CliRun, name: str) -> int | None:
    """The process to kill; None while it is being started again."""
    for process in run.descendants():
        words = " ".join(command_of(process))
        if ("valkey-server" if name == "store" else f"rolemesh.services.{name}") in words:
            return process.pid if name == "store" else warm_processes.forked(process.pid)
    return None


def growth(sizes: list[int]) -> float:
    """Bytes between the medians of the third quarter and the last: the beginning is warm-up."""
    quarter = len(sizes) // 4
    return statistics.median(sizes[-quarter:]) - statistics.median(sizes[2 * quarter : 3 * quarter])


def test_random_kills_leave_nothing_behind(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    recipe = tiny_recipe(
        tiny_model(tmp_path / "tiny"),
        run__steps=10**6,
        run__evaluation={"num_prompts": 0},
        run__checkpoint={"every_steps": 50},
        run__recovery={"pause_s": 0.1, "attempts": 100},
    )
    draw = random.Random(1)
    sizes: dict[str, list[int]] = {"coordinator": [], "reference": []}
    family: set[psutil.Process] = set()
    kills, store_kills = 0, deque[float](maxlen=STORE_KILLS)
    run = CliRun(recipe, tmp_path, variables={"TMPDIR": str(temporary)})
    try:
        run.wait_until(lambda: len(run.metrics()) >= 5, START_S)
        coordinator = run.coordinator
        reference = victim_of(run, "reference")
        ends_at, kill_at = time.monotonic() + SOAK_S, 0.0
        while time.monotonic() < ends_at:
            assert run.process.poll() is None, run.output
            family |= set(run.descendants())
            if time.monotonic() >= kill_at:
                name = draw.choice(VICTIMS)
                if name == "store" and len(store_kills) == STORE_KILLS:
                    # A store that ends too often is not started again.
                    name = "actor" if store_kills[0] > time.monotonic() - RESTART_WINDOW_S else name
                victim = victim_of(run, name)
                if victim is not None:
                    kills += 1
                    os.kill(victim, signal.SIGKILL)
                    if name == "store":
                        store_kills.append(time.monotonic())
                kill_at = time.monotonic() + PAUSE_S * 2 * draw.random()
            sizes["coordinator"].append(coordinator.memory_info().rss)
            sizes["reference"].append(psutil.Process(reference).memory_info().rss)
            time.sleep(0.5)
        steps = len(run.metrics())
        run.wait_until(lambda: len(run.metrics()) > steps, START_S)
        run_id = json.loads((run.out / "run.json").read_text())["run_id"]
        run.process.send_signal(signal.SIGINT)
        assert run.wait(START_S) in (0, 130), run.output
    finally:
        family |= set(run.descendants())
        run.kill()
    assert kills >= SOAK_S / 12
    told = [record["step"] for record in run.metrics()]
    assert told == list(range(1, len(told) + 1))
    print(
        f"{kills} kills, {len(told)} steps of {run_id}; growth in MiB: "
        f"{ {name: round(growth(found) / 2**20, 1) for name, found in sizes.items()} }"
    )
    for name, found in sizes.items():
        assert growth(found) < MOST_GROWTH, (name, found)
    deadline = time.monotonic() + 30
    # psutil.wait_procs asks for descriptors of processes, which some kernels refuse of dead ones.
    while (alive := [one for one in family if one.is_running()]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert alive == []
    pids = {str(process.pid) for process in {*family, coordinator}}
    left = [
        path.name
        for path in SHARED_MEMORY.glob("rolemesh-*")
        if set(re.findall(r"\d+", path.name)) & pids
    ]
    assert left == []
    assert [path.name for path in temporary.iterdir()] == []
