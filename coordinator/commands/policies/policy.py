"""Which policy a word of the command line means: a run's, a checkpoint's, or a model folder's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolemesh.coordinator.commands.policies.exporting import step_of
from rolemesh.coordinator.recipe.hub.hf_files import model_folder
from rolemesh.coordinator.recipe.hub.hf_names import is_hf_name
from rolemesh.coordinator.run.folders.folder import is_run, read_config, run_of_id
from rolemesh.coordinator.run.saving.checkpoints import (
    COMMITTED,
    checkpoint_folder,
    marker_damage,
    read_marker,
)
from rolemesh.coordinator.run.saving.kept_checkpoints import best_kept
from rolemesh.coordinator.run.saving.resume import CHECKPOINTS_FOLDER

_CHECKPOINT = re.compile(r"step-(\d{8})")
_CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Weights that can be served: of a checkpoint, or of a Hugging Face folder."""

    folder: Path | None = None
    """Hugging Face folder; None: of a checkpoint, which is exported first."""
    run: Path | None = None
    """Folder of the run whose checkpoint it is."""
    step: int | None = None
    """Steps made before that checkpoint."""
    version: int = 0
    """Its policy_version; 0 of a folder."""
    config: Mapping[str, Any] | None = None
    """The run's recipe as plain values."""

    @property
    def name(self) -> str:
        """For people, e.g. "runs/mine, step 16"."""
        return str(self.folder) if self.run is None else f"{self.run}, step {self.step}"


def find_policy(text: str, *, step: int | None = None, best: bool = False) -> Policy:
    """The policy that a word means.

    Args:
        text: Folder or id of a run, folder of a checkpoint, Hugging Face folder, or hf:ORG/NAME.
        step: Of a run: the checkpoint of this step; None: the newest.
        best: Of a run: its best checkpoint.

    Raises:
        ValueError: There is none, or no whole checkpoint; the text says what to give.

    Example: "runs/mine" is the newest checkpoint of a run, "runs/mine/checkpoints/step-00000008"
    the one of step 8, and "runs/mine/model" what the run exported at its end.
    """
    if step is not None and best:
        raise ValueError("--step and --best: give one of them")
    is_chosen = step is not None or best
    if is_hf_name(text):
        _check_not_chosen(text, is_chosen)
        return Policy(folder=model_folder(text, "the policy")[1])
    path = Path(text)
    if not path.is_dir():
        return _of_run(run_of_id(text), step, best=best)
    if is_run(path):
        return _of_run(path, step, best=best)
    absolute = path.absolute()
    for folder in (absolute, absolute.parent):
        named = _CHECKPOINT.fullmatch(folder.name)
        run = folder.parent.parent
        if named and folder.parent.name == CHECKPOINTS_FOLDER and is_run(run):
            _check_not_chosen(text, is_chosen)
            if not (folder / COMMITTED).is_file():
                raise ValueError(
                    f"{folder} is no whole checkpoint: there is no {COMMITTED}; `rolemesh "
                    f"checkpoints {run}` lists those that are"
                )
            return _of_run(run, int(named[1]), best=False)
    if (path / _CONFIG).is_file():
        _check_not_chosen(text, is_chosen)
        return Policy(folder=path)
    if (path / "adapter_config.json").is_file():
        raise ValueError(
            f"{path} is the folder of an adapter, which is served as a whole model: name the run "
            "or its checkpoint, or write a whole model with `rolemesh export --merge`"
        )
    raise ValueError(
        f"{path} is no run, no checkpoint and no model folder (there is no {_CONFIG}): name one"
    )


def _check_not_chosen(text: str, is_chosen: bool) -> None:
    if is_chosen:
        raise ValueError(
            f"--step and --best choose a checkpoint of a run, but {text} is no run: leave them out"
        )


def _of_run(run: Path, step: int | None, *, best: bool) -> Policy:
    if best:
        step = best_kept(run)
        if step is None:
            raise ValueError(
                f"--best: {run} keeps no best checkpoint (run.checkpoint.keep_best): give --step, "
                "or nothing for the newest"
            )
    found = step_of(run, step)
    checkpoints = run / CHECKPOINTS_FOLDER
    damage = marker_damage(checkpoints, found)
    if damage:
        raise ValueError(f"the checkpoint of step {found} cannot be served: {damage}")
    roles = read_marker(checkpoints, found)["roles"]
    if "actor" not in roles:
        raise ValueError(
            f"{checkpoint_folder(checkpoints, found)} has no actor, only {', '.join(roles)}: the "
            "policy of a run that trains none cannot be served"
        )
    return Policy(
        run=run,
        step=found,
        version=int(roles["actor"].get("policy_version", 0)),
        config=read_config(run),
    )


def longest_sequence(folder: Path) -> int | None:
    """Tokens that the model of a folder can see by its config.json; None where it does not say."""
    try:
        config = json.loads((folder / _CONFIG).read_text())
    except (OSError, ValueError):
        return None
    found = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return found if isinstance(found, int) and found > 1 else None
