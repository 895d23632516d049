"""Evaluations of policies as files: of a run beside its other files, of a folder by themselves.

RUN/evaluations/NAME.json has scores and what they say, NAME.rows.jsonl each completion, and
RUN/evaluations.jsonl a line for each, from which curves are drawn.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolemesh.coordinator.run.results.scores import TaskScores, compared
from rolemesh.coordinator.state.files import make_folder, write_atomically
from rolemesh.coordinator.trackers.files import whole_lines
from rolemesh.engine.statistics import Difference

FOLDER = "evaluations"
LINES_FILE = "evaluations.jsonl"
"""In a run's folder."""

ROWS_SUFFIX = ".rows.jsonl"

_FORMAT = 1

FORMULAS: Mapping[str, str] = {
    "score": "mean over prompts of the mean score of a prompt's completions",
    "standard_error": "sample deviation over prompts / sqrt(prompts) (arXiv 2411.00640)",
    "pass_at": "mean over prompts of 1 - C(n - c, k) / C(n, k), where c of n completions pass "
    "(arXiv 2107.03374, eq. 1)",
    "difference": "mean of the differences prompt by prompt, its 95 % interval is 1.96 standard "
    "errors of these differences to both sides (arXiv 2411.00640, paired); p of the two-sided "
    "sign-flip test",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationFile:
    """One evaluation of one policy."""

    policy: str
    """Name for people."""
    tasks: Mapping[str, TaskScores]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Who was asked, when, and how: plain JSON values."""
    ks: Sequence[int] = ()
    """The k of pass@k."""
    step: int | None = None
    """Steps that its run had made; None: it is of no run."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "format": _FORMAT,
            "policy": self.policy,
            "step": self.step,
            **self.facts,
            "pass_at": list(self.ks),
            "formulas": dict(FORMULAS),
            "tasks": {name: task.to_dict(self.ks) for name, task in self.tasks.items()},
        }

    def metrics(self) -> dict[str, float]:
        """Scalars for curves."""
        found: dict[str, float] = {}
        for task in self.tasks.values():
            found |= task.metrics(self.ks)
        return found


def read_evaluation(path: Path) -> EvaluationFile:
    """Reads a file that `rolemesh evaluate` wrote; raises ValueError for any other."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["format"] != _FORMAT:
            raise ValueError(f"its format is {told['format']}, not {_FORMAT}")
        return EvaluationFile(
            policy=str(told["policy"]),
            step=told["step"],
            ks=tuple(told["pass_at"]),
            tasks={name: TaskScores.of_dict(name, task) for name, task in told["tasks"].items()},
            facts={name: told[name] for name in ("drawing", "evaluated_at") if name in told},
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no evaluation ({type(error).__name__}: {error}): give a file that "
            "`rolemesh evaluate` wrote"
        ) from error


def new_path(folder: Path, name: str) -> Path:
    """A path for a new evaluation in a folder, which is made."""
    make_folder(folder)
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbered = (f"{stem}{'' if n == 1 else f'-{n}'}.json" for n in itertools.count(1))
    return next(folder / one for one in numbered if not (folder / one).exists())


def write_evaluation(path: Path, found: EvaluationFile, run: Path | None) -> None:
    """Writes the file, and its line beside the files of its run.

    Args:
        path: The file.
        found: What it holds.
        run: Folder of the run that it is of; None: of none.
    """
    write_atomically(path, json.dumps(found.to_dict(), indent=1) + "\n")
    if run is None or found.step is None:
        return
    shown = path.relative_to(run) if path.is_relative_to(run) else path.absolute()
    line = {
        "step": found.step,
        "at": found.facts.get("evaluated_at"),
        "file": str(shown),
        "metrics": found.metrics(),
    }
    with (run / LINES_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _lines(run: Path) -> Iterable[dict[str, Any]]:
    """Raises ValueError, KeyError or TypeError for what no evaluation wrote."""
    for _, text in whole_lines(run / LINES_FILE):
        line = json.loads(text)
        yield {"step": int(line["step"]), "file": str(line["file"]), "metrics": line["metrics"]}


def evaluated_metrics(run: Path) -> dict[int, dict[str, float]]:
    """Scalars of a run's evaluations by step; of several of one step the newest counts."""
    found: dict[int, dict[str, float]] = {}
    for line in _lines(run):
        of_step = found.setdefault(line["step"], {})
        of_step |= {str(name): float(value) for name, value in line["metrics"].items()}
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class NewestScores:
    """Scores of a task by the evaluation of a run's latest step that was evaluated."""

    step: int
    scores: TaskScores
    drawing: Mapping[str, Any]
    """How its completions were drawn."""


def newest_scores(run: Path) -> dict[str, NewestScores]:
    """By task; of several of one step the newest. What has been moved away does not count.

    Raises:
        ValueError, KeyError, TypeError: A file is not as `rolemesh evaluate` writes it.
    """
    found: dict[str, NewestScores] = {}
    for line in _lines(run):
        path = run / line["file"]
        if not path.is_file():
            continue
        read = read_evaluation(path)
        for name, task in read.tasks.items():
            if name not in found or line["step"] >= found[name].step:
                drawing = read.facts.get("drawing", {})
                found[name] = NewestScores(step=line["step"], scores=task, drawing=drawing)
    return found


def with_evaluations(records: Iterable[Mapping[str, float]], run: Path) -> list[dict[str, float]]:
    """Records of a run's steps, each with the scalars of evaluations of its step.

    A step that has no record gets one, in its place.
    """
    evaluated = evaluated_metrics(run)
    merged = [dict(record) for record in records]
    # Of a run that went back, the newest record of a step is the one that counts.
    places = {int(record["step"]): at for at, record in enumerate(merged)}
    for step, metrics in evaluated.items():
        if step in places:
            merged[places[step]] |= metrics
    for step in sorted(evaluated.keys() - places.keys()):
        before = [at for at, record in enumerate(merged) if record["step"] < step]
        merged.insert(before[-1] + 1 if before else 0, {"step": float(step), **evaluated[step]})
    return merged


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskComparison:
    """One task of two policies."""

    task: str
    one: TaskScores
    other: TaskScores
    difference: Difference | None
    """None: they have no prompt in common."""


def compare_tasks(
    one: Mapping[str, TaskScores], other: Mapping[str, TaskScores]
) -> list[TaskComparison]:
    """The tasks that two policies have both done, in the order of the first."""
    return [
        TaskComparison(
            task=name,
            one=one[name],
            other=other[name],
            difference=compared(one[name], other[name]),
        )
        for name in one
        if name in other
    ]
