"""The command that writes a checkpoint's policy as a Hugging Face folder, and which checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

from rolemesh.coordinator.commands.policies.model_card import has_adapter
from rolemesh.coordinator.recipe.hub.hf_files import model_folder
from rolemesh.coordinator.recipe.hub.hf_names import is_hf_name
from rolemesh.coordinator.run.folders.folder import NoRunError, read_config
from rolemesh.coordinator.run.saving.checkpoints import checkpoint_folder, committed_steps
from rolemesh.coordinator.run.saving.resume import CHECKPOINTS_FOLDER, CONFIG_FILE


def step_of(directory: Path, step: int | None) -> int:
    """The step of the checkpoint; raises NoRunError where there is none."""
    if not read_config(directory):
        raise NoRunError(f"{directory} holds no run: there is no {CONFIG_FILE}")
    steps = committed_steps(directory / CHECKPOINTS_FOLDER)
    if not steps:
        raise NoRunError(f"{directory} has no complete checkpoint to export")
    wanted = steps[-1] if step is None else step
    if wanted not in steps:
        raise NoRunError(f"--step {wanted}: {directory} has checkpoints of steps {steps}")
    return wanted


def export_command(directory: Path, step: int, to: Path, *, is_pushed: bool) -> list[str]:
    """The command that writes a checkpoint's policy as a Hugging Face folder.

    Args:
        directory: The run's folder.
        step: Step of the checkpoint.
        to: Folder to write.
        is_pushed: Whether it leaves this machine.

    Raises:
        RecipeError: Its model is at the hub, and cannot be had.
    """
    config = read_config(directory)
    model = config["actor"]["model"]["path"]
    base: dict[str, object] = {}
    if is_hf_name(model):
        name, model = model_folder(model, "actor.model.path")
        base = {"--base-name": name.repo, "--base-revision": name.revision}
    elif is_pushed:
        # A path of this machine is nothing to others.
        base = {"--base-name": Path(model).name}
    flags = {
        "--checkpoint": checkpoint_folder(directory / CHECKPOINTS_FOLDER, step) / "actor",
        "--model": model,
        "--out": to,
        **(base if has_adapter(config) else {}),
    }
    words = [word for flag, value in flags.items() for word in (flag, str(value))]
    return [sys.executable, "-m", "rolemesh.engine.train.export", *words]
