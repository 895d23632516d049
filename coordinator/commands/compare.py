"""`rolemesh compare`: runs side by side, in the terminal and as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rolemesh.coordinator.commands.policies.compare_page import page
from rolemesh.coordinator.commands.policies.table import show_differences
from rolemesh.coordinator.commands.terminal.console import COLUMNS, JsonConsole
from rolemesh.coordinator.commands.terminal.ending import EXIT_BAD_INPUT, EXIT_FAILED, fail
from rolemesh.coordinator.commands.terminal.options import Json
from rolemesh.coordinator.commands.terminal.plot import plot
from rolemesh.coordinator.run.folders.comparison import Comparison, extent, shown
from rolemesh.coordinator.run.folders.comparison import compare as compared
from rolemesh.coordinator.run.folders.folder import run_of_id
from rolemesh.coordinator.state.files import write_atomically

app = typer.Typer(add_completion=False)

_STYLES = ("bright_blue", "yellow", "green", "magenta", "cyan", "red", "white", "bright_green")
_PLOTTED = ("reward/mean", "held_out/score", "nll", "preference_accuracy")
"""Curves that are drawn where no metric is named."""

_SHOWN_CHARACTERS = 60
"""Of a field of a recipe; the HTML file has all."""


@app.command()
def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN RUN...", help="Folders or ids of runs, 2 to 16.")
    ],
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="A metric to show; \"*\" stands for more, as in 'reward/*'. May be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE.html", help="Also write one HTML file, which needs no network."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Puts runs side by side: curves, held-out scores, and where their recipes differ."""
    try:
        found = compared([Path(run) if Path(run).is_dir() else run_of_id(run) for run in runs])
        chosen = found.chosen(metrics or ())
    except ValueError as error:
        fail(str(error), EXIT_BAD_INPUT, as_json=as_json)
    if out is not None:
        try:
            write_atomically(out, page(found, in_order(chosen or found.metrics())))
        except OSError as error:
            text = f"--out: {out} cannot be written ({error.strerror})"
            fail(text, EXIT_FAILED, as_json=as_json)
    if as_json:
        _write(found, chosen or found.metrics(least=1))
    else:
        _show(Console(), found, chosen)
        if out is not None:
            print(f"\nwritten: {out}")


def in_order(names: Sequence[str]) -> list[str]:
    """Those that the console shows of each step come first."""
    usual = [name for _, name, _ in COLUMNS]
    return sorted(names, key=lambda name: usual.index(name) if name in usual else len(usual))


def _write(found: Comparison, metrics: Sequence[str]) -> None:
    console = JsonConsole()
    for run in found.runs:
        facts = run.status.to_dict()
        # The curves have them, and no value that JSON has not.
        del facts["metrics"]
        told = {"label": run.label, "run_id": run.run_id, "algorithm": run.algorithm}
        console.write("run", {**told, **facts})
    for name in metrics:
        curves = {run.label: run.curves.get(name) for run in found.runs}
        values = {label: None if one is None else one.to_dict() for label, one in curves.items()}
        console.write("metric", {"name": name, "runs": values})
    for one, other, tasks in found.evaluations():
        for task in tasks:
            differs = None if task.difference is None else task.difference.to_dict()
            facts = {"first": one.label, "second": other.label, "task": task.task}
            console.write("evaluation", {**facts, "difference": differs})
    for name, fields in found.differences.items():
        labels = [run.label for run in found.runs]
        console.write("difference", {"field": name, "runs": dict(zip(labels, fields, strict=True))})


def _show(console: Console, found: Comparison, chosen: Sequence[str]) -> None:
    styles = [_STYLES[place % len(_STYLES)] for place in range(len(found.runs))]
    _show_runs(console, found, styles)
    usual = [name for _, name, _ in COLUMNS]
    metrics = chosen or [name for name in in_order(found.metrics()) if name in usual]
    if metrics:
        _show_metrics(console, found, metrics, styles)
    else:
        console.print("no two runs have a metric in common: --metric names those of one run")
    for name in chosen or [name for name in metrics if name in _PLOTTED]:
        _plot(console, found, name, styles)
    for one, other, tasks in found.evaluations():
        console.print()
        show_differences(console, one.label, other.label, tasks)
    _show_differences(console, found, styles)


def _show_runs(console: Console, found: Comparison, styles: Sequence[str]) -> None:
    table = Table(title="runs", title_justify="left")
    for heading in ("run", "algorithm", "state", "steps", "held out, first", "best", "last"):
        table.add_column(heading, overflow="fold")
    for run, style in zip(found.runs, styles, strict=True):
        status = run.status
        state = status.state + (f", recovered {status.recoveries} times" * bool(status.recoveries))
        table.add_row(
            # What stands in files of others is never markup.
            Text(run.label, style),
            Text(run.algorithm),
            state,
            f"{status.step} of {'?' if status.num_steps is None else status.num_steps}",
            run.held_out(lambda curve: curve.first),
            run.held_out(lambda curve: curve.highest),
            run.held_out(lambda curve: curve.last),
        )
    console.print(table)
    for text in found.notes():
        console.print(Text(text, "dim"), soft_wrap=True)


def _show_metrics(
    console: Console, found: Comparison, metrics: Sequence[str], styles: Sequence[str]
) -> None:
    table = Table(title="metrics", title_justify="left")
    for heading in ("metric", "run"):
        table.add_column(heading, overflow="fold")
    for heading in found.headings():
        table.add_column(heading, justify="right")
    for name in metrics:
        for place, (run, style) in enumerate(zip(found.runs, styles, strict=True)):
            table.add_row(
                Text(name if place == 0 else ""),
                Text(run.label, style),
                *found.cells(run.curves.get(name)),
                end_section=place == len(found.runs) - 1,
            )
    console.print(table)


def _plot(console: Console, found: Comparison, name: str, styles: Sequence[str]) -> None:
    """One plot with a colour for each run, or without colours a plot for each."""
    drawn = [
        (run.label, run.curves[name], style)
        for run, style in zip(found.runs, styles, strict=True)
        if name in run.curves
    ]
    steps, values = extent([curve for _, curve, _ in drawn])
    has_colours = console.color_system is not None and not console.no_color
    for group in [drawn] if has_colours else [[one] for one in drawn]:
        heading = Text.assemble("\n", (name, "bold"))
        for label, _, style in group:
            heading.append("  ").append(label, style)
        console.print(heading, soft_wrap=True)
        console.print(plot([(curve, style) for _, curve, style in group], steps, values))


def _show_differences(console: Console, found: Comparison, styles: Sequence[str]) -> None:
    if not found.differences:
        console.print("\nThe recipes do not differ.")
        return
    table = Table(title="where the recipes differ", title_justify="left")
    table.add_column("field", overflow="fold")
    for run, style in zip(found.runs, styles, strict=True):
        table.add_column(Text(run.label, style), overflow="fold")
    for name, values in found.differences.items():
        table.add_row(Text(name), *(Text(_brief(value)) for value in values))
    console.print()
    console.print(table)


def _brief(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + " ..."
