"""Checkpoints of all trained roles at one step: whole for all of them, or not there."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rolemesh.coordinator.dataflow.calls.connection import OnPhase, RoleConnection
from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.dataflow.pools import Pools
from rolemesh.coordinator.run.reporting.early_end import to_the_end
from rolemesh.coordinator.state.files import make_folder, sync_folder, write_atomically
from rolemesh.rpc.calls.result_call import ProgressCallback, ResultCall
from rolemesh.rpc.errors import (
    CapacityError,
    DataLossError,
    InvalidRequestError,
    UnsupportedError,
)
from rolemesh.rpc.together import all_ended, together
from rolemesh.v1 import operation_pb2, weights_pb2

COMMITTED = "COMMITTED"
"""File that makes a checkpoint valid: written last, after every role has answered."""

BESIDE = " checkpoint"
"""Comes behind the name of a service whose checkpoint is written while it does something else."""

CheckpointCall = ResultCall[weights_pb2.CheckpointResult]

_FOLDER = re.compile(r"step-(\d{8})")
_ASIDE = ".damaged"
"""Comes behind the name of a folder that cannot be loaded, and does not count any more."""

_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""What comes of reading a marker that is not as it was written."""

_REFUSALS = ("PATH_INVALID", "CHECKPOINT_MISMATCH")
"""Reasons of a role that finds no checkpoint, or another one, where its own was committed."""


class NoWholeCheckpointError(RunError):
    """Checkpoints are there, but none can be used, and no newer state is in memory.

    A run that has none goes back to the models of its recipe. One that has lost them must not: it
    would write over what is left, and nobody would have been asked.
    """

    def __init__(self, run: Path, refused: Mapping[int, str]) -> None:
        """Names them.

        Args:
            run: Folder of the run.
            refused: Why each cannot be used, by step.
        """
        told = "; ".join(f"step {step}: {why}" for step, why in sorted(refused.items()))
        super().__init__(
            f"the run does not go on: no checkpoint in {run} can be used, and no newer state is in "
            f"memory ({told}). They stay as they are: put whole copies of the files in their place "
            f"and resume, or begin anew with `rolemesh train {run / 'config.yaml'} --out {run} "
            "--from-start`, which moves this run aside"
        )


