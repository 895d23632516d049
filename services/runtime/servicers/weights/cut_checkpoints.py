"""Checkpoints that are written from a cut on a thread of their own, while the role computes on."""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rolemesh.engine.train.cuts.reader import HeldCut
from rolemesh.engine.transport.slots.slot_files import SlotOwner
from rolemesh.services.runtime.calls.compute import ComputeThread
from rolemesh.services.runtime.calls.runtime import Call, Runtime
from rolemesh.services.runtime.ranks.face import Face
from rolemesh.services.runtime.servicers.model_role import ModelRole
from rolemesh.v1 import operation_pb2, weights_pb2

_METHOD = "rolemesh.v1.SaveCheckpoint"
"""As the ledger names it."""


def owner_of_cuts(role: ModelRole, runtime: Runtime, run_id: str) -> SlotOwner:
    """This rank in a run."""
    config = runtime.process.config
    return SlotOwner(run_id, role.name, config.rank, config.world_size)


async def write_cut(
    role: ModelRole,
    runtime: Runtime,
    key: operation_pb2.OperationKey,
    directory: Path,
    call: Call,
) -> int:
    """Writes the cut of the key's step as a checkpoint, and returns its policy_version.

    The face has the other ranks do the same. To them the directory is the folder that the face has
    made, and they write their parts into it. So ranks need no collective operation, whose order
    could mix with that of the calls that compute.

    Args:
        role: Whose cut it is.
        runtime: Of this rank.
        key: Of the call.
        directory: Absolute.
        call: Told of the progress; ends the work when it is given up.

    Raises:
        CutNotFoundError, CutMismatchError, SlotHeldError: See `hold_cut`.
        CheckpointRoomError: The disk has no room.
        SlotGivenUpError: The role is closed meanwhile.
        RolemeshError: The work was given up, or another rank failed.
    """
    owner = owner_of_cuts(role, runtime, key.run_id)

    def hold() -> HeldCut:
        return role.trainer.hold_cut(role.cut_slots(owner), key.step)

    # Before the slot is held: where there is no thread, no reader would ever let it go.
    thread = ComputeThread("checkpoint")
    others = None
    if runtime.process.face is not None:
        others = functools.partial(
            _ask_others, runtime.process.face, key, asyncio.get_running_loop()
        )

    def write(held: HeldCut) -> None:
        if runtime.is_face:
            held.write(directory, others, call.progress)
        else:
            held.write_part(directory, call.progress)

    try:
        held = await call.compute(hold)
        with call.phase("write"):
            await thread.run(write, held)
    finally:
        thread.close(0.0)
    return held.state.policy_version


def _ask_others(
    face: Face, key: operation_pb2.OperationKey, loop: asyncio.AbstractEventLoop, folder: Path
) -> Future[list[Any]]:
    """Has the other ranks write their parts. On the thread that writes this rank's."""
    request = weights_pb2.SaveCheckpointRequest(key=key, directory=str(folder), from_cut=True)
    return asyncio.run_coroutine_threadsafe(face.beside(request), loop)


async def cuts_written(runtime: Runtime) -> None:
    """Returns once no checkpoint is being written."""
    running = [one.task for one in runtime.ledger.running() if one.method == _METHOD]
    if running:
        await asyncio.wait(running)
