"""Ledger of operations: each OperationKey has one effect, and repeats get its first answer."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from google.protobuf.message import Message

from rolemesh.rpc.errors import CapacityError, InvalidRequestError, PreconditionError
from rolemesh.rpc.limits import (
    HIGHEST_EPOCH,
    MAX_EPOCH,
    MAX_EPOCH_JUMP,
    MAX_OPERATIONS,
    exceeded,
)
from rolemesh.services.runtime.server.errors import is_expected
from rolemesh.v1 import operation_pb2

logger = logging.getLogger(__name__)

MAX_RUN_ID_CHARACTERS = 128
"""Bound of OperationKey.run_id."""

MAX_OPERATION_CHARACTERS = 256
"""Bound of OperationKey.operation: the ledger keeps it with each answer."""

Identity = tuple[str, int, int, str, int]
"""(run_id, fencing_epoch, step, operation, sequence)."""

Payload: TypeAlias = "bytes | memoryview"
"""Bytes that came with a request and are part of it."""


@dataclass(eq=False, slots=True)
class Operation:
    """One keyed call: in progress, or answered."""

    identity: Identity
    method: str
    """Full method name."""
    digest: bytes
    """SHA-256 of the request, which distinguishes a repeat from a reused key."""
    stage: str = "queued"
    done: int = 0
    total: int = 0
    started: float = field(default_factory=time.monotonic)
    num_listeners: int = 0
    """Callers that wait for the answer right now."""
    task: asyncio.Task[Message] = field(init=False)
    """Set at its start."""
    events: list[Message] = field(default_factory=list)
    """Events that the work sent before its answer, in order; kept for repeats."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced by a new one, with each event and at the end."""

    @property
    def name(self) -> str:
        """Step and operation, for people."""
        _, _, step, operation, sequence = self.identity
        return f"step {step} {operation}" + (f" #{sequence}" if sequence else "")

    def progress(self) -> operation_pb2.Progress:
        """The newest sign of life."""
        return operation_pb2.Progress(stage=self.stage, done=self.done, total=self.total)

    def add_event(self, event: Message) -> None:
        """Sends an event to all callers before the answer. To be called on the loop."""
        self.events.append(event)
        self.changed()

    def changed(self) -> None:
        """Wakes the callers that wait in `told`. To be called on the loop."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def told(self, interval_s: float) -> AsyncGenerator[Message | None, None]:
        """Yields all events from the first one on, and ends with the work. Then the answer is due.

        Each caller gets every event once and in order, also a caller that came late.

        Args:
            interval_s: After a silence of this many seconds it yields None, for a sign of life.
        """
        task, sent = self.task, 0
        while True:
            # Read before the events below: events that came before the end are then not missed.
            is_done, changed = task.done(), self._changed
            while sent < len(self.events):
                sent += 1
                yield self.events[sent - 1]
            if is_done:
                return
            if changed.is_set():
                continue
            try:
                await asyncio.wait_for(changed.wait(), interval_s)
            except TimeoutError:
                yield None


def identity_of(key: operation_pb2.OperationKey) -> Identity:
    """The identity of a key.

    Raises:
        InvalidRequestError: A field of the key is out of range.
    """
    problem = None
    if not 1 <= len(key.run_id) <= MAX_RUN_ID_CHARACTERS:
        problem = f"key.run_id is {key.run_id[:40]!r}: give 1 to {MAX_RUN_ID_CHARACTERS} characters"
    elif not 1 <= key.fencing_epoch <= MAX_EPOCH:
        problem = f"key.fencing_epoch is {key.fencing_epoch}: give a number from 1 to {MAX_EPOCH}"
    elif key.step < 0:
        problem = f"key.step is {key.step}: give a number >= 0"
    elif not key.operation:
        problem = 'key.operation is empty: name the operation, e.g. "actor.update"'
    elif len(key.operation) > MAX_OPERATION_CHARACTERS:
        problem = (
            f"key.operation has {len(key.operation)} characters: give {MAX_OPERATION_CHARACTERS} "
            "at most"
        )
    elif key.sequence < 0:
        problem = f"key.sequence is {key.sequence}: give a number >= 0"
    elif key.lineage < 0:
        problem = f"key.lineage is {key.lineage}: give a number >= 0"
    if problem is not None:
        raise InvalidRequestError(problem, reason="KEY_INVALID")
    return (key.run_id, key.fencing_epoch, key.step, key.operation, key.sequence)


class OperationLedger:
    """Keyed operations of this process. Owner: the loop.

    Invariant: for one identity the work starts at most once while its answer is kept. The answers
    of the newest `capacity` operations are kept. A failure is not an answer: callers that wait get
    it, and a later repeat starts the work again, guarded by the versions that the request expects.
    The work outlives the call that started it, so that a coordinator that lost its connection
    finds the answer.

    An epoch counts once a call that was accepted has brought it (`heed`): a call that is refused,
    e.g. since another run holds the service, fences off no coordinator.

    Example: two calls with the key (run "r", epoch 1, step 3, "actor.update", 0) get one Operation;
    a call of epoch 1 after one of epoch 2 raises PreconditionError (STALE_EPOCH).
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._operations: OrderedDict[Identity, Operation] = OrderedDict()
        self._highest_epochs: OrderedDict[str, int] = OrderedDict()

    def check_epoch(self, key: operation_pb2.OperationKey, *, may_leap: bool = False) -> Identity:
        """The identity of a key; refuses that of an older coordinator.

        Args:
            key: The key.
            may_leap: Whether the epoch may be any newer one: in the calls by which a coordinator
                takes a service over, which show more than a key.

        Raises:
            InvalidRequestError: The key itself is malformed, or its epoch is too far ahead.
            PreconditionError: STALE_EPOCH.
        """
        identity = identity_of(key)
        highest = self._highest_epochs.get(key.run_id, 0)
        if key.fencing_epoch < highest:
            raise PreconditionError(
                f"fencing_epoch is {key.fencing_epoch}, but epoch {highest} has spoken for run "
                f"{key.run_id!r}: a newer coordinator has taken over; this one must end",
                reason="STALE_EPOCH",
                metadata={HIGHEST_EPOCH: str(highest)},
            )
        if highest and not may_leap and key.fencing_epoch > highest + MAX_EPOCH_JUMP:
            raise exceeded(
                "key.fencing_epoch",
                key.fencing_epoch,
                highest + MAX_EPOCH_JUMP,
                f"epoch {highest} has spoken for the run before; take the next one of the store",
            )
        return identity

    def heed(self, run_id: str, epoch: int) -> None:
        """From now on refuses older coordinators of the run. The call has been accepted."""
        self._highest_epochs[run_id] = max(epoch, self._highest_epochs.get(run_id, 0))
        self._highest_epochs.move_to_end(run_id)
        while len(self._highest_epochs) > self._capacity:
            self._highest_epochs.popitem(last=False)

    def newest_epoch(self, run_id: str) -> int:
        """The newest epoch that has spoken for a run; 0 where none has."""
        return self._highest_epochs.get(run_id, 0)

    def forget_epoch(self, run_id: str) -> None:
        """Forgets who spoke for a run: its Initialize has failed, and it never had the service."""
        self._highest_epochs.pop(run_id, None)

    def has(self, identity: Identity) -> bool:
        """Whether an operation of that identity runs or was answered."""
        return identity in self._operations

    def check_speaker(self, run_id: str, epoch: int) -> None:
        """Refuses an older coordinator of a run, in a call that has no key.

        Raises:
            InvalidRequestError: KEY_INVALID or LIMIT_EXCEEDED: no coordinator has such an epoch.
            PreconditionError: STALE_EPOCH.
        """
        self.check_epoch(
            operation_pb2.OperationKey(run_id=run_id, fencing_epoch=epoch, operation="speak")
        )

    def find(
        self, identity: Identity, method: str, request: Message, payload: Payload = b""
    ) -> Operation | None:
        """The running or answered operation of that identity.

        Args:
            identity: Identity of the key.
            method: Full method name.
            request: The request.
            payload: Bytes that came with the request.

        Raises:
            InvalidRequestError: KEY_REUSED: the key belongs to another request.
        """
        operation = self._operations.get(identity)
        if operation is None:
            return None
        if operation.method != method or operation.digest != _digest(request, payload):
            raise InvalidRequestError(
                f"the key of {operation.name!r} was used for another request to "
                f"{operation.method}: give every operation of a step its own name or sequence",
                reason="KEY_REUSED",
            )
        return operation

    def start(
        self,
        identity: Identity,
        method: str,
        request: Message,
        work: Callable[[Operation], Awaitable[Message]],
        payload: Payload = b"",
    ) -> Operation:
        """Starts the work of a new operation.

        Raises:
            CapacityError: TOO_MANY_CALLS.
        """
        if len(self._operations) >= MAX_OPERATIONS and len(self.running()) >= MAX_OPERATIONS:
            raise CapacityError(
                f"{MAX_OPERATIONS} operations are in progress, as many as there may be: wait until "
                "some have ended",
                reason="TOO_MANY_CALLS",
                retryable=True,
            )
        operation = Operation(identity, method, _digest(request, payload))

        async def run() -> Message:
            return await work(operation)

        operation.task = asyncio.create_task(run(), name=f"{method} {operation.name}")
        self._operations[identity] = operation
        operation.task.add_done_callback(lambda _: self._finished(operation))
        self._evict()
        return operation

    def forget_older(self, run_id: str, epoch: int) -> None:
        """Forgets the answers of older epochs of a run."""
        for identity in [one for one in self._operations if one[0] == run_id and one[1] < epoch]:
            del self._operations[identity]

    def running(self) -> list[Operation]:
        """Operations in progress, oldest first."""
        return [one for one in self._operations.values() if not one.task.done()]

    def _finished(self, operation: Operation) -> None:
        task = operation.task
        operation.changed()
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            self._operations.pop(operation.identity, None)
        if error is not None and operation.num_listeners == 0:
            # No caller waits any more, so only the log gets the reason.
            logger.error(
                "%s of %s failed after its caller had gone: %s: %s",
                operation.method,
                operation.name,
                type(error).__name__,
                error,
                exc_info=None if is_expected(error) else error,
            )

    def _evict(self) -> None:
        excess = len(self._operations) - self._capacity
        if excess <= 0:
            return
        answered = [identity for identity, one in self._operations.items() if one.task.done()]
        for identity in answered[:excess]:
            del self._operations[identity]


def _digest(request: Message, payload: Payload) -> bytes:
    digest = hashlib.sha256(request.SerializeToString(deterministic=True))
    digest.update(payload)
    return digest.digest()
