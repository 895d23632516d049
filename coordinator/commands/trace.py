"""`rolemesh trace`: where the time of a run's steps went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rolemesh.coordinator.commands.terminal.console import JsonConsole, say
from rolemesh.coordinator.commands.terminal.ending import EXIT_BAD_INPUT, fail
from rolemesh.coordinator.commands.terminal.options import Json, RunArgument
from rolemesh.coordinator.dataflow.trace import chrome_trace, path_summary, print_paths
from rolemesh.coordinator.run.folders import folder as run_files
from rolemesh.coordinator.state.files import write_atomically

TRACED_STEPS_SHOWN = 20
"""Steps in the table, the newest ones; --step shows any other."""

app = typer.Typer(add_completion=False)


@app.command()
def trace(
    directory: RunArgument = None,
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="File to write; DIR/trace.json.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Writes a run's calls as a Chrome trace, and shows what each step had to wait for."""
    try:
        found = run_files.newest_run() if directory is None else directory
        graphs = run_files.read_graphs(found, step)
    except run_files.NoRunError as error:
        fail(str(error), EXIT_BAD_INPUT, as_json=as_json)
    written = found / "trace.json" if out is None else out
    nodes = [node for graph in graphs for node in graph]
    try:
        write_atomically(written, json.dumps(chrome_trace(nodes)) + "\n")
    except OSError as error:
        text = (
            f"--out {written} cannot be written ({error.strerror}): name a file in another folder"
        )
        fail(text, EXIT_BAD_INPUT, as_json=as_json)
    if as_json:
        for graph in graphs:
            JsonConsole().write("critical_path", path_summary(graph))
        JsonConsole().write("trace", {"file": str(written), "steps": len(graphs)})
        return
    console, shown = Console(), graphs[-TRACED_STEPS_SHOWN:]
    print_paths(console, shown)
    if len(shown) < len(graphs):
        console.print(f"The newest {len(shown)} of {len(graphs)} steps; the trace has all.")
    say(console, f"{written}: open it with https://ui.perfetto.dev or chrome://tracing")
