"""`rolemesh render`: files that start a mesh on an engine, made from a recipe."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from rolemesh.coordinator.commands.ending import refuse
from rolemesh.coordinator.commands.options import Overrides, Recipes
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.render.compose import compose_file
from rolemesh.coordinator.render.memory import unsized_models
from rolemesh.coordinator.render.placement import names_gpus, spread
from rolemesh.coordinator.state.files import write_atomically

app = typer.Typer(
    help="Files that start a mesh, made from a recipe.", no_args_is_help=True, add_completion=False
)


@app.callback()
def _group() -> None:
    """A group of commands, of however few."""


@app.command()
def compose(
    recipe: Recipes,
    gpus: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=64,
            help="Spreads the roles over so many GPUs of this host; needed where the recipe's "
            "pools name none.",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="ID,ID...",
            help="What cuda:0, cuda:1, ... are, as nvidia-smi counts them or by UUID; 0,1,...",
        ),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Writes there, not to the screen.")
    ] = None,
) -> None:
    """Writes a file to add to docker-compose.yml: GPUs, layouts and shared memory of a recipe.

    Example: rolemesh render compose recipes/quickstart-ppo.yaml --gpus 4 --out my-gpus.yaml, then
    docker compose -f docker-compose.yml -f my-gpus.yaml up
    """
    ids = None if devices is None else [text.strip() for text in devices.split(",")]
    if ids is not None and (not all(ids) or len(set(ids)) < len(ids)):
        refuse(f"--devices is {devices!r}: give each device once, e.g. --devices 0,1")
    if ids is not None and gpus is not None and len(ids) < gpus:
        refuse(f"--devices names {len(ids)} devices, but --gpus is {gpus}: name as many")
    settings = list(overrides or ())
    try:
        loaded = load_recipe(recipe, overrides=settings)
        if gpus is not None:
            if names_gpus(loaded):
                refuse(
                    "--gpus is given, but the recipe's pools name GPUs already: leave it out, or "
                    "take the devices out of the recipe's pools"
                )
            settings += spread(loaded, gpus)
            loaded = load_recipe(recipe, overrides=settings)
        elif ids is not None and not names_gpus(loaded):
            refuse("--devices is given, but no pool of the recipe names a GPU: give --gpus")
        given = [f"--set={text}" for text in overrides or ()]
        given += [] if gpus is None else [f"--gpus={gpus}"]
        given += [] if devices is None else [f"--devices={devices}"]
        header = _header([*map(str, recipe), *given])
        text = compose_file(loaded, _command(recipe, settings), ids, header)
    except RecipeError as error:
        refuse(str(error))
    if out is None:
        sys.stdout.write(text)
    else:
        try:
            write_atomically(out, text)
        except OSError as error:
            refuse(f"--out {out} cannot be written ({error.strerror}): name a file elsewhere")
    if gpus is not None:
        _tell_idle(loaded, gpus)
    for folder in dict.fromkeys(unsized_models(loaded)):
        sys.stderr.write(
            f"{folder} holds no *.safetensors here, so shm_size does not count the cuts of its "
            "training (run.recovery.cuts): run this where the model is, or raise shm_size\n"
        )


def _command(files: list[Path], settings: list[str]) -> list[str]:
    flags = [word for setting in settings for word in ("--set", setting)]
    # A container that is started again goes on with its run.
    return ["train", "--restartable", *(str(file) for file in files), *flags]


def _header(arguments: list[str]) -> str:
    return (
        "One recipe on the GPUs of one host, to add to docker-compose.yml:\n\n"
        "  docker compose -f docker-compose.yml -f THIS_FILE up\n\n"
        "Needs the NVIDIA container toolkit, a driver for CUDA 13, and `make images DEVICE=gpu`.\n"
        f"Made by: rolemesh render compose {shlex.join(arguments)}"
    )


def _tell_idle(recipe: Recipe, gpus: int) -> None:
    used = {device for pool in recipe.pools.values() for device in pool.devices} - {"cpu"}
    if len(used) < gpus:
        sys.stderr.write(
            f"{gpus - len(used)} of {gpus} GPUs are left idle: give a role a larger layout, e.g. "
            "--set actor.train.dp=...\n"
        )
