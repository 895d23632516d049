"""Checkpoints of a run as a person keeps them: listed, verified against their hashes, pruned.

Reads manifests and bytes, and no tensor: it needs neither torch nor a service.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from rolemesh.coordinator.recipe.sections.checkpoints import BestSpec
from rolemesh.coordinator.run.saving.best import best_step
from rolemesh.coordinator.run.saving.checkpoints import (
    COMMITTED,
    checkpoint_folder,
    committed_steps,
    outdated,
    read_marker,
    remains,
    remove_checkpoint,
)
from rolemesh.coordinator.run.saving.resume import CHECKPOINTS_FOLDER, CONFIG_FILE, read_records

_MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptCheckpoint:
    """One complete checkpoint of a run."""

    step: int
    """Steps made before it."""
    num_bytes: int
    """Bytes of all its files."""
    committed_at: float
    """Unix time, seconds."""
    roles: tuple[str, ...]
    is_best: bool = False
    """Whether it is the best one by the run's held-out metric."""
    damage: str | None = None
    """What is wrong with it, for people; empty: nothing; None: it was not looked at."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "roles": list(self.roles)}


def best_kept(run: Path) -> int | None:
    """The step of the best checkpoint; None where the run keeps none as that.

    Args:
        run: Folder of the run.

    Raises:
        ValueError: Its recipe cannot be read.
    """
    try:
        values = yaml.safe_load((run / CONFIG_FILE).read_text())
        given = values["run"]["checkpoint"].get("keep_best")
        spec = None if given is None else BestSpec.model_validate(given)
    except FileNotFoundError:
        return None
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{run / CONFIG_FILE} does not say which checkpoint is the best one ({error}): it was "
            "changed, or the disk was full"
        ) from error
    found = best_step(spec, read_records(run), committed_steps(run / CHECKPOINTS_FOLDER))
    return None if found is None else found.step


def kept_checkpoints(
    directory: Path, *, verify: bool, best: int | None = None
) -> Iterator[KeptCheckpoint]:
    """The complete checkpoints under a folder, oldest first.

    Args:
        directory: Folder checkpoints of a run.
        verify: Whether to read every byte and compare its hash.
        best: Step of the best one, see `best_kept`.
    """
    for step in committed_steps(directory):
        folder = checkpoint_folder(directory, step)
        damage = None
        roles: tuple[str, ...] = ()
        try:
            roles = tuple(sorted(read_marker(directory, step)["roles"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            damage = f"{folder / COMMITTED} cannot be read ({error})"
        if verify and damage is None:
            damage = _damage(directory, step)
        yield KeptCheckpoint(
            step=step,
            num_bytes=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
            committed_at=(folder / COMMITTED).stat().st_mtime,
            roles=roles,
            is_best=step == best,
            damage=damage,
        )


def _damage(directory: Path, step: int) -> str:
    """What is wrong with a checkpoint; empty where every byte is the one that was written."""
    folder = checkpoint_folder(directory, step)
    for role, committed in read_marker(directory, step)["roles"].items():
        path = folder / role / _MANIFEST
        try:
            content = path.read_bytes()
            files = json.loads(content)["files"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"{path} cannot be read ({error})"
        if hashlib.sha256(content).hexdigest() != committed["manifest_sha256"]:
            return f"{path} is not the one that was committed"
        for name, expected in files.items():
            if Path(name).name != name:
                return f"{path} names {name!r}, which is no file of its folder"
            file = folder / role / name
            if not file.is_file():
                return f"{file} is missing"
            if _sha256(file) != expected["sha256"]:
                return f"{file} does not match its hash"
    return ""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def prune(
    directory: Path, keep: int, known: Iterable[KeptCheckpoint]
) -> tuple[list[int], list[KeptCheckpoint]]:
    """Removes all but the newest checkpoints and the best one.

    What is damaged is not counted, and stays: it may be all that is left. What failures have left
    of checkpoints before the newest goes, too.

    Args:
        directory: Folder checkpoints of a run that does not go on.
        keep: How many of the newest stay, at least 1.
        known: All that are there, verified; read once keep is known to be right.

    Returns:
        The steps that are gone, and the checkpoints that are left.

    Raises:
        ValueError: keep is less.
    """
    if keep < 1:
        raise ValueError(f"--prune is {keep}: keep 1 checkpoint at least, or remove the folder")
    there = list(known)
    best = next((one.step for one in there if one.is_best), None)
    whole = [one.step for one in there if not one.damage]
    gone = sorted([*outdated(whole, keep, best), *remains(directory)])
    for step in gone:
        remove_checkpoint(directory, step)
    return gone, [one for one in there if one.step not in gone]
