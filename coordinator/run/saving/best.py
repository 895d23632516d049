"""The best evaluated state of a run, and when it has waited long enough for a better one.

Both depend on the held-out values before the newest step alone. So a resumed run finds the same,
and a step that was taken back cannot stay the best.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.recipe.sections.checkpoints import BestSpec, Mode
from rolemesh.coordinator.recipe.sections.run_section import RunSpec
from rolemesh.coordinator.run.results.evaluation import Evaluation
from rolemesh.coordinator.run.saving.checkpoints import checkpoint_folder, committed_steps
from rolemesh.coordinator.run.saving.progress import RunProgress


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One value of the metric."""

    step: int
    """Steps made before."""
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BestCheckpoint:
    """The best of a run's checkpoints."""

    metric: str
    held_out: HeldOut
    directory: Path

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "metric": self.metric,
            **asdict(self.held_out),
            "directory": str(self.directory),
        }


class BestOfRun:
    """The best of a run's steps, as its recipe says what is good. Owner: the coordinator's loop.

    Example: values 0.2, 0.5, 0.4 after steps 5, 10, 15 with mode max: step 10 is the best one, and
    with patience 1 the run ends.
    """

    def __init__(self, run: RunSpec, progress: RunProgress) -> None:
        """Prepares.

        Args:
            run: Says what is good, and how long to wait for better.
            progress: What the run has reached; read whenever something is asked.
        """
        self._run = run
        self._progress = progress

    def step(self, among: Collection[int] | None = None) -> int | None:
        """The best step, of all or of some; None where none was evaluated, or none is wanted."""
        found = best_step(self._run.checkpoint.keep_best, self._progress.records, among)
        return None if found is None else found.step

    def saved(self, directory: Path) -> BestCheckpoint | None:
        """The best step that has a complete checkpoint in a folder."""
        spec, there = self._run.checkpoint.keep_best, committed_steps(directory)
        found = best_step(spec, self._progress.records, there)
        if spec is None or found is None:
            return None
        folder = checkpoint_folder(directory, found.step)
        return BestCheckpoint(metric=spec.metric, held_out=found, directory=folder)

    def early_stop(self) -> str:
        """Why the run ends before its last step, for people; "" where it goes on.

        A value counts as better if it is so by more than min_delta than the one that counted last.
        The evaluation before the first step counts.
        """
        spec, stopping = self._run.checkpoint.keep_best, self._run.early_stopping
        if spec is None or stopping is None:
            return ""
        values = held_out_values(self._progress.records, spec.metric, self._progress.before)
        mark, waited = stalled(values, spec.mode, stopping.min_delta)
        if mark is None or waited < stopping.patience:
            return ""
        than = f" by more than {stopping.min_delta:g}" if stopping.min_delta else ""
        return (
            f"early stopping after step {values[-1].step}: {spec.metric} was {mark.value:.4g} "
            f"after step {mark.step}, and no better{than} in {waited} evaluations since then "
            f"(run.early_stopping.patience is {stopping.patience})"
        )

    def check(self, found: Evaluation) -> None:
        """Raises RunError where an evaluation lacks the metric that says what is best."""
        spec = self._run.checkpoint.keep_best
        if spec is not None and spec.metric not in found.scalars():
            raise RunError(
                f"run.checkpoint.keep_best.metric is {spec.metric!r}, which the evaluation does "
                f"not report: give one of {', '.join(sorted(found.scalars()))}"
            )


def held_out_values(
    records: Iterable[Mapping[str, float]], metric: str, before: Evaluation | None = None
) -> list[HeldOut]:
    """The metric's values in all evaluations, oldest first.

    Args:
        records: Of the steps, oldest first.
        metric: Its name in them, e.g. "held_out/score".
        before: The evaluation before the first step, where it counts.
    """
    first = {} if before is None else {"step": 0.0, **before.scalars()}
    return [
        HeldOut(int(record["step"]), record[metric])
        for record in (first, *records)
        if metric in record
    ]


def best_step(
    spec: BestSpec | None,
    records: Iterable[Mapping[str, float]],
    among: Collection[int] | None = None,
) -> HeldOut | None:
    """The step after which a run was best, of equal ones the first; None where there is none.

    Args:
        spec: What best means; None: it is off.
        records: Of the steps, oldest first.
        among: Steps that count; None: all.
    """
    if spec is None:
        return None
    best: HeldOut | None = None
    for one in held_out_values(records, spec.metric):
        is_counted = among is None or one.step in among
        if is_counted and (best is None or _gain(spec.mode, one, best) > 0):
            best = one
    return best


def stalled(values: Sequence[HeldOut], mode: Mode, min_delta: float) -> tuple[HeldOut | None, int]:
    """The newest value that counted as better, and how many values came after it.

    Example: with mode max and min_delta 0.1, of 0.5, 0.55, 0.7, 0.75, 0.7 the third one is the
    newest that counts, and 2 came after it.
    """
    mark, waited = None, 0
    for one in values:
        if mark is None or _gain(mode, one, mark) > min_delta:
            mark, waited = one, 0
        else:
            waited += 1
    return mark, waited


def _gain(mode: Mode, one: HeldOut, other: HeldOut) -> float:
    """How much better a value is than another one."""
    return one.value - other.value if mode == "max" else other.value - one.value
