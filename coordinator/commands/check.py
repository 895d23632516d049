"""`rolemesh check`: shows what coordinator/commands/findings/recipe_checks.py finds.

Of the folder of a model: what engine/model_folders/model_abilities.py knows of it.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rolemesh.coordinator.commands.findings.findings import FindingsShown, Level
from rolemesh.coordinator.commands.findings.placing import load_placed
from rolemesh.coordinator.commands.findings.recipe_checks import recipe_findings
from rolemesh.coordinator.commands.terminal.console import JsonConsole
from rolemesh.coordinator.commands.terminal.ending import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_NOT_WHOLE,
    fail,
)
from rolemesh.coordinator.commands.terminal.options import Json, Overrides
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.hub.hf_files import with_files
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.services.host_gpus import HostGpus, host_gpus
from rolemesh.engine.model_folders.model_abilities import abilities_of, as_markdown
from rolemesh.engine.model_folders.model_files import check_model_files, read_config_file

app = typer.Typer(add_completion=False)


@app.command()
def check(
    recipe: Annotated[
        list[Path],
        typer.Argument(
            metavar="RECIPE...|MODEL-FOLDER",
            help="YAML files, a later one wins; or the Hugging Face folder of a model.",
        ),
    ],
    overrides: Overrides = None,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Longest time for rewards and your code, in s.")
    ] = 10.0,
    as_json: Json = False,
) -> None:
    """Looks for problems that would stop a recipe's run, or tells what a model can do.

    Of a folder with a model it prints one table: what samples it, and whether it can be trained on
    one rank, over ranks and with an adapter. Exit code 1: not at all.

    Of a recipe it loads no model.
    Reads the data, renders a prompt as the model will see it, builds the algorithm's graph, begins
    an episode of the environment, asks rewards from outside for one row, loads losses of yours,
    estimates memory and disk, and says what to change. Exit code 0: there is none; 1: there
    is one; 2: the recipe cannot be read; 3: none was found, but --timeout left checks
    out, which are named.
    """
    if len(recipe) == 1 and recipe[0].is_dir():
        _show_model(recipe[0], as_json)
        return
    try:
        gpus = host_gpus()
        loaded = load_placed(recipe, gpus, overrides=overrides or (), environment=os.environ)
        loaded = with_files(loaded)
    except RecipeError as error:
        fail(str(error), EXIT_BAD_INPUT, as_json=as_json)
    shown = FindingsShown(as_json=as_json)
    asyncio.run(_show(loaded, gpus, timeout, shown))
    if shown.counts[Level.FAIL]:
        raise typer.Exit(EXIT_FAILED)
    if shown.counts[Level.SKIP]:
        raise typer.Exit(EXIT_NOT_WHOLE)


def _show_model(folder: Path, as_json: bool) -> None:
    """What the model of a folder can do here, and what the folder lacks for that."""
    try:
        found = abilities_of(read_config_file(folder, field="model"))
        if found.can_train:
            check_model_files(folder, field="model", has_tokenizer=True)
    except ValueError as error:
        fail(str(error), EXIT_BAD_INPUT, as_json=as_json)
    if as_json:
        JsonConsole().write("model", asdict(found))
    else:
        print(as_markdown([found]))
    if not found.can_train:
        raise typer.Exit(EXIT_FAILED)


async def _show(recipe: Recipe, gpus: HostGpus, timeout_s: float, shown: FindingsShown) -> None:
    async for finding in recipe_findings(recipe, timeout_s, gpus):
        shown.show(finding)