class Checkpoints:
    """Checkpoints of a run: DIR/checkpoints/step-N/<role>, and the marker beside the roles.

    Invariant: a folder with the marker is complete for every role. A folder without it is a failed
    attempt, which must not be loaded, and goes once a newer one is complete. The newest `keep`
    complete ones are kept, and the best one. What is known to be damaged is not counted as one of
    them, and is never removed.
    """

    def __init__(
        self,
        directory: Path,
        trained: Callable[[], Sequence[RoleConnection]],
        journal: Journal,
        pools: Pools,
        *,
        keep: int,
        best: Callable[[Collection[int]], int | None],
        on_phase: OnPhase,
    ) -> None:
        """Prepares.

        Args:
            directory: Folder of all checkpoints of the run.
            trained: The roles that have a part in one.
            journal: Names what is asked of them.
            pools: Where they stand.
            keep: How many of the newest are kept.
            best: Says which of some steps is kept, too; None: no other.
            on_phase: Is told how far the roles are.
        """
        self.directory = directory
        self._trained = trained
        self._journal = journal
        self._pools = pools
        self._keep = keep
        self._best = best
        self._in_progress: set[int] = set()
        """Steps that are being saved."""
        self._on_phase = on_phase

    def folder(self, step: int) -> Path:
        """Folder of a step's checkpoint."""
        return checkpoint_folder(self.directory, step)

    def committed(self) -> list[int]:
        """Steps with a complete checkpoint whose marker can be read, oldest first."""
        there = committed_steps(self.directory)
        return [step for step in there if not marker_damage(self.directory, step)]

    async def load_newest(
        self, step: int, tell: Callable[[str], None], *, after: int | None = None
    ) -> int | None:
        """Brings every trained role to the newest checkpoint that can be used.

        Those that cannot be used are told of. They are set aside where an older one takes their
        place, since their steps will be made and saved again.

        Args:
            step: The newest that counts: later ones belong to a lineage that has ended.
            tell: Is told what cannot be used.
            after: Step of a state that the run can go back to otherwise: only newer ones are taken.

        Returns:
            Its step; None where there is no checkpoint, or with `after` none that can be used.

        Raises:
            NoWholeCheckpointError: There are some, none can be used, and nothing else is left; all
                stay as they are.
            RolemeshError: A role failed.
        """
        refused: dict[int, str] = {}
        found: int | None = None
        for known in reversed(committed_steps(self.directory)):
            if after is not None and known <= after:
                break
            why = marker_damage(self.directory, known)
            if not why and known > step:
                continue
            why = why or await self._refusal(known)
            if not why:
                found = known
                break
            refused[known] = why
            tell(f"the checkpoint of step {known} cannot be used, and is left out: {why}")
        if refused and found is None and after is None:
            raise NoWholeCheckpointError(self.directory.parent, refused)
        for known in refused:
            tell(f"what is left of it stays in {set_aside(self.directory, known)}")
        return found

    async def _refusal(self, step: int) -> str:
        """Loads a checkpoint; why it cannot be used, "" where it is loaded."""
        try:
            await self.load(step)
        except InvalidRequestError as error:
            if error.reason not in _REFUSALS:
                raise
            return error.message
        except DataLossError as error:
            return error.message
        return ""

    async def load(self, step: int) -> None:
        """Brings every trained role to the state of a checkpoint.

        Raises:
            DataLossError: A file is damaged, or is not the one that was committed.
            RolemeshError: A role failed.
        """
        folder, roles = self.folder(step), read_marker(self.directory, step)["roles"]

        async def one(connection: RoleConnection) -> None:
            result = await self._checkpoint_call(
                connection, "load_checkpoint", step, folder, connection.client.load_checkpoint
            )
            connection.policy_version = result.policy_version
            committed = roles.get(connection.role, {}).get("manifest_sha256")
            if result.manifest_sha256 != committed:
                raise DataLossError(
                    f"{folder / connection.role} is not the checkpoint that was committed: its "
                    f"manifest has the hash {result.manifest_sha256}, not {committed}",
                    reason="CHECKPOINT_CORRUPT",
                )

        await together(one(connection) for connection in self._trained())

    async def save(self, step: int, state: Mapping[str, Any], *, from_cut: bool = False) -> Path:
        """Writes a checkpoint of every trained role, then commits it for all at once.

        Args:
            step: Steps made.
            state: The coordinator's own part, e.g. the position in the data; JSON values.
            from_cut: Whether roles write their cuts of the step, beside whatever else they do.

        Raises:
            CapacityError: A disk has no room; nothing of the checkpoint is left.
            UnsupportedError: A role cannot write a cut.
            RolemeshError: A role failed.
        """
        self._in_progress.add(step)
        try:
            return await self._save_all(step, state, from_cut=from_cut)
        finally:
            self._in_progress.discard(step)

    async def _save_all(self, step: int, state: Mapping[str, Any], *, from_cut: bool) -> Path:
        folder = self.folder(step)
        if step in self.committed():
            return folder
        if (folder / COMMITTED).exists():
            await asyncio.to_thread(set_aside, self.directory, step)
        elif folder.exists():
            # Remains of an interrupted attempt.
            await asyncio.to_thread(shutil.rmtree, folder)
        await asyncio.to_thread(make_folder, folder)
        connections = self._trained()
        try:
            results = await all_ended(
                self._save(connection, step, folder, from_cut=from_cut)
                for connection in connections
            )
        except CapacityError:
            # What other roles have written takes room for nothing.
            await asyncio.to_thread(shutil.rmtree, folder)
            raise
        marker = {
            "run_id": self._journal.run_id,
            "epoch": self._journal.epoch,
            "step": step,
            **state,
            "roles": {
                connection.role: {
                    "policy_version": result.policy_version,
                    "num_bytes": result.num_bytes,
                    "manifest_sha256": result.manifest_sha256,
                }
                for connection, result in zip(connections, results, strict=True)
            },
        }
        # When this returns or is cancelled, the marker is either there or not being written.
        await to_the_end(
            asyncio.to_thread(write_atomically, folder / COMMITTED, json.dumps(marker, indent=2))
        )
        there = self.committed()
        left = [known for known in remains(self.directory) if known not in self._in_progress]
        await self._remove([*outdated(there, self._keep, self._best(there)), *left])
        return folder

    async def _save(
        self, connection: RoleConnection, step: int, folder: Path, *, from_cut: bool
    ) -> weights_pb2.CheckpointResult:
        begin = functools.partial(connection.client.save_checkpoint, from_cut=from_cut)
        result = await self._checkpoint_call(
            connection, "save_checkpoint", step, folder, begin, is_beside=from_cut
        )
        if from_cut and not result.from_cut:
            raise UnsupportedError(
                f"the {connection.role} keeps cuts, but writes no checkpoint from them: update its "
                "service, or switch cuts off (run.recovery.cuts=false)"
            )
        return result

    async def remove_after(self, step: int) -> None:
        """Removes those of later steps: they belong to a lineage that has ended."""
        await self._remove([saved for saved in self.committed() if saved > step])

    async def _remove(self, steps: Sequence[int]) -> None:
        for step in steps:
            await asyncio.to_thread(remove_checkpoint, self.directory, step)

    async def _checkpoint_call(
        self,
        connection: RoleConnection,
        name: str,
        step: int,
        folder: Path,
        begin: Callable[[operation_pb2.OperationKey, str], CheckpointCall],
        *,
        is_beside: bool = False,
    ) -> weights_pb2.CheckpointResult:
        """Makes a call about a role's folder; `is_beside`: while the role does something else."""
        key = self._journal.next_key(step, f"{connection.role}.{name}")

        async def call(on_progress: ProgressCallback) -> weights_pb2.CheckpointResult:
            lease = self._pools.awake(connection.service, step)
            async with contextlib.nullcontext() if is_beside else lease:
                return await begin(key, str(folder / connection.role)).result(on_progress)

        def on_phase(service: str, stage: str, done: int, total: int) -> None:
            self._on_phase(f"{service}{BESIDE}" if is_beside else service, stage, done, total)

        return await connection.make(
            key,
            name.replace("_", " "),
            call,
            lambda result: {"manifest_sha256": result.manifest_sha256},
            journal=self._journal,
            on_phase=on_phase,
        )


