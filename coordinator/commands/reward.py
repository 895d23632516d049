"""`rolemesh reward check`: tries rewards from outside, with the clients of the reward service."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rolemesh.coordinator.commands.ending import refuse
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.engine.specs import OutsideRewardSpec, named_sources

_MODULE = "rolemesh.services.reward.outside.check"

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
        typer.Option(metavar="FILE", help="Try all of a recipe's; may be repeated, as in train."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Of the one row to send.")] = None,
    completion: Annotated[str | None, typer.Option(help="Of the one row to send.")] = None,
    answer: Annotated[str | None, typer.Option(help="Expected, of that row.")] = None,
    jsonl: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Rows to send: prompt, completion, maybe answer and more."
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Of each request, in s; the source's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Calls rewards with sample rows and says what is wrong. Exit code 0: nothing is."""
    wanted = [*(sources or []), *_of_recipe(recipe or [])]
    if not wanted:
        refuse("there is no SOURCE: give one, or --recipe")
    flags = {
        "--prompt": prompt,
        "--completion": completion,
        "--answer": answer,
        "--jsonl": jsonl,
        "--timeout": timeout,
    }
    arguments = [f"{flag}={value}" for flag, value in flags.items() if value is not None]
    if as_json:
        arguments.append("--json")
    # The current directory must not shadow a package.
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", _MODULE, *arguments, "--", *wanted])


def _of_recipe(files: list[Path]) -> list[str]:
    """The outside sources of a recipe's reward and cost, each as JSON."""
    if not files:
        return []
    try:
        loaded = load_recipe(files, environment=os.environ)
    except RecipeError as error:
        refuse(str(error))
    found = [
        named.source.model_dump_json()
        for role in (loaded.reward, loaded.cost)
        if role is not None
        for named in named_sources(role.source)
        if isinstance(named.source, OutsideRewardSpec)
    ]
    if not found:
        refuse(
            f"{', '.join(map(str, files))}: no reward in here is from outside, so that there is "
            "no server or function to call"
        )
    return found
