"""`rolemesh train` whose own observer kills processes of the run, as the plan in a folder says.

Used as `python -m support.saboteur train ...` with the folder in ROLEMESH_TEST_KILLS. The kill
comes within the very call that tells of the phase, before the coordinator does anything else. A
process that is started again with `--resume` goes on with the plan.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from support.kill_plans import COORDINATOR, FOLDER, LOG_FILE, STORE, Kill, read_log, read_plan

from rolemesh.coordinator.commands import train
from rolemesh.coordinator.commands.cli import main
from rolemesh.coordinator.commands.terminal.console import LoggingObserver

WARM = "ROLEMESH_TEST_WARM_SERVICES"


class Saboteur(LoggingObserver):
    """Passes everything on, and kills."""

    def __init__(self, shown: Any) -> None:
        super().__init__(shown)
        self._folder = Path(os.environ[FOLDER])
        noted = [line for line in read_log(self._folder) if "victim" in line]
        self._plan = read_plan(self._folder)[len(noted) :]
        self._stage: dict[str, str] = {}
        self._step = max((line["step"] for line in noted), default=0)
        self._has_cut = False
        # The process before was killed, unless there was none.
        self._is_resumed = self._is_recovering = bool(noted)
        self._is_waiting = False
        """For the store, which is started again."""

    def on_phase(self, role: str, stage: str, done: int, total: int) -> None:
        super().on_phase(role, stage, done, total)
        before, stage = self._stage.get(role, ""), stage.partition(":")[0]
        self._stage[role] = stage
        if stage == before:
            return
        if stage == "" and before == "save cut":
            self._has_cut = True
        if self._plan and self._is_time(self._plan[0], role, before, stage):
            kill = self._plan.pop(0)
            if kill.late_s:
                threading.Timer(kill.late_s, self._carry_out, (kill,)).start()
            else:
                self._carry_out(kill)

    def _is_time(self, kill: Kill, service: str, before: str, stage: str) -> bool:
        phase = kill.phase
        if phase.service not in ("", service) or phase.in_recovery != self._is_recovering:
            return False
        if self._is_waiting or self._step < kill.from_step:
            return False
        is_there = stage == "" and before == phase.stage if phase.is_end else stage == phase.stage
        # A policy that samples between the cut of a step and the record of it is evaluated.
        is_evaluation = phase.stage == "generate" and self._has_cut
        return is_there and phase.is_evaluation == is_evaluation

    def on_step(self, record: Mapping[str, float]) -> None:
        super().on_step(record)
        self._step, self._has_cut = int(record["step"]), False
        if self._is_resumed:
            self._is_resumed = False
            self._recovered("resumed")

    def on_event(self, text: str) -> None:
        super().on_event(text)
        if text.startswith("held-out score"):
            self._has_cut = False
        elif text.startswith("recovering after"):
            self._is_recovering = True
        elif text.startswith("recovered in"):
            self._recovered(text)
        elif text.startswith("the embedded store"):
            self._is_waiting = False
            self._recovered(text)

    def _recovered(self, said: str) -> None:
        self._is_recovering = False
        self._note(recovered=said, step=self._step)

    def _carry_out(self, kill: Kill) -> None:
        family = psutil.Process().children(recursive=True)
        pids = [os.getpid()] if kill.victim == COORDINATOR else pids_of(kill.victim, family)
        self._note(
            victim=kill.victim,
            phase=kill.phase.name,
            late_s=kill.late_s,
            step=self._step,
            stages={role: stage for role, stage in self._stage.items() if stage},
            was_found=bool(pids),
            family=[(process.pid, process.create_time()) for process in family],
        )
        # The run notices a lost service, but need not recover from the loss of its store.
        self._is_recovering |= kill.victim != STORE and not kill.stop_s
        self._is_waiting = kill.victim == STORE
        for pid in pids:
            os.kill(pid, signal.SIGKILL if kill.stop_s is None else signal.SIGSTOP)
            if kill.stop_s:
                threading.Timer(kill.stop_s, os.kill, (pid, signal.SIGCONT)).start()

    def _note(self, **facts: Any) -> None:
        with (self._folder / LOG_FILE).open("a") as log:
            log.write(json.dumps({"at": time.time(), **facts}) + "\n")


def pids_of(victim: str, family: list[psutil.Process]) -> list[int]:
    """The process that computes for a service, that of a rank, or that of the store."""
    service, _, rank = victim.partition(" rank ")
    for process in family:
        try:
            words = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if victim == STORE:
            if any("valkey-server" in word for word in words):
                return [process.pid]
        elif any(re.search(rf"/{service}-\d+\.json$", word) for word in words) and (
            "RANK" not in process.environ()
        ):
            pid = forked(process.pid)
            return [pid] if not rank else ranks_of(pid, rank)
    # It is being started again, from the kill before.
    return []


def ranks_of(agent: int, rank: str) -> list[int]:
    """The process of a rank, below its agent."""
    return [
        forked(process.pid)
        for process in psutil.Process(agent).children(recursive=True)
        if process.environ().get("RANK") == rank
    ][:1]


def forked(pid: int) -> int:
    """The process behind the one that was started, if a warm process forked it."""
    if WARM not in os.environ:
        return pid
    told = Path(os.environ[WARM]).with_name(str(pid))
    return int(told.read_text()) if told.exists() else pid


if __name__ == "__main__":
    train.LoggingObserver = Saboteur  # type: ignore[misc]
    main()