def committed_steps(directory: Path) -> list[int]:
    """Steps with a complete checkpoint under a folder, oldest first."""
    return [step for step in _steps(directory) if _is_committed(directory, step)]


def remains(directory: Path) -> list[int]:
    """Steps whose folder is not complete though a newer one is: what failures have left.

    A run that goes on leaves out the steps that it is writing.
    """
    newest = max(committed_steps(directory), default=0)
    return [
        step for step in _steps(directory) if step < newest and not _is_committed(directory, step)
    ]


def _steps(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    names = (_FOLDER.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(name[1]) for name in names if name)


def _is_committed(directory: Path, step: int) -> bool:
    return (checkpoint_folder(directory, step) / COMMITTED).is_file()


def outdated(steps: Sequence[int], keep: int, best: int | None) -> list[int]:
    """Checkpoints that are not kept.

    Args:
        steps: Of all, oldest first.
        keep: How many of the newest stay, at least 1.
        best: The step that stays whatever its age; None: no such.
    """
    return [step for step in steps[:-keep] if step != best]


def remove_checkpoint(directory: Path, step: int) -> None:
    """Removes a checkpoint, or what is there of it."""
    folder = checkpoint_folder(directory, step)
    # The marker first, and for good: what is half removed must not look complete, not even after a
    # loss of power.
    (folder / COMMITTED).unlink(missing_ok=True)
    sync_folder(folder)
    shutil.rmtree(folder)


def set_aside(directory: Path, step: int) -> Path:
    """Renames a damaged checkpoint, so that another one of its step may be saved.

    Returns:
        Its new folder, which is not counted, loaded or removed any more.
    """
    folder = checkpoint_folder(directory, step)
    # The step may be damaged, made again and damaged once more.
    aside, number = folder.with_name(f"{folder.name}{_ASIDE}"), 1
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{folder.name}{_ASIDE}-{number}")
    folder.rename(aside)
    sync_folder(directory)
    return aside


def folders_aside(directory: Path) -> list[Path]:
    """Damaged checkpoints that were set aside, oldest first."""
    return sorted(directory.glob(f"step-*{_ASIDE}*"))


def marker_damage(directory: Path, step: int) -> str:
    """Why the marker of a complete checkpoint cannot be read, for people; "" where it can."""
    try:
        dict(read_marker(directory, step)["roles"])
    except _UNREADABLE as error:
        path = checkpoint_folder(directory, step) / COMMITTED
        return f"{path} cannot be read ({type(error).__name__}: {error})"
    return ""


def read_marker(directory: Path, step: int) -> dict[str, Any]:
    """What the coordinator wrote of a complete checkpoint.

    Raises:
        OSError, ValueError: It cannot be read.
    """
    marker: dict[str, Any] = json.loads(
        (checkpoint_folder(directory, step) / COMMITTED).read_text()
    )
    return marker


def checkpoint_folder(directory: Path, step: int) -> Path:
    """Folder of a step's checkpoint."""
    return directory / f"step-{step:08d}"
