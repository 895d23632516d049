"""The process of a run of the hub: how it starts, and what the run's folder says of it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rolemesh.coordinator.recipe.loading import ENVIRONMENT_PREFIX, SERVICE_PREFIX
from rolemesh.coordinator.state.files import write_atomically
from rolemesh.coordinator.state.server.bound_process import bound


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProcess:
    """The process of a run. The time of creation distinguishes it from a later one with its pid."""

    pid: int
    created_at: float
    """Unix time, seconds; 0 when it was gone before it was looked at."""
    step: int = 0
    """Steps that the run had made when it was started."""
    restarts: int = 0
    """How often the run was started again since its last step, because its process was gone."""
    overrides: tuple[str, ...] = ()
    """With which a user resumed the run."""

    @classmethod
    def of(cls, pid: int, **facts: Any) -> RunProcess:
        """The process with that pid, and further fields."""
        return cls(pid=pid, created_at=_created_at(pid), **facts)

    @classmethod
    def read(cls, path: Path) -> RunProcess | None:
        """What `write` has written; None where it did not."""
        if not path.is_file():
            return None
        facts = json.loads(path.read_text())
        return cls(**{**facts, "overrides": tuple(facts.get("overrides", ()))})

    def write(self, path: Path) -> None:
        """Writes it down for a later hub. Overrides may hold a password."""
        write_atomically(path, json.dumps(dataclasses.asdict(self)), is_private=True)

    @property
    def is_alive(self) -> bool:
        """Whether it runs still."""
        return self.created_at > 0 and _created_at(self.pid) == self.created_at


def _created_at(pid: int) -> float:
    """When the process with that pid was created; 0 when there is none, or it is a zombie."""
    try:
        found = psutil.Process(pid)
        is_zombie = found.status() == psutil.STATUS_ZOMBIE
        return 0.0 if is_zombie else float(found.create_time())
    except psutil.NoSuchProcess:
        return 0.0


def start_train(
    run_id: str, folder: Path, *, recipe: Path, log: Path, resumes: bool, outlives: bool
) -> subprocess.Popen[bytes]:
    """Starts `rolemesh train`.

    Args:
        run_id: Id of the run.
        folder: Folder of its files, absolute.
        recipe: File with its recipe.
        log: File that gets what the process prints.
        resumes: Whether the folder holds the run.
        outlives: Whether it may outlive this process.

    Raises:
        OSError: It cannot be started.
    """
    program = [sys.executable, "-m", "rolemesh.coordinator.commands.cli"]
    flags = {"--out": str(folder), "--run-id": run_id}
    if resumes:
        flags["--resume"] = str(folder)
    words = [word for flag, value in flags.items() for word in (flag, value)]
    command = [*program, "train", str(recipe), *words]
    if not outlives:
        # The run cannot go on without its store: the kernel signals it when this process ends.
        command = [*bound(*command)]
    with log.open("ab") as stream:
        # Not a subprocess of asyncio, which kills its children when this process ends normally.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=_environment(os.environ),
            # Ctrl-C in a terminal signals the whole group, but only this process may decide.
            start_new_session=True,
        )


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of a run's process, without variables that set fields of a recipe.

    Those have had their effect on the recipe already.
    """
    fields = [
        name
        for name in environment
        if name.startswith(ENVIRONMENT_PREFIX)
        and "__" in name
        and not name.startswith(SERVICE_PREFIX)
    ]
    kept = {name: value for name, value in environment.items() if name not in fields}
    # The current directory must not shadow a package.
    return {**kept, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
