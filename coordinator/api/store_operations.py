"""The operations of a coordinator, answered from the store and the folders of runs alone.

The process need not be the one that makes the run: a new coordinator gives the same answers as the
one before it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rolemesh.coordinator.api.credentials import CLIENT_FILE, check_caller_may
from rolemesh.coordinator.api.messages import to_run
from rolemesh.coordinator.api.reads.logged_steps import check_step
from rolemesh.coordinator.api.reads.run_reads import RunReads
from rolemesh.coordinator.api.store_errors import translated
from rolemesh.coordinator.recipe.algorithm.algorithms import EXTERNAL
from rolemesh.coordinator.state.store import RunRecord, RunState, RunStream, StateStore
from rolemesh.rpc.errors import InvalidRequestError, PreconditionError
from rolemesh.v1 import coordinator_pb2

_RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_MAX_REQUEST_ID_CHARACTERS = 128
_MAX_RECIPE_BYTES = 2**20


class RunCreator(Protocol):
    """Starts runs, and runs that have ended again."""

    async def create_run(self, run_id: str, recipe: str, overrides: Sequence[str]) -> None:
        """Starts a run unless it was started before; afterwards its record is in the store.

        Raises:
            RolemeshError: As coordinator.proto says of CreateRun.
        """

    async def resume_run(self, run_id: str, overrides: Sequence[str]) -> None:
        """Starts a run that has failed or was stopped from where it is.

        A repeat with the same overrides, while that run goes on, changes nothing.

        Raises:
            RolemeshError: As coordinator.proto says of ResumeRun.
        """


class StoreOperations(RunReads):
    """The operations of one coordinator, the same over every protocol.

    CoordinatorService (gRPC) and the REST routes are thin translations of this one class. Every
    method raises a RolemeshError with a reason of coordinator.proto: NotFoundError,
    InvalidRequestError, PreconditionError, OutOfRangeError, CapacityError, or UnavailableError
    (STORE_UNAVAILABLE). Owner: one asyncio loop; methods may be called concurrently on it.
    """

    def __init__(self, store: StateStore, creator: RunCreator | None = None) -> None:
        """As for `RunReads`.

        Args:
            store: The store that holds the answers.
            creator: Starts runs; None for a coordinator that makes one run only.
        """
        super().__init__(store)
        self._creator = creator

    # --- runs ---

    async def create_run(
        self, run_id: str, recipe: str, overrides: Sequence[str] = ()
    ) -> coordinator_pb2.Run:
        """Starts a run of a recipe, given as YAML or JSON text."""
        if self._creator is None:
            raise PreconditionError(
                "this coordinator makes one run alone: start one that takes recipes with "
                "`rolemesh coordinator`",
                reason="CREATION_UNAVAILABLE",
            )
        if not _RUN_ID.fullmatch(run_id) or run_id.startswith("."):
            raise InvalidRequestError(
                f"run_id is {run_id[:200]!r}: give 1 to 128 letters, digits, dots, dashes and "
                "underscores, and no dot in front",
                reason="RUN_ID_INVALID",
            )
        _check_size(recipe, overrides)
        with translated():
            await self._creator.create_run(run_id, recipe, overrides)
        return await self.get_run(run_id)

    async def stop_run(self, run_id: str) -> coordinator_pb2.Run:
        """Asks it to end after the step in progress, with everything saved."""
        record = await self._record(run_id)
        if record.state.is_final:
            return to_run(record)
        return await self._wish(run_id, stop_requested=True)

    async def pause_run(self, run_id: str) -> coordinator_pb2.Run:
        """Asks it to make no further step until it is resumed."""
        self._check_steps_are_ours(await self._going_on(run_id), "paused")
        return await self._wish(run_id, pause_requested=True)

    async def resume_run(self, run_id: str, overrides: Sequence[str] = ()) -> coordinator_pb2.Run:
        """Cancels the wish to pause; starts a run that failed or was stopped from where it is."""
        record = await self._record(run_id)
        # Early stopping leaves steps, which other settings may make.
        has_steps_left = record.step < record.num_steps and len(overrides) > 0
        if record.state is RunState.SUCCEEDED and not has_steps_left:
            raise _ended(record)
        _check_size("", overrides)
        if record.state.is_final or overrides:
            # It starts a process, and may change the recipe.
            check_caller_may("CreateRun", f"to start run {run_id!r} again")
            if self._creator is None:
                raise _refused(
                    record,
                    f"is {record.state.value}, and this coordinator makes one run alone: `rolemesh "
                    f"train --resume {record.directory}` starts it again once it has ended",
                    reason="RESUME_UNAVAILABLE",
                )
            with translated():
                await self._creator.resume_run(run_id, overrides)
        return await self._wish(run_id, pause_requested=False)

    async def checkpoint_run(self, run_id: str, request_id: str) -> coordinator_pb2.Run:
        """Asks it to save a checkpoint after the step in progress."""
        if not 1 <= len(request_id) <= _MAX_REQUEST_ID_CHARACTERS:
            raise InvalidRequestError(
                f"request_id has {len(request_id)} characters: give 1 to "
                f"{_MAX_REQUEST_ID_CHARACTERS}, e.g. a UUID"
            )
        record = await self._going_on(run_id)
        self._check_steps_are_ours(
            record, "asked for a checkpoint: call SaveCheckpoint of its services instead"
        )
        with translated():
            await self.store.append_entry(run_id, RunStream.CHECKPOINT_WISHES, request_id.encode())
        return await self.get_run(run_id)

    async def attach_run(self, run_id: str) -> coordinator_pb2.AttachRunResponse:
        """Gives a run of algorithm "external" to the caller, and fences off its earlier driver."""
        record = await self._going_on(run_id)
        self._check_is_driven(record)
        with translated():
            epoch = await self.store.next_epoch(run_id)
        return coordinator_pb2.AttachRunResponse(
            fencing_epoch=epoch,
            identity=await asyncio.to_thread(_client_identity, Path(record.directory)),
            services=[
                coordinator_pb2.AttachedService(name=name, **facts)
                for name, facts in sorted(record.services.items())
            ],
        )

    async def log_step(
        self,
        run_id: str,
        fencing_epoch: int,
        step: int,
        metrics: Mapping[str, float],
        samples: Sequence[coordinator_pb2.Sample] = (),
    ) -> coordinator_pb2.Run:
        """Takes the metrics of a step that a client made, and some of its samples."""
        logged = check_step(fencing_epoch, step, metrics, samples)
        self._check_is_driven(await self._going_on(run_id))
        with translated():
            await self._histories.of(run_id).logged.log(fencing_epoch, logged, samples)
        return await self.get_run(run_id)

    # --- what they share ---

    async def _wish(self, run_id: str, **wish: bool) -> coordinator_pb2.Run:
        with translated():
            await self.store.update_run(run_id, **wish)
        return await self.get_run(run_id)

    async def _going_on(self, run_id: str) -> RunRecord:
        record = await self._record(run_id)
        if record.state.is_final:
            raise _ended(record)
        return record

    def _check_is_driven(self, record: RunRecord) -> None:
        """Raises unless clients make the steps of the run, and it is running."""
        if record.algorithm != EXTERNAL:
            raise _refused(
                record,
                f"has the algorithm {record.algorithm!r}, whose steps its coordinator makes: give "
                f"the recipe `algorithm: {{type: {EXTERNAL}}}` to drive its services yourself",
                reason="RUN_NOT_EXTERNAL",
            )
        if record.state is not RunState.RUNNING or record.stop_requested:
            raise _refused(
                record,
                f"is {'stopping' if record.stop_requested else record.state.value}: it can be "
                "driven while it is running",
                reason="RUN_NOT_READY",
            )

    def _check_steps_are_ours(self, record: RunRecord, wish: str) -> None:
        if record.algorithm == EXTERNAL:
            told = f"is driven by a client, who alone knows its steps: it cannot be {wish}"
            raise _refused(record, told, reason="RUN_EXTERNAL")


def _ended(record: RunRecord) -> PreconditionError:
    return _refused(record, f"has ended: it is {record.state.value}", reason="RUN_ENDED")


def _refused(record: RunRecord, told: str, *, reason: str) -> PreconditionError:
    return PreconditionError(
        f"run {record.run_id!r} {told}", reason=reason, metadata={"run_id": record.run_id}
    )


def _check_size(recipe: str, overrides: Sequence[str]) -> None:
    num_bytes = len(recipe.encode()) + sum(len(text.encode()) for text in overrides)
    if num_bytes > _MAX_RECIPE_BYTES:
        raise InvalidRequestError(
            f"recipe and overrides have {num_bytes} bytes: give at most {_MAX_RECIPE_BYTES}",
            reason="RECIPE_INVALID",
        )


def _client_identity(directory: Path) -> bytes:
    """By what services of the run in the folder know its client; empty: they speak in clear."""
    try:
        return (directory / CLIENT_FILE).read_bytes()
    except FileNotFoundError:
        return b""
