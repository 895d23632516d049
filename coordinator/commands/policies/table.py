"""Evaluations on a terminal: scores with their errors, and differences with theirs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rolemesh.coordinator.run.folders.evaluations import EvaluationFile, TaskComparison
from rolemesh.engine.statistics import Estimate

ERRORS = "± is the standard error over prompts; a prompt counts once, with its mean."
DIFFERENCES = (
    "[ ] is the 95 % interval of the difference prompt by prompt (1.96 paired standard errors), "
    "p that of the two-sided sign-flip test; arXiv 2411.00640."
)

_NAMED = 5
"""Rows without a score that are shown; the file names more."""


def show_evaluation(console: Console, found: EvaluationFile) -> None:
    """A row for each task, and below it what could not be scored."""
    samples = max((task.samples for task in found.tasks.values()), default=1)
    drawn = "1 completion a prompt" if samples == 1 else f"{samples} completions a prompt"
    # A title of a table is as narrow as the table.
    console.print(Text(f"{found.policy}: {drawn}", "bold"), soft_wrap=True)
    table = Table()
    table.add_column("task", overflow="fold")
    passes = [f"pass@{k}" for k in found.ks]
    for heading in ("prompts", "score", *passes, "cut", "unscored"):
        table.add_column(heading, justify="right", no_wrap=True)
    for task in found.tasks.values():
        total = task.num_prompts * task.samples
        table.add_row(
            Text(task.name),
            str(task.num_prompts),
            _told(task.score()),
            *(_told(task.pass_at(k)) for k in found.ks),
            f"{task.truncated / max(1, total):.0%}",
            f"{task.unscored} of {total}" if task.unscored else "0",
        )
    console.print(table)
    for task in found.tasks.values():
        for text in task.unscored_rows[:_NAMED]:
            told = f"{task.name}, no score of {text}"
            console.print(Text(told, "yellow"), soft_wrap=True)
        if task.unscored > _NAMED:
            told = f"{task.name}: {task.unscored - _NAMED} more have no score"
            console.print(Text(told, "yellow"), soft_wrap=True)
    console.print(Text(ERRORS, "dim"), soft_wrap=True)


def show_differences(
    console: Console, one: str, other: str, compared: Sequence[TaskComparison]
) -> None:
    """A row for each task that both have: how far the second is above the first."""
    console.print(Text(f"{other} minus {one}", "bold"), soft_wrap=True)
    table = Table()
    table.add_column("task", overflow="fold")
    for heading in ("shared prompts", "first", "second", "difference"):
        table.add_column(heading, justify="right")
    for each in compared:
        found = each.difference
        table.add_row(
            Text(each.task),
            "none" if found is None else str(found.num_prompts),
            _told(each.one.score()),
            _told(each.other.score()),
            "-" if found is None else found.told(),
        )
    console.print(table)
    for each in compared:
        if each.difference is not None and each.difference.num_others:
            told = f"{each.task}: {each.difference.num_others} prompts that only one has scored "
            console.print(Text(f"{told}do not count", "yellow"), soft_wrap=True)
    console.print(Text(DIFFERENCES, "dim"), soft_wrap=True)


def _told(found: Estimate | None) -> str:
    return "-" if found is None else found.told()
