"""Services in processes of their own, which register at the coordinator of a run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support import warm_processes
from support.coordinator_doors import written
from support.mesh_runs import CliRun

from rolemesh.rpc.members.authority import Authority

AUTHORITY = Authority.make()


def certificates(folder: Path, *members: str) -> Path:
    folder.mkdir()
    for member in members:
        written(AUTHORITY.issue(member), folder / f"{member}.pem")
    return folder


@contextlib.contextmanager
def started(role: str, at: str, folder: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """A service in a process of its own, which registers."""
    with (folder / f"{role}.log").open("ab") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", f"rolemesh.services.{role}", "--register-at", at),
                *("--identity", str(folder / "certs" / f"{role}.pem"), "--threads", "1", *flags),
            ],
            env={**os.environ, **warm_processes.services(), "PYTHONSAFEPATH": "1"},
            stderr=log,
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            finally:
                process.kill()


def member_address(run: CliRun) -> str:
    """Where services of the run register."""
    told = "gRPC for members of the mesh: "

    def log() -> str:
        file = run.out / "logs" / "coordinator.log"
        return file.read_text() if file.exists() else ""

    run.wait_until(lambda: told in log(), 120)
    return log().partition(told)[2].split()[0]
