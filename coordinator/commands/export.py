"""`rolemesh export`: this process becomes the writer of a checkpoint as a model folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rolemesh.coordinator.commands.terminal.ending import refuse
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.hf_files import model_folder
from rolemesh.coordinator.recipe.hf_names import is_hf_name
from rolemesh.coordinator.run.folders.folder import NoRunError, read_config
from rolemesh.coordinator.run.saving.checkpoints import checkpoint_folder, committed_steps
from rolemesh.coordinator.run.saving.resume import CHECKPOINTS_FOLDER, CONFIG_FILE

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
        command = _export_command(directory, step, to, dtype)
    except (NoRunError, RecipeError) as error:
        refuse(str(error))
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.stdout.flush()
    os.execv(command[0], command)


def _export_command(directory: Path, step: int | None, to: Path, dtype: str) -> list[str]:
    """The command that writes a checkpoint's policy as a Hugging Face folder.

    Args:
        directory: The run's folder.
        step: Step of the checkpoint; None takes the newest.
        to: Folder to write.
        dtype: Type of the weights.

    Raises:
        NoRunError: There is no such run or checkpoint.
        RecipeError: Its model is at the hub, and cannot be had.
    """
    config, checkpoints = read_config(directory), directory / CHECKPOINTS_FOLDER
    if not config:
        raise NoRunError(f"{directory} holds no run: there is no {CONFIG_FILE}")
    steps = committed_steps(checkpoints)
    if not steps:
        raise NoRunError(f"{directory} has no complete checkpoint to export")
    wanted = steps[-1] if step is None else step
    if wanted not in steps:
        raise NoRunError(f"--step {wanted}: {directory} has checkpoints of steps {steps}")
    model = config["actor"]["model"]["path"]
    if is_hf_name(model):
        _, model = model_folder(model, "actor.model.path")
    flags = {
        "--checkpoint": checkpoint_folder(checkpoints, wanted) / "actor",
        "--model": model,
        "--out": to,
        "--dtype": dtype,
    }
    words = [word for flag, value in flags.items() for word in (flag, str(value))]
    return [sys.executable, "-m", "rolemesh.engine.train.export", *words]
