"""Result of a run, as summary.json."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolemesh.coordinator.run.reporting.events import Recovered
from rolemesh.coordinator.run.reporting.records import SUMMARY_FILE
from rolemesh.coordinator.run.results.evaluation import Evaluation
from rolemesh.coordinator.run.saving.best import BestCheckpoint
from rolemesh.coordinator.state.files import write_atomically
from rolemesh.coordinator.state.store import RunState

NUM_AVERAGED_STEPS = 3
"""Most steps at the start and at the end whose mean reward is reported."""

_GIT_TIMEOUT_S = 2.0
"""Longest wait for git, which may hang on a network disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """How a run ended and what it reached."""

    run_id: str
    name: str
    state: RunState
    failure: str
    seed: int
    steps: int
    """Steps made."""
    num_steps: int
    """Steps planned."""
    held_out_before: Evaluation | None
    held_out_after: Evaluation | None
    best: BestCheckpoint | None = None
    """None where run.checkpoint.keep_best is not given, or no evaluated step was saved."""
    early_stop: str = ""
    """Why the run made fewer steps than planned; empty where run.early_stopping did not end it."""
    mean_reward_first_steps: float | None
    """Mean over the first three steps, or over the first half of fewer than six."""
    mean_reward_last_steps: float | None
    """Mean over as many last steps; None where there is one step alone."""
    tokens: int
    """Tokens of all training rollouts, prompts included."""
    seconds: float
    """Wall time of the whole run."""
    seconds_by_phase: Mapping[str, float]
    planned_step_s: float | None = None
    """Seconds of a step that the recipe's plan has predicted; None where it has no plan."""
    measured_step_s: float | None = None
    """Median seconds of the newest steps, without the run's first ones; None of a shorter run."""
    recoveries: tuple[Recovered, ...] = ()
    """What the run survived, in this process."""
    tuning: Mapping[str, Any] | None = None
    """The settings that the run has kept, and its turns; None: it does not tune itself."""
    versions: Mapping[str, Mapping[str, str]]
    """Versions of components, by role."""
    git_commit: str | None
    coordinator_traffic: Mapping[str, int]
    """Its calls and serialized bytes, over the whole run."""
    directory: Path
    model_directory: Path | None
    """The exported Hugging Face folder; None when the run ended before."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        before, after = self.held_out_before, self.held_out_after
        return {
            "run_id": self.run_id,
            "name": self.name,
            "state": self.state.value,
            "failure": self.failure,
            "seed": self.seed,
            "steps": self.steps,
            "num_steps": self.num_steps,
            "held_out": {
                "before": before.to_dict() if before else None,
                "after": after.to_dict() if after else None,
            },
            "best": self.best.to_dict() if self.best else None,
            "early_stop": self.early_stop,
            "reward": {
                "mean_first_steps": self.mean_reward_first_steps,
                "mean_last_steps": self.mean_reward_last_steps,
                "num_averaged_steps": NUM_AVERAGED_STEPS,
            },
            "tokens": self.tokens,
            "seconds": self.seconds,
            "seconds_by_phase": dict(self.seconds_by_phase),
            "step_s": {"planned": self.planned_step_s, "measured": self.measured_step_s},
            "recoveries": [one.to_dict() for one in self.recoveries],
            "tuning": None if self.tuning is None else dict(self.tuning),
            "versions": {role: dict(versions) for role, versions in self.versions.items()},
            "git_commit": self.git_commit,
            "coordinator_traffic": dict(self.coordinator_traffic),
            "directory": str(self.directory),
            "model_directory": str(self.model_directory) if self.model_directory else None,
        }

    def write(self) -> None:
        """Writes summary.json into the run's folder."""
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        write_atomically(self.directory / SUMMARY_FILE, text)


def told_steps(planned_s: float, measured_s: float | None) -> str:
    """A predicted step beside the measured one, for people."""
    if measured_s is None:
        return f"planned: {planned_s:.3g} s a step; too few steps were made to measure one"
    error = planned_s / measured_s - 1
    return f"a step: planned {planned_s:.3g} s, measured {measured_s:.3g} s (error {error:+.0%})"


def mean_rewards(records: Sequence[Mapping[str, float]]) -> tuple[float | None, float | None]:
    """Mean reward of the first and of the last steps; no step is among both."""
    rewards = [record["reward/mean"] for record in records if "reward/mean" in record]
    if len(rewards) < 2:
        return (rewards[0] if rewards else None), None
    number = min(NUM_AVERAGED_STEPS, len(rewards) // 2)
    first, last = rewards[:number], rewards[-number:]
    return sum(first) / number, sum(last) / number


def coordinator_versions() -> dict[str, str]:
    """Versions of what the coordinator itself runs on."""
    names = ("rolemesh", "grpcio", "protobuf", "redis", "pydantic")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), **found}


async def git_commit() -> str | None:
    """Commit of the checkout that rolemesh runs from.

    None for an installed package, and when git is missing or does not answer in time.
    """
    source = Path(__file__).parent
    if "site-packages" in source.parts:
        # rolemesh may lie within the checkout of another project.
        return None
    try:
        process = await asyncio.create_subprocess_exec(
            "git",
            "-C",
            str(source),
            "rev-parse",
            "HEAD",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return None
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _GIT_TIMEOUT_S)
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode().strip() if process.returncode == 0 else None
