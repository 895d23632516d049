"""`rolemesh status`: runs in folders, and their services."""

from __future__ import annotations

import typer
from rich.console import Console

from rolemesh.coordinator.commands.terminal.console import JsonConsole
from rolemesh.coordinator.commands.terminal.ending import EXIT_BAD_INPUT, fail
from rolemesh.coordinator.commands.terminal.options import Json, RunArgument
from rolemesh.coordinator.run.folders import folder as run_files

app = typer.Typer(add_completion=False)


@app.command()
def status(directory: RunArgument = None, as_json: Json = False) -> None:
    """Shows runs and, for one that goes on, its services."""
    try:
        directories = run_files.run_directories() if directory is None else [directory]
        known = [run_files.read_status(found) for found in directories]
    except run_files.NoRunError as error:
        fail(str(error), EXIT_BAD_INPUT, as_json=as_json)
    if as_json:
        for one in known:
            JsonConsole().write("run", one.to_dict())
    else:
        run_files.print_status(Console(), known)
