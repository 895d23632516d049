"""`rolemesh doctor`: shows what coordinator/commands/findings/diagnosis.py finds."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from rolemesh.coordinator.commands.findings.diagnosis import diagnose
from rolemesh.coordinator.commands.findings.findings import FindingsShown, Level
from rolemesh.coordinator.commands.findings.placing import load_placed
from rolemesh.coordinator.commands.terminal.ending import EXIT_BAD_INPUT, EXIT_FAILED, fail
from rolemesh.coordinator.commands.terminal.options import Json
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.hub.hf_files import with_files
from rolemesh.coordinator.run.services.host_gpus import host_gpus

app = typer.Typer(add_completion=False)


@app.command()
def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="Also look for what it needs.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Checks what this machine has, and says what to do about what it lacks."""
    try:
        gpus = host_gpus()
        loaded = None
        if recipe is not None:
            loaded = load_placed([recipe], gpus, environment=os.environ)
            loaded = with_files(loaded)
    except RecipeError as error:
        fail(str(error), EXIT_BAD_INPUT, as_json=as_json)
    shown = FindingsShown(as_json=as_json)
    for finding in asyncio.run(diagnose(loaded, gpus)):
        shown.show(finding)
    if shown.counts[Level.FAIL]:
        raise typer.Exit(EXIT_FAILED)
