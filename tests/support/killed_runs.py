"""Runs that a saboteur kills processes of, as a plan says.

A killed coordinator is started again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from support import warm_processes
from support.kill_plans import COORDINATOR, FOLDER, Kill, read_log, write_plan
from support.mesh_runs import CliRun

TESTS = Path(__file__).resolve().parents[1]


def killed_run(
    recipe: dict[str, Any],
    folder: Path,
    plan: Sequence[Kill],
    timeout_s: float,
    **settings: Any,
) -> CliRun:
    """Makes a run to its end, with the kills of the plan.

    Args:
        recipe: What to train.
        folder: For all files.
        plan: What is killed, and when.
        timeout_s: For each process of the coordinator.
        **settings: Of CliRun.

    Returns:
        The run, closed.
    """
    write_plan(folder, plan)
    variables = {
        FOLDER: str(folder),
        "PYTHONPATH": os.pathsep.join([warm_processes.services()["PYTHONPATH"], str(TESTS)]),
    }
    flags: tuple[str, ...] = ()
    while True:
        run = CliRun(
            recipe, folder, *flags, module="support.saboteur", variables=variables, **settings
        )
        is_done = False
        try:
            code = run.wait(timeout_s)
            kills = kills_of(folder)
            if code == -signal.SIGKILL and kills and kills[-1]["victim"] == COORDINATOR:
                # At once, as a supervisor does: what the dead one had started may still be ending.
                flags = ("--resume", str(run.out))
                continue
            is_done = True
            assert code == 0, f"exit code {code}\n{run.output}"
            return run
        finally:
            if is_done or not flags:
                run.close()
            else:
                run.kill()


def kills_of(folder: Path) -> list[dict[str, Any]]:
    """The kills that were carried out, oldest first."""
    return [line for line in read_log(folder) if "victim" in line]


def left_of(folder: Path) -> list[psutil.Process]:
    """Processes of a run that still live some seconds after its end."""
    known = [(pid, born) for kill in kills_of(folder) for pid, born in kill["family"]]
    family = []
    for pid, born in set(map(tuple, known)):
        try:
            process = psutil.Process(pid)
        except psutil.NoSuchProcess:
            continue
        if process.create_time() == born:
            family.append(process)
    return list(psutil.wait_procs(family, timeout=30)[1])
