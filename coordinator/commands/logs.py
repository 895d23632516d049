"""`rolemesh logs`: what the processes of a run wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rolemesh.coordinator.commands.terminal.ending import EXIT_INTERRUPTED, refuse
from rolemesh.coordinator.run.folders import folder as run_files

app = typer.Typer(add_completion=False)


@app.command()
def logs(
    directory: Annotated[
        str | None, typer.Argument(metavar="[DIR]", help="Folder of a run; the newest in runs/.")
    ] = None,
    role: Annotated[
        str | None, typer.Argument(metavar="[ROLE]", help="Only this one, or `coordinator`.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more.")] = False,
) -> None:
    """Prints the logs of a run, by role."""
    if directory is not None and role is None and directory in run_files.LOG_NAMES:
        directory, role = None, directory
    try:
        found = run_files.newest_run() if directory is None else Path(directory)
        files = run_files.log_files(found, role)
        run_files.print_logs(files, follow=follow)
    except run_files.NoRunError as error:
        refuse(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
