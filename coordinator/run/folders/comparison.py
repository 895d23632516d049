"""Runs side by side, from their folders: curves, held-out scores, differences of recipes."""

from __future__ import annotations

import difflib
import fnmatch
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rolemesh.coordinator.api.reads.plans import usual
from rolemesh.coordinator.run.folders.ended_runs import read_records
from rolemesh.coordinator.run.folders.evaluations import (
    NewestScores,
    TaskComparison,
    compare_tasks,
    newest_scores,
    with_evaluations,
)
from rolemesh.coordinator.run.folders.folder import (
    UNREADABLE,
    NoRunError,
    RunStatus,
    read_config,
    read_json,
    read_status,
    told_damage,
)
from rolemesh.coordinator.run.folders.summary import told_steps
from rolemesh.coordinator.run.reporting.records import SUMMARY_FILE
from rolemesh.coordinator.run.saving.resume import CONFIG_FILE, RUN_FILE, differences
from rolemesh.engine.specs.urls import without_passwords

MAX_RUNS = 16
"""Most runs that are put side by side."""

HELD_OUT = "held_out/score"
HELD_OUT_ERROR = "held_out/standard_error"

_FEW = 6
"""Names of metrics that a message lists, at most."""


@dataclass(frozen=True, slots=True)
class Point:
    """A value of a metric."""

    step: int
    value: float


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric of one run, at the steps at which it has a finite value.

    Invariant: there is one point at least, and steps ascend.
    """

    points: tuple[Point, ...]

    @property
    def first(self) -> Point:
        """The oldest."""
        return self.points[0]

    @property
    def last(self) -> Point:
        """The newest."""
        return self.points[-1]

    @property
    def lowest(self) -> Point:
        """The least; of several the first."""
        return min(self.points, key=lambda point: point.value)

    @property
    def highest(self) -> Point:
        """The greatest; of several the first."""
        return max(self.points, key=lambda point: point.value)

    def at(self, step: int) -> Point | None:
        """The newest that is not after a step."""
        return next((point for point in reversed(self.points) if point.step <= step), None)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            **{
                name: asdict(getattr(self, name)) for name in ("first", "last", "lowest", "highest")
            },
            "steps": [point.step for point in self.points],
            "values": [point.value for point in self.points],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """One of the runs."""

    label: str
    """Different for each: the folder's name, or its path where names are the same."""
    run_id: str
    status: RunStatus
    recipe: Mapping[str, Any]
    """As plain JSON values, with all defaults and without passwords."""
    curves: Mapping[str, Curve]
    """By name of the metric."""
    not_finite: Mapping[str, int]
    """How many values of a metric are NaN or infinite, where there are any. No curve has them."""
    evaluated: Mapping[str, NewestScores] = field(default_factory=dict)
    """By task, what `rolemesh evaluate` found of it last."""

    @property
    def algorithm(self) -> str:
        """Type of its algorithm."""
        return str(self.recipe["algorithm"]["type"])

    def planned_and_measured(self) -> str:
        """The step that its plan has predicted beside the measured one, for people."""
        curve = self.curves.get("time/step")
        measured = {} if curve is None else {one.step: one.value for one in curve.points}
        return told_steps(float(self.recipe["plan"]["step_s"]), usual(measured))

    def held_out(self, which: Callable[[Curve], Point]) -> str:
        """A held-out score with its standard error, for people."""
        scores, errors = self.curves.get(HELD_OUT), self.curves.get(HELD_OUT_ERROR)
        if scores is None:
            return "-"
        point = which(scores)
        error = None if errors is None else errors.at(point.step)
        spread = f" ± {error.value:.3f}" if error is not None and error.step == point.step else ""
        return f"{point.value:.3f}{spread} (step {point.step})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs side by side."""

    runs: tuple[ComparedRun, ...]
    differences: Mapping[str, Sequence[Any]]
    """Fields in which their recipes differ, by name, with the value in each; None: it has none."""

    def metrics(self, least: int = 2) -> list[str]:
        """Names of metrics that so many runs have, in the order of the alphabet."""
        names = set().union(*(run.curves for run in self.runs))
        return sorted(n for n in names if sum(n in run.curves for run in self.runs) >= least)

    def chosen(self, patterns: Sequence[str]) -> list[str]:
        """Names of metrics that any run has, pattern by pattern.

        Args:
            patterns: Names, in which "*", "?" and "[...]" stand for more than themselves.

        Raises:
            ValueError: A pattern is that of no metric.
        """
        names: dict[str, None] = {}
        for pattern in patterns:
            known = self.metrics(least=1)
            found = fnmatch.filter(known, pattern)
            if not found:
                raise ValueError(
                    f"--metric {pattern!r}: no run has such a metric; {_nearest(pattern, known)}"
                )
            names |= dict.fromkeys(found)
        return list(names)

    def shared_step(self) -> int | None:
        """The newest step that all runs have come to; None where all have come to the same."""
        steps = {run.status.step for run in self.runs}
        return min(steps) if len(steps) > 1 else None

    def notes(self) -> list[str]:
        """What to know when the numbers are read, each as a sentence."""
        told = []
        for run in self.runs:
            if run.status.state not in ("succeeded", "stopped", "failed", "lost"):
                told.append(f"{run.label} is {run.status.state}: its numbers are those until now.")
            if not run.curves:
                told.append(f"{run.label} has made no step.")
            if run.not_finite:
                counts = ", ".join(f"{name} {n}" for name, n in sorted(run.not_finite.items()))
                told.append(f"{run.label} has values that are not finite, left out here: {counts}.")
            if run.recipe.get("plan"):
                told.append(f"{run.label}: {run.planned_and_measured()}.")
        told += self._unlike_evaluations()
        step = self.shared_step()
        if step is not None:
            told.append(
                f"The runs have made different numbers of steps: 'at {step}' is the newest value "
                f"up to step {step}, which all of them have made."
            )
        return told

    def _unlike_evaluations(self) -> Iterator[str]:
        evaluated = [run for run in self.runs if run.evaluated]
        for other in evaluated[1:]:
            for name, found in evaluated[0].evaluated.items():
                if name in other.evaluated and found.drawing != other.evaluated[name].drawing:
                    yield (
                        f"{evaluated[0].label} and {other.label} were evaluated on {name} with "
                        "completions that were drawn in different ways, and are not compared by it."
                    )

    def evaluations(self) -> Iterator[tuple[ComparedRun, ComparedRun, list[TaskComparison]]]:
        """The first evaluated run with each other one, and the tasks that both have done.

        Of a task that they drew in different ways nothing is told but by `notes`.
        """
        evaluated = [run for run in self.runs if run.evaluated]
        for other in evaluated[1:]:
            one = evaluated[0]
            alike = {
                name: found.scores
                for name, found in one.evaluated.items()
                if name in other.evaluated and found.drawing == other.evaluated[name].drawing
            }
            others = {name: found.scores for name, found in other.evaluated.items()}
            compared = compare_tasks(alike, others)
            if compared:
                yield one, other, compared

    def headings(self) -> list[str]:
        """Headings of `cells`."""
        step = self.shared_step()
        return ["first", "last", "lowest", "highest", *([] if step is None else [f"at {step}"])]

    def cells(self, curve: Curve | None) -> list[str]:
        """The numbers of a metric of one run, for people; None: the run does not have it."""
        step = self.shared_step()
        if curve is None:
            return ["-" for _ in self.headings()]
        row = [f"{curve.first.value:.4g}", f"{curve.last.value:.4g}"]
        row += [f"{one.value:.4g} (step {one.step})" for one in (curve.lowest, curve.highest)]
        if step is not None:
            at = curve.at(step)
            row.append("-" if at is None else f"{at.value:.4g}")
        return row


