"""`rolemesh fetch`: brings what recipes name at the Hugging Face hub, before it is needed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from rolemesh.coordinator.commands.terminal.ending import EXIT_BAD_INPUT, fail
from rolemesh.coordinator.commands.terminal.options import Json, Overrides, Recipes
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.hub.hf_client import Found
from rolemesh.coordinator.recipe.hub.hf_files import found_files
from rolemesh.coordinator.recipe.loading import load_recipe

app = typer.Typer(add_completion=False)


@app.command()
def fetch(
    recipe: Recipes,
    overrides: Overrides = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="FOLDER",
            help="Also copy it, as plain files, into folders ORG/NAME below this one, e.g. for a "
            "container.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Brings the models and data that a recipe names at the Hugging Face hub.

    They come into the hub's ordinary cache (HF_HOME), so that afterwards the recipe needs no
    connection. The config.yaml of a run is a recipe, too, and names the very commits.

    Example: rolemesh fetch my-recipe.yaml --to .models
    """
    try:
        loaded = load_recipe(recipe, overrides=overrides or (), environment=os.environ)
        found = found_files(loaded)
        copies = {} if to is None else _copied(found, to)
    except RecipeError as error:
        fail(str(error), EXIT_BAD_INPUT, as_json=as_json)
    for field, one in found.items():
        place = copies.get(field, one.folder)
        if as_json:
            print(json.dumps({"field": field, "name": str(one.name), "folder": str(place)}))
        elif to is None:
            print(f"{field}: {one.name} is in {place}")
        else:
            print(f"--set {field}={place}")
    if not found and not as_json:
        print("the recipe names nothing at the hub")


def _copied(found: dict[str, Found], to: Path) -> dict[str, Path]:
    """Copies what was found as plain files; the folder of each, by field."""
    copies = {}
    for field, one in found.items():
        copies[field] = to / one.name.repo / one.part
        for name in one.files:
            target = to / one.name.repo / name
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                # Of links in the cache it copies what they lead to.
                begun = target.with_name(f"{target.name}.part")
                shutil.copyfile(one.snapshot / name, begun)
                begun.replace(target)
            except OSError as error:
                raise RecipeError(
                    f"--to {to}: {target} cannot be written ({error.strerror}): name another folder"
                ) from error
    return copies
