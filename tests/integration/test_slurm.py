"""Rendered jobs on a real Slurm of two nodes, unchanged: steps are killed, limits come near.

Slow, and skipped where no Slurm answers.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.mesh_runs import tiny_model, tiny_recipe
from support.registered_processes import certificates
from typer.testing import CliRunner

from rolemesh.coordinator.commands.cli import app

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
STEPS = 24
LONG = 300
"""Steps of a run that services join and leave, which take seconds to start."""

ROLES = ("actor", "critic", "reference", "reward", "rollout")


def ask(*command: str) -> str:
    """Output of a program of Slurm."""
    answered = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert answered.returncode == 0, f"{command}: {answered.stderr}"
    return answered.stdout


def idle_nodes() -> int:
    if shutil.which("sbatch") is None:
        return 0
    command = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
    answered = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return sum(int(line) for line in answered.stdout.split() if line.isdecimal())


class SlurmJob:
    """A job of a rendered script, in a folder of its own."""

    def __init__(self, folder: Path, recipe: dict[str, Any], *arguments: str) -> None:
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        program = folder / "bin" / "rolemesh"
        program.parent.mkdir()
        program.write_text(f'#!/bin/bash\nexec {sys.executable} -m rolemesh "$@"\n')
        program.chmod(0o755)
        script = folder / "job.sh"
        words = ["render", "slurm", str(folder / "recipe.yaml"), "--out", str(script), *arguments]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        self.folder = folder
        self._environment = {
            **os.environ,
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            # Nodes run what this process does, and know nothing of pytest's paths.
            "PYTHONPATH": os.pathsep.join(one for one in sys.path if one),
            "OMP_NUM_THREADS": "1",
        }
        self.id = self.submit(str(script))
        self.run = folder / "runs" / f"tiny-{self.id}"
        self._log = folder / f"tiny-{self.id}.log"
        self.beside: list[str] = []
        """Other jobs of the test."""

    def submit(self, *arguments: str) -> str:
        """Id of a job that sbatch takes, of this one's environment."""
        submitted = subprocess.run(
            ["sbatch", "--parsable", *arguments],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return submitted.stdout.strip()

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def fact(self, name: str) -> str:
        """E.g. JobState of `scontrol show job`."""
        words = ask("scontrol", "show", "job", self.id, "--oneliner").split()
        return next(one.partition("=")[2] for one in words if one.startswith(f"{name}="))

    def metrics(self) -> list[dict[str, Any]]:
        """Records of the steps that the run has made."""
        file = self.run / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def steps(self) -> list[int]:
        """Numbers of the steps that the run has made."""
        return [record["step"] for record in self.metrics()]

    def step_of(self, name: str) -> str:
        """Id of a step of the job, by its name."""
        listed = ask("squeue", "--noheader", "--steps", f"--jobs={self.id}", "--format=%i %j")
        return next(one.split()[0] for one in listed.splitlines() if one.split()[1] == name)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 240) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.fact("JobState") not in ENDED, self.log
            assert time.monotonic() < deadline, self.log
            for queued in self.queued_again():
                # It waits two minutes otherwise. Within a second, nodes would still refuse the job
                # that they have just ended.
                time.sleep(3)
                ask("scontrol", "update", f"JobId={queued}", "StartTime=now")
            time.sleep(0.3)

    def queued_again(self) -> list[str]:
        """Those of this job and the jobs beside it that wait for a time to begin."""
        ids = ",".join((self.id, *self.beside))
        listed = ask("squeue", "--noheader", "--array", f"--jobs={ids}", "--format=%i %r")
        return [line.split()[0] for line in listed.splitlines() if line.split()[1] == "BeginTime"]

    def wait(self) -> str:
        """State in which it ended."""
        self.wait_until(lambda: self.fact("JobState") in ENDED)
        return self.fact("JobState")


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    if idle_nodes() < 2:
        pytest.skip("no Slurm with two idle nodes answers here")
    changes = {"run__steps": STEPS, "run__checkpoint": {"every_steps": 0}}
    return tiny_recipe(tiny_model(tmp_path / "model"), **changes)


@pytest.fixture
def jobs() -> Iterator[list[SlurmJob]]:
    """Jobs that are cancelled at the end."""
    made: list[SlurmJob] = []
    yield made
    for job in made:
        ids = (job.id, *job.beside)
        subprocess.run(["scancel", *ids], capture_output=True, timeout=60, check=False)


def come_near_to_limit(job: SlurmJob, restarts: int) -> None:
    """What --signal of the script has Slurm do before the time limit."""
    ask("scancel", "--batch", "--signal=USR1", job.id)
    job.wait_until(lambda: job.fact("Restarts") == str(restarts))
    assert "the time limit is near: the job is queued again" in job.log
    kept = job.steps()[-1]
    assert kept < STEPS, job.log
    # Nothing but this end saves: the next start may be on other nodes.
    assert (job.run / "checkpoints" / f"step-{kept:08}").is_dir(), job.log


