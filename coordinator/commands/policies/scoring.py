"""Has a policy asked and scored by a process of its own, and keeps what that says."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rolemesh.coordinator.commands.terminal.processes import PreviewError, told_by
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.run.results.scores import TaskScores
from rolemesh.engine.specs.evaluation import EvaluationQuestion

TOLD_EVERY_S = 10.0
"""Seconds between two lines about how far a task is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """What was found of one policy."""

    model: str
    """As its endpoint calls it."""
    tasks: Mapping[str, TaskScores]


def scored(
    question: EvaluationQuestion,
    *,
    key: str | None,
    rows: IO[str],
    pass_score: float | None,
    tell: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
) -> Scored:
    """Asks and scores.

    Args:
        question: What, whom, and how.
        key: Of the endpoint, for the process alone; in the variable that the question names.
        rows: Each completion is written there, one a line.
        pass_score: Score from which a completion passes, in place of the task's own.
        tell: Is told how far it is.
        check: Raises when there is no use in going on.

    Raises:
        RecipeError: The question cannot be answered as it is.
        PreviewError: The process failed, or the endpoint does not answer.
    """
    variable = question.asked.key_variable
    model, tasks = "", dict[str, TaskScores]()
    task: TaskScores | None = None
    told_at = time.monotonic()
    for line in told_by(
        "rolemesh.services.evaluation",
        work="asks and scores",
        environment={} if variable is None or key is None else {variable: key},
        question=question.model_dump_json(),
    ):
        kind = line.pop("type")
        if kind == "error":
            check()
            raise (RecipeError if line["is_input"] else PreviewError)(line["text"])
        if kind == "model":
            model = line["model"]
        elif kind == "task":
            full_score = line["full_score"] if pass_score is None else pass_score
            task = TaskScores(
                name=line["task"],
                num_prompts=line["num_prompts"],
                samples=line["samples"],
                full_score=full_score,
            )
            tasks[task.name] = task
        else:
            assert task is not None
            if kind == "row":
                task.add(line)
                rows.write(json.dumps(line) + "\n")
            now = time.monotonic()
            if now - told_at >= TOLD_EVERY_S:
                told_at = now
                total = task.num_prompts * task.samples
                # Those that wait to be judged together come as rows in the end.
                number = task.num_completions + line.get("num_waiting", 0)
                tell(f"{task.name}: {number} of {total} completions")
    check()
    return Scored(model=model, tasks=tasks)


def key_of(variable: str | None) -> str | None:
    """The key in a variable; raises RecipeError where it is not set."""
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key:
        raise RecipeError(f"--key-variable: {variable} is not set, or empty: set it")
    return key


def rows_beside(path: Path, suffix: str) -> Path:
    """The file of the completions of an evaluation."""
    return path.with_name(path.name.removesuffix(".json") + suffix)


def as_numbers(text: str) -> Sequence[int]:
    """Reads "1,4,8"; raises RecipeError for anything else."""
    try:
        found = tuple(dict.fromkeys(int(one) for one in text.split(",")))
    except ValueError as error:
        raise RecipeError(f"--pass-at {text}: give numbers, e.g. 1,4") from error
    if min(found) < 1:
        raise RecipeError(f"--pass-at {text}: give numbers of at least 1")
    return found


def plain(values: Any) -> Any:
    """A spec as plain JSON values, without what is not set."""
    return values.model_dump(mode="json", exclude_none=True)
