"""`rolemesh doctor`: shows what coordinator/commands/diagnosis.py finds."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rolemesh.coordinator.commands.console import JsonConsole
from rolemesh.coordinator.commands.diagnosis import Level, diagnose
from rolemesh.coordinator.commands.ending import EXIT_BAD_INPUT, EXIT_FAILED, fail
from rolemesh.coordinator.commands.options import Json
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import load_recipe

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
        loaded = None if recipe is None else load_recipe([recipe], environment=os.environ)
    except RecipeError as error:
        fail(str(error), EXIT_BAD_INPUT, error, as_json=as_json)
    console = Console()
    colours = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}
    worst = Level.OK
    for finding in asyncio.run(diagnose(loaded)):
        worst = max(worst, finding.level)
        if as_json:
            JsonConsole().write("finding", finding.to_dict())
            continue
        mark = f"[{colours[finding.level]}]{finding.level.name:4}[/]"
        console.print(f"{mark}  {finding.what:<15}", end="", highlight=False)
        console.print(finding.text, markup=False, highlight=False, soft_wrap=True)
        if finding.remedy:
            console.print(
                f"{'':21}-> {finding.remedy}", markup=False, highlight=False, soft_wrap=True
            )
    if worst is Level.FAIL:
        raise typer.Exit(EXIT_FAILED)
