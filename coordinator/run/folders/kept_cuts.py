"""Cuts that lie in this host's shared memory: whose run they are of, and what they are good for."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolemesh.coordinator.run.folders.folder import RUNS_FOLDER, UNREADABLE, read_json
from rolemesh.coordinator.run.folders.ownership import held, living_coordinator
from rolemesh.coordinator.run.reporting.records import SUMMARY_FILE
from rolemesh.coordinator.run.saving.resume import RUN_FILE
from rolemesh.engine.transport.slots.kept_slots import KeptSlots, kept_slots, remove_unheld
from rolemesh.engine.transport.slots.shm_directory import SHM_DIRECTORY
from rolemesh.engine.transport.slots.slot_files import KEPT_UNHELD_S, SlotHeldError


class CutsInUseError(ValueError):
    """A live run uses the cuts, or may. The text is for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCuts:
    """The cuts of a run."""

    slots: KeptSlots
    directory: Path | None
    """The run's folder; None: it is not among those in runs/."""
    is_live: bool
    """Whether the run goes on here: a process holds them, or its coordinator lives."""
    why_kept: str
    """Why they must stay, in words; empty: no live run needs them."""
    note: str
    """What they are good for."""

    @property
    def state(self) -> str:
        """All that is known of them, for people."""
        if self.is_live:
            return self.why_kept
        return f"{self.note}; {self.why_kept}" if self.why_kept else self.note

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "run_id": self.slots.run_id,
            "directory": None if self.directory is None else str(self.directory),
            "roles": list(self.slots.roles),
            "bytes": self.slots.num_bytes,
            "age_s": self.slots.age_s,
            "is_live": self.is_live,
            "why_kept": self.why_kept,
            "note": self.note,
        }

    def remove(self) -> None:
        """Removes them from memory.

        Raises:
            CutsInUseError: A live run uses them, or goes on by now.
        """
        if self.why_kept:
            raise CutsInUseError(
                f"the cuts of {self.slots.run_id or '(unknown)'} stay: {self.why_kept}"
            )
        with contextlib.ExitStack() as stack:
            if self.directory is not None:
                try:
                    # No process can begin to resume it meanwhile.
                    stack.enter_context(held(self.directory))
                except (ValueError, OSError) as error:
                    raise CutsInUseError(
                        f"the cuts of {self.slots.run_id} stay: the run in {self.directory} goes "
                        f"on, or its folder cannot be locked ({error})"
                    ) from error
            try:
                remove_unheld(self.slots)
            except SlotHeldError as error:
                raise CutsInUseError(str(error)) from error


def kept_cuts(named: str | None = None, memory: Path = SHM_DIRECTORY) -> list[KeptCuts]:
    """The cuts of this user on this host, those that take the most memory first.

    Args:
        named: Only those of the run with this id, or in this folder; a run whose folder is not
            found is then taken to have ended. None: all.
        memory: Where they lie.
    """
    folders = _folders(None if named is None else Path(named))
    found = []
    for slots in kept_slots(memory):
        directory = folders.get(slots.run_id)
        if named in (None, slots.run_id) or (directory and directory == Path(named or "")):
            found.append(_known(slots, directory, is_named=named is not None))
    return found


def _known(slots: KeptSlots, directory: Path | None, *, is_named: bool) -> KeptCuts:
    note = f"a resume of the run would use them; its folder is not in {RUNS_FOLDER}/ here"
    if directory is not None:
        note = f"`rolemesh train --resume {directory}` would use them"
        if _state(directory) == "succeeded":
            note = f"the run in {directory} has succeeded: nothing needs them"
    why_kept = ""
    if slots.is_held:
        why_kept = "a process that lives holds them"
    elif directory is not None and _goes_on(directory):
        why_kept = f"the run in {directory} goes on"
    is_live = bool(why_kept)
    if directory is None and not is_live and not is_named and slots.age_s < KEPT_UNHELD_S:
        # Its coordinator may be elsewhere, and its services may be about to start again.
        why_kept = "the run may go on elsewhere; name it to remove them"
    return KeptCuts(slots=slots, directory=directory, is_live=is_live, why_kept=why_kept, note=note)


def _folders(named: Path | None) -> dict[str, Path]:
    """Folders of runs by the run's id: those in runs/, and one that is named."""
    found = {}
    folders = list(RUNS_FOLDER.glob("*/"))
    for folder in folders if named is None else [*folders, named]:
        # Of a damaged one `rolemesh status` tells.
        with contextlib.suppress(*UNREADABLE):
            found[str(read_json(folder / RUN_FILE)["run_id"])] = folder
    return found


def _goes_on(directory: Path) -> bool:
    """Whether its coordinator says that it lives; at a removal the folder's lock decides."""
    with contextlib.suppress(*UNREADABLE):
        return living_coordinator(directory) is not None
    return False


def _state(directory: Path) -> str:
    """How a run has ended, by its summary; empty where it has left none that can be read."""
    with contextlib.suppress(*UNREADABLE):
        return str(read_json(directory / SUMMARY_FILE)["state"])
    return ""


def ago(seconds: float) -> str:
    """A time that has passed, for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
