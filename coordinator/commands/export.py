"""`rolemesh export`: this process becomes the writer of a checkpoint as a model folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rolemesh.coordinator.commands.terminal.ending import refuse
from rolemesh.coordinator.run.folders import folder as run_files

app = typer.Typer(add_completion=False)


@app.command()
def export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.")],
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="Folder to write.")],
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; the newest.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Writes the policy of a checkpoint as a Hugging Face folder."""
    try:
        command = run_files.export_command(directory, step, to, dtype)
    except run_files.NoRunError as error:
        refuse(str(error))
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.stdout.flush()
    os.execv(command[0], command)