def shown(value: Any) -> str:
    """A field of a recipe, for people."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


def extent(curves: Sequence[Curve]) -> tuple[tuple[int, int], tuple[float, float]]:
    """First and last step, least and greatest value of some curves, one at least."""
    return (
        (min(one.first.step for one in curves), max(one.last.step for one in curves)),
        (min(one.lowest.value for one in curves), max(one.highest.value for one in curves)),
    )


def share(value: float, low: float, high: float) -> float:
    """Where a value lies between two others, from 0 to 1; 0.5 where these are the same."""
    # Halves, since the difference of two large numbers may be infinite.
    size = high / 2 - low / 2
    return (value / 2 - low / 2) / size if size > 0 else 0.5


def compare(directories: Sequence[Path]) -> Comparison:
    """Reads runs, also those that go on, and puts them side by side.

    Args:
        directories: Their folders, 2 to MAX_RUNS, each a run of its own.

    Raises:
        ValueError: There are fewer or more, or one is there twice.
        NoRunError: A folder holds no run, or files of it cannot be read.
    """
    if not 2 <= len(directories) <= MAX_RUNS:
        raise ValueError(f"{len(directories)} runs are named: give 2 to {MAX_RUNS}")
    names = [directory.resolve().name for directory in directories]
    runs: list[ComparedRun] = []
    seen: dict[str, Path] = {}
    for directory, name in zip(directories, names, strict=True):
        label = name if names.count(name) == 1 else str(directory)
        run = _read_run(directory, label)
        # A link or a copy of the folder is the same run.
        if run.run_id in seen:
            raise ValueError(
                f"{seen[run.run_id]} and {directory} are the same run, {run.run_id!r}: name "
                "different ones"
            )
        seen[run.run_id] = directory
        runs.append(run)
    # A plan is a forecast, which its own note is about.
    recipes = ({**run.recipe, "plan": None} for run in runs)
    return Comparison(tuple(runs), differences(*recipes))


def _read_run(directory: Path, label: str) -> ComparedRun:
    status = read_status(directory)
    if status.state == "damaged":
        raise NoRunError(f"{directory} cannot be read: {status.failure}")
    try:
        summary = read_json(directory / SUMMARY_FILE)
        records = with_evaluations(_kept(read_records(directory, summary)), directory)
        recipe = read_config(directory)
        if not recipe:
            raise NoRunError(
                f"{directory} has no {CONFIG_FILE}: its run has not got as far as its recipe"
            )
        curves, not_finite = _curves(records)
        return ComparedRun(
            label=label,
            run_id=str(read_json(directory / RUN_FILE).get("run_id", directory.resolve())),
            status=status,
            recipe=without_passwords(recipe),
            curves=curves,
            not_finite=not_finite,
            evaluated=newest_scores(directory),
        )
    except NoRunError:
        raise
    except UNREADABLE as error:
        raise NoRunError(
            f"{directory} cannot be read: a file of it is not as a run writes it "
            f"({told_damage(error)})"
        ) from error


def _nearest(pattern: str, known: Sequence[str]) -> str:
    """What to name in place of a pattern that is that of no metric."""
    if not known:
        return "there are none: no run has made a step"
    wider = f"{pattern.rstrip('/*')}/*"
    if fnmatch.filter(known, wider):
        return f"use {wider!r}"
    near = difflib.get_close_matches(pattern, known, n=_FEW)
    if near:
        return f"did you mean {', '.join(near)}?"
    rest = f" and {len(known) - _FEW} more (--json lists all)" if len(known) > _FEW else ""
    return f"there are {', '.join(known[:_FEW])}{rest}"


def _kept(records: Iterable[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Records of which each step is there once: of a run that went back, the newest ones."""
    kept: list[Mapping[str, float]] = []
    for record in records:
        while kept and kept[-1]["step"] >= record["step"]:
            kept.pop()
        kept.append(record)
    return kept


def _curves(
    records: Sequence[Mapping[str, float]],
) -> tuple[dict[str, Curve], dict[str, int]]:
    points: dict[str, list[Point]] = {}
    not_finite: dict[str, int] = {}
    for record in records:
        step = int(record["step"])
        for name, value in record.items():
            if name == "step":
                continue
            if math.isfinite(value):
                points.setdefault(name, []).append(Point(step, float(value)))
            else:
                not_finite[name] = not_finite.get(name, 0) + 1
    return {name: Curve(tuple(found)) for name, found in points.items()}, not_finite
