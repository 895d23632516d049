"""Shows what a run came to."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rolemesh.coordinator.commands.terminal.console import say
from rolemesh.coordinator.run.folders.summary import RunSummary, told_steps
from rolemesh.coordinator.run.results.evaluation import Evaluation

LOSS_ROWS = {"loss": "loss", "accuracy": "preference_accuracy", "margin": "preference_margin"}
"""Words and names of what the summary shows of evaluations that computed a loss."""


def print_summary(console: Console, summary: RunSummary) -> None:
    """Prints the result of a run, and where its files are."""
    table = Table(title=_headline(summary), title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for name, *values in _rows(summary):
        if any(value is not None for value in values):
            table.add_row(name, *(value or "-" for value in values))
    if table.row_count:
        console.print(table)
        if _score(summary.held_out_before) or _score(summary.held_out_after):
            console.print("+- is one standard error.", style="dim")
    else:
        console.print(_headline(summary), style="bold")
    if summary.early_stop:
        console.print(summary.early_stop, highlight=False, soft_wrap=True)
    if summary.best:
        held_out = summary.best.held_out
        console.print(
            f"best checkpoint: step {held_out.step}, {summary.best.metric} {held_out.value:.4g}",
            highlight=False,
        )
        if held_out.step != summary.steps:
            folder = shlex.quote(str(summary.directory))
            say(
                console,
                f"to export it: rolemesh export {folder} --step {held_out.step} --to FOLDER",
            )
    if summary.recoveries:
        spent_s = sum(one.seconds for one in summary.recoveries)
        console.print(f"recovered {len(summary.recoveries)} times, in {spent_s:.0f} s")
    if summary.planned_step_s is not None:
        told = told_steps(summary.planned_step_s, summary.measured_step_s)
        console.print(told, highlight=False)
    total = summary.seconds
    spent = sorted(summary.seconds_by_phase.items(), key=lambda item: -item[1])
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in spent if seconds >= 0.5)
    console.print(f"{summary.tokens:,} training tokens in {total:.0f} s: {times}", highlight=False)
    lines = {
        "model": summary.model_directory,
        "files": summary.directory,
        "curves": _tensorboard(summary.directory / "tensorboard"),
    }
    for name, text in lines.items():
        if text is not None:
            console.print(f"{name:7}{text}", highlight=False, soft_wrap=True)


def _rows(summary: RunSummary) -> Iterator[tuple[str, str | None, str | None]]:
    """Names of results, and what each was before and after; None where it is not known."""
    before, after = summary.held_out_before, summary.held_out_after
    prompts = f" ({before.num_prompts} prompts)" if before else ""
    yield f"held-out score{prompts}", _score(before), _score(after)
    yield "held-out accuracy", _accuracy(before), _accuracy(after)
    for words, name in LOSS_ROWS.items():
        number = f" ({before.num_prompts} rows)" if before and name == "loss" else ""
        yield f"held-out {words}{number}", _of_loss(before, name), _of_loss(after, name)
    first, last = summary.mean_reward_first_steps, summary.mean_reward_last_steps
    yield (
        "training reward (first and last steps)",
        None if first is None else f"{first:.3f}",
        None if last is None else f"{last:.3f}",
    )


def _tensorboard(directory: Path) -> str:
    """The command as it can be typed here, even if the environment is not activated."""
    beside = Path(sys.executable).with_name("tensorboard")
    if shutil.which("tensorboard"):
        return f"tensorboard --logdir {directory}"
    if beside.exists():
        return f"{beside} --logdir {directory}"
    return f"{directory} (to see them: pip install tensorboard)"


def _score(found: Evaluation | None) -> str | None:
    if found is None or found.score is None:
        return None
    return f"{found.score:.3f} +- {found.standard_error:.3f}"


def _of_loss(found: Evaluation | None, name: str) -> str | None:
    if found is None or found.score is not None or name not in found.metrics:
        return None
    return f"{found.metrics[name]:.3f}"


def _accuracy(found: Evaluation | None) -> str | None:
    if found is None or "accuracy/mean" not in found.metrics:
        return None
    error = found.metrics.get("accuracy/standard_error")
    return f"{found.metrics['accuracy/mean']:.3f}" + ("" if error is None else f" +- {error:.3f}")


def _headline(summary: RunSummary) -> str:
    return f"{summary.run_id} {summary.state.value}: {summary.steps} of {summary.num_steps} steps"
