"""The hold of a run on a service: who has it, whether it may work, and how the hold ends."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from rolemesh.engine.specs import RoleSpec
from rolemesh.rpc.errors import InternalError, PreconditionError, UnavailableError
from rolemesh.services.runtime.calls.call import Call
from rolemesh.services.runtime.calls.compute import RunCompute
from rolemesh.services.runtime.calls.role import InitializeResult, Role
from rolemesh.services.runtime.experience.store import ExperienceStore
from rolemesh.services.runtime.server.errors import FAILED_RANK, describe, is_expected
from rolemesh.services.runtime.server.operations import Operation, OperationLedger
from rolemesh.v1 import operation_pb2, worker_pb2

logger = logging.getLogger(__name__)

HOLDER_SILENCE_S = 30.0
"""A run whose coordinator has not been heard for this long may lose the service to another run.

A coordinator that lives asks for the status every second or two.
"""


@dataclass(frozen=True, slots=True)
class HeldPart:
    """The part of a run that Initialize gave to this service."""

    spec: RoleSpec
    run_seed: int
    result: InitializeResult
    """What Initialize answered."""


class RunHold:
    """The run that has this service. Owner: the loop.

    Invariant: at most one run has the service; while its hold ends, new work is refused.

    Example: after Initialize of run "a", `check_initialized("b")` raises RUN_MISMATCH until
    `give_back` has ended, or until "a" was silent for HOLDER_SILENCE_S and "b" took over.
    """

    def __init__(
        self,
        role: Role,
        compute: RunCompute,
        store: ExperienceStore,
        ledger: OperationLedger,
        close: Callable[[], None],
        give_back_others: Callable[[str], Awaitable[None]],
    ) -> None:
        """Prepares.

        Args:
            role: That the service plays.
            compute: The compute thread.
            store: Experience held.
            ledger: Operations in progress.
            close: Frees what Initialize made; run on the compute thread.
            give_back_others: Has the other ranks of the service give up their work and the run,
                whose id it is given.
        """
        self.run_id = ""
        """Run that holds the service, empty when none does."""
        self.part: HeldPart | None = None
        """What Initialize gave; None before it, and after it failed."""
        self.is_asleep = False
        self.failure = ""
        """Why what the service holds may not be whole, empty when it is."""
        self.is_draining = False
        """Whether the process is about to end."""
        self.calls: dict[Operation, Call] = {}
        """What works right now, to be given up when the hold ends."""
        self._role = role
        self._close = close
        self._give_back_others = give_back_others
        self._compute = compute
        self._store = store
        self._ledger = ledger
        self._heard_at = -math.inf
        self._giving_back: asyncio.Task[None] | None = None

    def check_initialized(self, run_id: str) -> None:
        """Refuses work before Initialize, or for another run.

        Raises:
            PreconditionError: NOT_INITIALIZED or RUN_MISMATCH.
        """
        self._role.initialized(self.part)
        self.check_is_of(run_id)

    def check_is_of(self, run_id: str) -> None:
        """Refuses what comes from another run than the one that holds the service.

        Raises:
            PreconditionError: RUN_MISMATCH.
        """
        if self.run_id not in ("", run_id):
            raise PreconditionError(
                f"run_id is {run_id!r}, but run {self.run_id!r} holds the {self._role.name}: "
                "drain it first, or use another service",
                reason="RUN_MISMATCH",
            )

    def check_awake(self) -> None:
        """Refuses work while the weights are in host memory.

        Raises:
            PreconditionError: ASLEEP.
        """
        if self.is_asleep:
            raise PreconditionError(
                f"the {self._role.name} is asleep, its weights are in host memory: call Wake first",
                reason="ASLEEP",
            )

    def check_accepts_work(self) -> None:
        """Refuses new work while draining.

        Raises:
            UnavailableError: SERVICE_DRAINING.
        """
        if self.is_draining or self._giving_back is not None:
            raise UnavailableError(
                f"the {self._role.name} is draining and takes no new work: wait until it is back",
                reason="SERVICE_DRAINING",
            )

    @property
    def may_sample(self) -> bool:
        """Whether the sampler may be used between the run's calls; from any thread."""
        is_ending = self.is_draining or self._giving_back is not None
        return self.part is not None and not self.is_asleep and not is_ending

    @property
    def state(self) -> worker_pb2.WorkerState.ValueType:
        """State of the service for GetStatus."""
        running = self._ledger.running()
        if self.is_draining or self._giving_back is not None:
            return worker_pb2.WORKER_STATE_DRAINING
        if any(operation.method.endswith(".Initialize") for operation in running):
            return worker_pb2.WORKER_STATE_INITIALIZING
        if self.failure:
            return worker_pb2.WORKER_STATE_FAILED
        if running:
            return worker_pb2.WORKER_STATE_BUSY
        if self.is_asleep:
            return worker_pb2.WORKER_STATE_ASLEEP
        if self.part is not None:
            return worker_pb2.WORKER_STATE_READY
        return worker_pb2.WORKER_STATE_IDLE

    def may_take(self, run_id: str) -> bool:
        """Whether an Initialize of the run would get the service now."""
        return self.run_id in ("", run_id) or self.silence_s >= HOLDER_SILENCE_S

    def heed(self, run_id: str, epoch: int) -> None:
        """Refuses older coordinators of the run from now on, if it has the service."""
        if run_id == self.run_id:
            self._ledger.heed(run_id, epoch)

    def hear(self, run_id: str) -> None:
        """Notes a sign of life of a run's coordinator."""
        if run_id == self.run_id:
            self._heard_at = time.monotonic()

    @property
    def silence_s(self) -> float:
        """Seconds since the coordinator of the run that holds the service was last heard."""
        if any(operation.num_listeners for operation in self._running_of(self.run_id)):
            return 0.0
        return time.monotonic() - self._heard_at

    def _running_of(self, run_id: str | None) -> list[Operation]:
        running = self._ledger.running()
        return [one for one in running if run_id is None or one.identity[0] == run_id]

    async def take(self, run_id: str, *, by_face: bool = False) -> None:
        """Gives the service to a run; what an earlier Initialize of the run made is dropped.

        Args:
            run_id: Of the run.
            by_face: Whether the service's face asks, which alone hears the coordinator and has
                decided.

        Raises:
            PreconditionError: ALREADY_INITIALIZED: another run has it and may be alive.
        """
        while self.run_id not in ("", run_id):
            # Anew after each wait: a third run may have been quicker.
            if not by_face:
                self._check_holder_is_silent(run_id)
            await self.give_back(0.0, self.run_id)
        if self.part is not None:
            await self.forget()
        self.run_id = run_id
        self.failure = ""
        self.hear(run_id)

    async def initialization_failed(self, error: BaseException) -> None:
        """Ends the hold of a run whose Initialize failed, and frees what it had made already."""
        self.failure = f"Initialize failed: {describe(error).message}"
        let_go_of_locals(error)
        try:
            await self._compute.run(self._close)
        finally:
            self._ledger.forget_epoch(self.run_id)
            self.run_id = ""

    def work_failed(self, operation: Operation, error: Exception) -> None:
        """Notes an unforeseen error of work: it may have left something half done."""
        # INTERNAL is what another rank of this service says of an error that it did not foresee.
        is_of_rank = isinstance(error, InternalError) and FAILED_RANK in error.metadata
        if self.part is not None and (is_of_rank or not is_expected(error)):
            self.failure = f"{operation.name} failed: {describe(error).message}"

    def _check_holder_is_silent(self, run_id: str) -> None:
        """Refuses another run while the coordinator of the one that holds it may be alive."""
        silence_s = self.silence_s
        if silence_s < HOLDER_SILENCE_S:
            raise PreconditionError(
                f"run {self.run_id!r} holds the {self._role.name}, and its coordinator was "
                f"heard {silence_s:.0f} s ago: end that run before run {run_id!r} can have it; if "
                f"its coordinator is dead, try again once it has been silent for "
                f"{HOLDER_SILENCE_S:.0f} s",
                reason="ALREADY_INITIALIZED",
            )
        logger.warning(
            "run %s takes the %s over from run %s, whose coordinator has been silent for %.0f s",
            *(run_id, self._role.name, self.run_id, silence_s),
        )

    async def withdraw(self, run_id: str) -> bool:
        """Gives up the Initialize of a run that still waits for another run to lose the service.

        Otherwise the service would go to a run that has ended already, and be held for it.

        Returns:
            Whether there was one; it has ended.
        """
        was_waiting = False
        while run_id != self.run_id and (waiting := self._running_of(run_id)):
            was_waiting = True
            for operation in waiting:
                # A call is there from its first turn of the loop on: looked for anew until it is.
                if operation in self.calls:
                    self.calls[operation].abandon()
            await asyncio.wait({one.task for one in waiting}, timeout=0.1)
        return was_waiting and run_id != self.run_id

    async def finish_work(self, timeout_s: float, run_id: str | None = None) -> bool:
        """Waits for work in progress; gives it up after `timeout_s`. True when all was finished.

        Args:
            timeout_s: How long the work may take.
            run_id: Whose work; None means everybody's.
        """
        running = self._running_of(run_id)
        if not running:
            return True
        _, unfinished = await asyncio.wait({one.task for one in running}, timeout=timeout_s)
        self._give_up(self._running_of(run_id))
        return not unfinished

    def _give_up(self, operations: Iterable[Operation]) -> None:
        """Has work end at its next sign of progress."""
        for operation in operations:
            if operation in self.calls and not self.calls[operation].is_abandoned:
                logger.warning("%s of %s is given up", operation.method, operation.name)
                self.calls[operation].abandon()

    async def attach(
        self,
        key: operation_pb2.OperationKey,
        spec: RoleSpec,
        run_seed: int,
        attach_others: Callable[[], Awaitable[object]],
    ) -> InitializeResult:
        """Keeps the run for a newer coordinator of it, without anything that older epochs made.

        Older epochs have been fenced off before, so that none of them begins anything meanwhile.

        Args:
            key: Of the call, with the new epoch.
            spec: As Initialize must have had it.
            run_seed: As Initialize must have had it.
            attach_others: Has the other ranks of the service do the same, while work of this one
                that takes all of them is still in progress.

        Returns:
            What Initialize answered, with the version of the weights now held.

        Raises:
            PreconditionError: NOT_INITIALIZED, RUN_MISMATCH, SPEC_CHANGED or NOT_WHOLE.
        """
        run_id, epoch = key.run_id, key.fencing_epoch
        part = self.check_part(run_id, spec, run_seed)
        # Flags first: ranks that compute together then give up at the same sign of progress.
        self._give_up(self._older_than(run_id, epoch))
        await attach_others()
        while older := self._older_than(run_id, epoch):
            self._give_up(older)
            await asyncio.wait({one.task for one in older})
        self._check_whole()
        await self._compute.run(self._role.start_over)
        self._store.close()
        self._ledger.forget_older(run_id, epoch)
        logger.info("epoch %d of run %s has the %s now", epoch, run_id, self._role.name)
        return replace(part.result, policy_version=self._role.policy_version())

    def check_part(self, run_id: str, spec: RoleSpec, run_seed: int) -> HeldPart:
        """What Initialize gave; refuses another run, spec or seed, and what may not be whole.

        Raises:
            PreconditionError: NOT_INITIALIZED, RUN_MISMATCH, SPEC_CHANGED or NOT_WHOLE.
        """
        self.check_initialized(run_id)
        part = self.part
        if part is None or (part.spec, part.run_seed) != (spec, run_seed):
            raise PreconditionError(
                f"the spec or the run_seed ({run_seed}) is not what the {self._role.name} was "
                "initialized with: call Initialize, which loads what the new one says",
                reason="SPEC_CHANGED",
            )
        self._check_whole()
        return part

    def _check_whole(self) -> None:
        if self.failure:
            raise PreconditionError(
                f"what the {self._role.name} holds may not be whole ({self.failure}): call "
                "Initialize",
                reason="NOT_WHOLE",
            )

    def _older_than(self, run_id: str, epoch: int) -> list[Operation]:
        """Work in progress of older epochs of a run."""
        return [one for one in self._running_of(run_id) if one.identity[1] < epoch]

    async def give_back(self, timeout_s: float, run_id: str | None = None) -> None:
        """Ends the hold of a run on this service, so that another one can have it.

        Work in progress may take timeout_s seconds more, then it is given up at its next sign of
        progress. Until all of it has ended, new work is refused. The service does this on its own
        behalf: it goes on when the caller is cancelled, and a second caller joins the first.

        Args:
            timeout_s: How long work may take.
            run_id: Whose work; None means everybody's.
        """
        if self._giving_back is None:
            self._giving_back = asyncio.create_task(self._give_back(timeout_s, run_id))
            self._giving_back.add_done_callback(self._gave_back)
        await asyncio.shield(self._giving_back)

    async def _give_back(self, timeout_s: float, run_id: str | None) -> None:
        holder = self.run_id
        await self.finish_work(timeout_s, run_id)
        # New work is refused all the while, so that it reaches the other ranks after this.
        await self._give_back_others(holder)
        # Given up, but on the compute thread until its next sign of progress.
        while running := self._running_of(run_id):
            await asyncio.wait({one.task for one in running})
        await self.forget()
        logger.info("run %s no longer holds the %s", holder or "(none)", self._role.name)

    def _gave_back(self, task: asyncio.Task[None]) -> None:
        self._giving_back = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("giving run %s back failed: %s", self.run_id, error, exc_info=error)

    async def forget(self) -> None:
        """Frees what Initialize made and all experience; the service holds no run any more."""
        await self._compute.run(self._close)
        self._store.close()
        self.run_id = ""
        self.part = None
        self.is_asleep = False
        self.failure = ""


def let_go_of_locals(error: BaseException) -> None:
    """Frees what the functions held that an error has ended; its traceback still says where.

    Otherwise the model that was being loaded lives as long as the error does.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        waiting += [one.__cause__, one.__context__]