def test_a_job_whose_step_is_killed_or_whose_limit_is_near_goes_on(
    recipe: dict[str, Any], jobs: list[SlurmJob], tmp_path: Path
) -> None:
    job = SlurmJob(tmp_path, recipe)
    jobs.append(job)
    job.wait_until(lambda: len(job.steps()) >= 3)
    ask("scancel", "--signal=KILL", job.step_of("coordinator"))
    job.wait_until(lambda: job.fact("Restarts") == "1")
    kept = len(job.steps())
    assert 3 <= kept < STEPS, job.log
    job.wait_until(lambda: len(job.steps()) > kept + 1)
    come_near_to_limit(job, restarts=2)
    assert job.wait() == "COMPLETED", job.log
    # One run: each step once, also those from before the kill.
    assert job.steps() == list(range(1, STEPS + 1))
    assert json.loads((job.run / "summary.json").read_text())["state"] == "succeeded"
    assert "the coordinator was killed (137): the job is queued again" in job.log


def test_services_on_two_nodes_outlive_a_kill_and_a_limit(
    recipe: dict[str, Any], jobs: list[SlurmJob], tmp_path: Path
) -> None:
    job = SlurmJob(tmp_path, recipe, "--on", "critic=1", "--on", "reference=1")
    jobs.append(job)
    job.wait_until(lambda: len(job.steps()) >= 2)
    ask("scancel", "--signal=KILL", job.step_of("critic"))
    job.wait_until(lambda: "critic has ended, and is started again" in job.log)
    kept = len(job.steps())
    # In its place, while the job goes on.
    job.wait_until(lambda: len(job.steps()) > kept + 1)
    assert job.fact("Restarts") == "0"
    come_near_to_limit(job, restarts=1)
    assert job.wait() == "COMPLETED", job.log
    assert job.steps() == list(range(1, STEPS + 1))
    assert not Path(f"{job.run}.mesh").exists()


def test_rollout_services_of_an_array_come_and_go(
    recipe: dict[str, Any], jobs: list[SlurmJob], tmp_path: Path
) -> None:
    """The command of docs/clusters.md."""
    model = recipe["actor"]["model"]["path"]
    certificates(tmp_path / "certs", "coordinator", *ROLES)
    (tmp_path / "token").write_text(secrets.token_urlsafe())
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    recipe["run"]["steps"] = LONG
    recipe["schedule"] = {"sampler": {"type": "sync", "batch_size": 2}}
    recipe["rollout"] = {
        "model": {"path": model},
        **{name: recipe["actor"][name] for name in ("rollout", "data")},
    }
    recipe["pools"] = {role: {"roles": [role]} for role in ROLES}
    recipe["services"]["rollout"] = {"registers": True, "most_replicas": 2}
    recipe |= {
        "certificates": str(tmp_path / "certs"),
        "api": {"host": "0.0.0.0", "member_port": port, "token_file": str(tmp_path / "token")},
    }
    job = SlurmJob(tmp_path, recipe)
    jobs.append(job)
    job.wait_until(lambda: job.fact("JobState") == "RUNNING")
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    (line,) = re.findall(r"^sbatch (--array=.*)$", page, re.MULTILINE)
    for shown, here in (
        ("--array=0-3", "--array=0-1"),
        ("--gpus=1 --mem=16G ", "--mem=1G "),
        # Nodes of a real cluster have names that lead to them; these are one machine.
        ("$(squeue -h -j 12 -o %B):29300", f"{socket.gethostname()}:{port}"),
        ("--folder .models", f"--folder {model}"),
    ):
        assert shown in line
        line = line.replace(shown, here)
    array = job.submit(*shlex.split(line))
    job.beside.append(array)
    job.wait_until(lambda: services(job)[-1:] == [2.0])
    ask("scontrol", "requeue", f"{array}_1")
    job.wait_until(lambda: services(job)[-1] == 1.0)
    job.wait_until(lambda: services(job)[-1] == 2.0)
    ask("scancel", f"{array}_1")
    job.wait_until(lambda: services(job)[-1] == 1.0)
    assert job.wait() == "COMPLETED", job.log
    assert job.steps() == list(range(1, LONG + 1))
    summary = json.loads((job.run / "summary.json").read_text())
    # Slurm ends tasks with SIGTERM, so they leave in order.
    assert (summary["state"], summary["recoveries"]) == ("succeeded", [])
    assert job.fact("Restarts") == "0"


def services(job: SlurmJob) -> list[float]:
    """Rollout services that each step began with."""
    return [record["services/rollout"] for record in job.metrics()]


def test_a_role_whose_ranks_lie_on_two_nodes_trains(
    recipe: dict[str, Any], jobs: list[SlurmJob], tmp_path: Path
) -> None:
    recipe["run"]["steps"] = 3
    recipe["actor"]["train"] = {"dp": 2}
    job = SlurmJob(tmp_path, recipe, "--on", "actor=0,1", "--on", "critic=1")
    jobs.append(job)
    assert job.wait() == "COMPLETED", job.log
    assert job.steps() == [1, 2, 3]
    log = (job.run / "logs" / "actor.log").read_text()
    assert "all ranks on host 1 of 2 have ended" in log
