"""`rolemesh reward check`: tries rewards from outside, with the clients of the reward service."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from rolemesh.coordinator.commands.terminal.ending import refuse
from rolemesh.coordinator.commands.terminal.options import Json
from rolemesh.coordinator.commands.terminal.processes import become
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.hub.hf_files import with_files
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.engine.specs import OutsideRewardSpec, named_sources

app = typer.Typer(help="Rewards from outside.", no_args_is_help=True, add_completion=False)


@app.callback()
def _group() -> None:
    """A group of commands, of however few."""


@app.command()
def check(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SOURCE]...",
            help="As in a recipe: grpc://host:port, http://..., python:file.py:name, or a mapping "
            "in YAML with a type.",
        ),
    ] = None,
    recipe: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Try all of a recipe's, with rows of its data; may be repeated, as in train.",
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Of the one row to send.")] = None,
    completion: Annotated[str | None, typer.Option(help="Of the one row to send.")] = None,
    answer: Annotated[str | None, typer.Option(help="Expected, of that row.")] = None,
    jsonl: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Rows to send: prompt, maybe completion, answer and more."
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Of each request, in s; the source's.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Calls rewards with sample rows and says what is wrong. Exit code 0: nothing is."""
    loaded = _loaded(recipe or [])
    wanted = [*(sources or []), *([] if loaded is None else _of_recipe(loaded))]
    if not wanted:
        refuse("there is no SOURCE: give one, or --recipe")
    flags = {
        "--prompt": prompt,
        "--completion": completion,
        "--answer": answer,
        "--jsonl": jsonl,
        "--timeout": timeout,
        "--recipe-rows": None if loaded is None else _rows_of_recipe(loaded),
    }
    arguments = [f"{flag}={value}" for flag, value in flags.items() if value is not None]
    if as_json:
        arguments.append("--json")
    become("rolemesh.services.reward.outside.check", *arguments, "--", *wanted)


def _loaded(files: list[Path]) -> Recipe | None:
    if not files:
        return None
    try:
        return with_files(load_recipe(files, environment=os.environ), weights=False)
    except RecipeError as error:
        refuse(str(error))


def _of_recipe(recipe: Recipe) -> list[str]:
    """The outside sources of a recipe's reward and cost, each as JSON."""
    found = [
        named.source.model_dump_json()
        for role in (recipe.reward, recipe.cost)
        if role is not None
        for named in named_sources(role.source)
        if isinstance(named.source, OutsideRewardSpec)
    ]
    if not found:
        refuse(
            f"recipe {recipe.run.name}: no reward in here is from outside, so that there is no "
            "server or function to call"
        )
    return found


def _rows_of_recipe(recipe: Recipe) -> str | None:
    """Where the check finds prompts of a recipe, as JSON; None where no policy has data."""
    if recipe.actor is None:
        return None
    data = recipe.actor.data.model_dump(mode="json")
    model = str(recipe.actor.model.path)
    return json.dumps({"model": model, "data": data, "seed": recipe.run.seed})
