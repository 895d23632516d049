"""Runs of the real command line over real services, on a tiny model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml
from support import warm_processes
from support.commands import command_of
from support.tiny_models import write_tiny_llama

ROLES = ("actor", "critic", "reference", "reward")


def tiny_recipe(model: Path, **changes: Any) -> dict[str, Any]:
    """A recipe that trains a tiny model in seconds; `changes` are dotted paths with "__"."""

    def shape() -> dict[str, Any]:
        return {"path": str(model), "compute_dtype": "float32"}

    recipe: dict[str, Any] = {
        "run": {
            "name": "tiny",
            "seed": 3,
            "steps": 2,
            "prompts_per_step": 4,
            "evaluation": {"num_prompts": 4},
        },
        "algorithm": {
            "type": "ppo",
            "sampling": {"samples_per_prompt": 2, "max_new_tokens": 6},
            "advantages": {"kl_in_reward": {"type": "adaptive", "coefficient": 0.02}},
            "mini_batch_rows": 4,
        },
        "actor": {
            "model": shape(),
            "optimizer": {"learning_rate": 1e-4},
            "rollout": {"type": "hf", "max_model_len": 256},
            "data": {
                "type": "reasoning_gym",
                "task": "chain_sum",
                "train_size": 16,
                "held_out_size": 4,
            },
        },
        "critic": {"model": shape(), "optimizer": {"learning_rate": 1e-3}},
        "reference": {"model": shape()},
        "reward": {"source": {"type": "arithmetic"}},
        "services": {role: {"threads": 1} for role in ROLES},
    }
    for path, value in changes.items():
        section = recipe
        *parents, last = path.split("__")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return recipe


def tiny_model(directory: Path) -> Path:
    """A tiny policy whose context is long enough for the recipe."""
    return write_tiny_llama(directory, max_position_embeddings=512)


class CliRun:
    """`rolemesh train` as a process of its own. Ends everything it started when closed.

    It and its services are forked from warm processes, but in a run that is about processes.
    """

    def __init__(
        self,
        recipe: dict[str, Any],
        folder: Path,
        *flags: str,
        is_warm: bool = True,
        module: str = "rolemesh.coordinator.commands.cli",
        variables: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        """Starts it in the folder; with the flag --resume it goes on with the run there.

        Args:
            recipe: What to train.
            folder: For all its files.
            *flags: More flags of the command.
            is_warm: Whether it and its services are forked from warm processes; within a command
                the services alone are.
            module: What stands for the command line; one of the tests may be named.
            variables: Of the environment besides.
            within: Command that runs the command line, and ends as it does.
        """
        self.out = folder / "run"
        recipe_file = folder / "recipe.yaml"
        recipe_file.write_text(yaml.safe_dump(recipe))
        added: dict[str, str] = {}
        if is_warm:
            added = warm_processes.services() if within else warm_processes.everything()
        self._stdout = (folder / "stdout.log").open("ab")
        self._stderr = (folder / "stderr.log").open("ab")
        # A child inherits what is ignored, e.g. when the tests run in a shell's background.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self.process = subprocess.Popen(
                [
                    *within,
                    *(sys.executable, "-m", module, "train", str(recipe_file)),
                    *(flags if "--resume" in flags else ("--out", str(self.out), *flags)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._stdout,
                stderr=self._stderr,
                env={
                    **os.environ,
                    **added,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONSAFEPATH": "1",
                    **(variables or {}),
                },
                cwd=folder,
            )
        finally:
            signal.signal(signal.SIGINT, before)
        self._folder = folder
        # Its process id stays this one's also when it has ended.
        self._front = psutil.Process(self.process.pid)

    @property
    def coordinator(self) -> psutil.Process:
        """What is the parent of the run's processes; `process` may stand in front of it."""
        pid = warm_processes.forked(self.process.pid)
        return self._front if pid == self.process.pid else psutil.Process(pid)

    @property
    def stdout(self) -> str:
        return (self._folder / "stdout.log").read_text()

    @property
    def stderr(self) -> str:
        return (self._folder / "stderr.log").read_text()

    @property
    def output(self) -> str:
        return f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"

    @property
    def url(self) -> str:
        """Of its dashboard and REST; empty until it is told."""
        log = self.out / "logs" / "coordinator.log"
        told = log.read_text() if log.exists() else ""
        found = re.search(r"dashboard and REST: (\S+)", told)
        return found.group(1) if found else ""

    @property
    def authorization(self) -> dict[str, str]:
        """Header that opens its REST."""
        return {"authorization": f"Bearer {(self.out / 'api-token').read_text().strip()}"}

    def descendants(self) -> list[psutil.Process]:
        """Live processes that the run started, however deep."""
        try:
            return self.coordinator.children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def role_process(self, role: str) -> psutil.Process:
        """The process that serves a role."""
        found = [
            process
            for process in self.descendants()
            if f"rolemesh.services.{role}" in command_of(process)
        ]
        assert len(found) == 1, f"{len(found)} processes serve {role}: {found}"
        return found[0]

    def metrics(self) -> list[dict[str, Any]]:
        """Steps recorded so far."""
        path = self.out / "metrics.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().splitlines(keepends=True)
        # The last one may be being written.
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Returns when the condition holds; fails when the run ends or the time is over."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the run ended early\n{self.output}"
            assert time.monotonic() < deadline, f"not within {timeout_s} s\n{self.output}"
            time.sleep(0.05)

    def wait(self, timeout_s: float) -> int:
        """Exit code of the run."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s\n{self.output}") from None

    def kill(self) -> None:
        """Ends what is left of the run's processes; it can be resumed."""
        family = [*self.descendants(), self._front]
        with contextlib.suppress(psutil.NoSuchProcess):
            family.append(self.coordinator)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=10)
        self.process.wait(10)
        self._stdout.close()
        self._stderr.close()

    def close(self) -> None:
        """Ends what is left of the run, which is not resumed."""
        self.kill()
        known = self.out / "run.json"
        if known.is_file():
            remove_cuts(json.loads(known.read_text())["run_id"])


def ended_run(recipe: dict[str, Any], folder: Path, *flags: str, timeout_s: float) -> Path:
    """Folder of a run that has made all its steps."""
    folder.mkdir(exist_ok=True)
    run = CliRun(recipe, folder, *flags)
    try:
        assert run.wait(timeout_s) == 0, run.output
        return run.out
    finally:
        run.close()


def remove_cuts(run_id: str) -> None:
    """What outlives a run that did not succeed, so that it can be resumed; this one will not be."""
    name = hashlib.sha256(run_id.encode()).hexdigest()[:16]
    for cut in Path("/dev/shm").glob(f"rolemesh-cut-{name}-*"):
        cut.unlink(missing_ok=True)
