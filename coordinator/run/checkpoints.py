"""Checkpoints of all trained roles at one step: whole for all of them, or not there."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rolemesh.coordinator.dataflow.connection import OnPhase, RoleConnection
from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.dataflow.pools import Pools
from rolemesh.coordinator.state.files import sync_folder, write_atomically
from rolemesh.rpc.result_call import ProgressCallback
from rolemesh.v1 import weights_pb2

COMMITTED = "COMMITTED"
"""File that makes a checkpoint valid: written last, after every role has answered."""

_FOLDER = re.compile(r"step-(\d{8})")


class Checkpoints:
    """Checkpoints of a run: DIR/checkpoints/step-N/<role>, and the marker beside the roles.

    Invariant: a folder with the marker is complete for every role. A folder without it is a failed
    attempt, which must not be loaded. The newest `keep` complete ones are kept.
    """

    def __init__(
        self,
        directory: Path,
        trained: Callable[[], Sequence[RoleConnection]],
        journal: Journal,
        pools: Pools,
        *,
        keep: int,
        on_phase: OnPhase,
    ) -> None:
        self.directory = directory
        self._trained = trained
        self._journal = journal
        self._pools = pools
        self._keep = keep
        self._on_phase = on_phase

    def folder(self, step: int) -> Path:
        """Folder of a step's checkpoint."""
        return self.directory / f"step-{step:08d}"

    def committed(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        if not self.directory.is_dir():
            return []
        names = (_FOLDER.fullmatch(path.name) for path in self.directory.iterdir())
        steps = sorted(int(name[1]) for name in names if name)
        return [step for step in steps if (self.folder(step) / COMMITTED).is_file()]

    async def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Writes a checkpoint of every trained role, then commits it for all at once.

        Args:
            step: Steps made.
            state: The coordinator's own part, e.g. the position in the data; JSON values.
        """
        folder = self.folder(step)
        if step in self.committed():
            return folder
        if folder.exists():
            # Remains of an interrupted attempt.
            await asyncio.to_thread(shutil.rmtree, folder)
        folder.mkdir(parents=True)
        connections = self._trained()
        results = await asyncio.gather(
            *(self._save_role(connection, step, folder) for connection in connections)
        )
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
        await asyncio.to_thread(write_atomically, folder / COMMITTED, json.dumps(marker, indent=2))
        await asyncio.to_thread(sync_folder, self.directory)
        for old in self.committed()[: -self._keep]:
            # The marker first: a folder that is half removed must not look complete.
            (self.folder(old) / COMMITTED).unlink()
            await asyncio.to_thread(shutil.rmtree, self.folder(old))
        return folder

    async def _save_role(
        self, connection: RoleConnection, step: int, folder: Path
    ) -> weights_pb2.CheckpointResult:
        key = self._journal.next_key(step, f"{connection.role}.save_checkpoint")

        async def call(on_progress: ProgressCallback) -> weights_pb2.CheckpointResult:
            async with self._pools.awake(connection.service, step):
                directory = str(folder / connection.role)
                return await connection.client.save_checkpoint(key, directory).result(on_progress)

        return await connection.make(
            key,
            "checkpoint",
            call,
            lambda result: {"manifest_sha256": result.manifest_sha256},
            journal=self._journal,
            on_phase=self._on_phase,
        )
