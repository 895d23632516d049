"""`rolemesh tinker`: Tinker's training API over an actor service of this host."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from rolemesh.coordinator.commands.terminal.ending import EXIT_BAD_INPUT, EXIT_FAILED, fail
from rolemesh.coordinator.commands.terminal.options import Json
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.services.launch import LaunchError
from rolemesh.coordinator.tinker.serving import ServingWish, serve

app = typer.Typer(add_completion=False)


@app.command()
def tinker(
    recipe: Annotated[
        list[Path], typer.Argument(metavar="RECIPE...", help="YAML; its section actor is served.")
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="To listen on; 0 takes a free one.")
    ] = 8400,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    name: Annotated[
        str | None, typer.Option(help="What clients call the base; the name of its folder.")
    ] = None,
    places: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="Models and samplers at once; 4, or 1 of vLLM with --whole."
        ),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Clients train all weights, and no adapters.")
    ] = False,
    most_rank: Annotated[int, typer.Option(min=1, help="Largest rank of an adapter.")] = 64,
    folder: Annotated[
        Path, typer.Option("--out", help="Folder for saved weights and logs.")
    ] = Path("runs/tinker"),
    keys: Annotated[
        Path | None,
        typer.Option(help='JSON, {"tml-...": "owner"}; left out: any key, and one owner.'),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="A field of the recipe.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Serves Tinker's training API: clients train adapters on the recipe's model, and sample them.

    Point a client at it with TINKER_BASE_URL=http://127.0.0.1:8400 and any TINKER_API_KEY that
    begins with "tml-". Ctrl-C ends it; saved weights stay in --out.

    Example: rolemesh tinker recipes/tinker.yaml --port 8400
    """
    try:
        loaded = load_recipe(recipe, overrides=overrides or [])
        wish = ServingWish(
            recipe=_checked(loaded),
            folder=folder.absolute(),
            host=host,
            port=port,
            name=name,
            places=_places(loaded, places, whole=whole),
            most_rank=most_rank,
            trains_whole=whole,
            keys=keys,
        )
        asyncio.run(serve(wish, as_json=as_json))
    except (RecipeError, ValueError) as error:
        fail(str(error), EXIT_BAD_INPUT, as_json=as_json)
    except (LaunchError, OSError) as error:
        fail(str(error), EXIT_FAILED, as_json=as_json)


def _places(recipe: Recipe, places: int | None, *, whole: bool) -> int:
    assert recipe.actor is not None
    assert recipe.actor.rollout is not None
    # An engine of vLLM has one set of weights, beside which it serves adapters.
    takes_one = whole and recipe.actor.rollout.type == "vllm"
    if takes_one and places not in (None, 1):
        raise ValueError(
            f"--places is {places} with --whole, but actor.rollout.type is vllm, which samples one "
            "model: leave --places out, or give type hf"
        )
    if places == 1 and not whole:
        raise ValueError("--places is 1, and a model and a sampler take one each: give 2 or more")
    return places or (1 if takes_one else 4)


def _checked(recipe: Recipe) -> Recipe:
    if recipe.actor is None or recipe.actor.rollout is None:
        raise ValueError("the recipe has no actor with a sampler: give actor.model and rollout")
    if recipe.actor.model.adapter is not None:
        raise ValueError(
            "actor.model.adapter is given, but each client chooses its own: leave it out"
        )
    if not (recipe.actor.model.path / "config.json").is_file():
        raise ValueError(f"actor.model.path is {recipe.actor.model.path}: no model is there")
    return recipe
