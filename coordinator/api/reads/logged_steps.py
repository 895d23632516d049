"""Steps that a client has made and tells of: they are checked, and enter the run's journal once.

The process of the run reads the journal and writes them everywhere
(`coordinator/run/steps/external.py`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence

from rolemesh.coordinator.dataflow.journal import LOG_OPERATION
from rolemesh.coordinator.state.errors import JournalLostError, StaleEpochError
from rolemesh.coordinator.state.store import REWIND_OPERATION, JournalEntry, RunStream, StateStore
from rolemesh.rpc.errors import InvalidRequestError, PreconditionError
from rolemesh.v1 import coordinator_pb2

MAX_STEP = 2**31 - 1
MAX_METRICS = 256
"""Most metrics of one step."""

MAX_VALUE = 3.4028234663852886e38
"""Largest absolute value: that of float32, as which TensorBoard keeps it."""

MAX_SAMPLES = 64
"""Most samples of one step."""

MAX_SAMPLES_BYTES = 2**20
"""Most bytes of the samples of one step, as messages."""

METRIC_NAME_PATTERN = r"^[A-Za-z0-9_./:@%-]{1,128}$"
"""Pattern of a metric's name."""


class LoggedSteps:
    """The steps that clients of one run have logged. Owner: one asyncio loop.

    Example: epoch 2 logs steps 1, 2 and 5. A repeat of 5 changes nothing, 4 is refused. Epoch 3
    then logs 2: the run has 1 and 2 left.
    """

    def __init__(self, store: StateStore, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._entry_id = ""
        self._epoch = 0
        """Of the newest step."""
        self._record: Mapping[str, float] = {}
        """Of the newest step."""
        self._step = 0
        # Two calls that look at the same time would both find their step new.
        self._turn = asyncio.Lock()

    async def log(
        self,
        epoch: int,
        record: Mapping[str, float],
        samples: Sequence[coordinator_pb2.Sample] = (),
    ) -> None:
        """Enters a step that `check_step` has let pass, unless it is there already.

        Args:
            epoch: Of the client, from AttachRun.
            record: Metrics by name, and "step".
            samples: Some of its trajectories.

        Raises:
            PreconditionError: STEP_LOGGED or STALE_EPOCH.
            StateStoreError: The store failed.
        """
        step = int(record["step"])
        async with self._turn:
            await self._read_on()
            if epoch == self._epoch and step <= self._step:
                if step == self._step and record == self._record:
                    return
                raise PreconditionError(
                    f"step is {step}, but step {self._step} of run {self._run_id!r} is logged: "
                    "give all metrics of a step in one call, and a greater step in the next; to go "
                    "back, attach anew",
                    reason="STEP_LOGGED",
                    metadata={"run_id": self._run_id, "step": str(self._step)},
                )
            try:
                await self._enter(epoch, step, record, samples)
            except (StaleEpochError, JournalLostError) as error:
                raise PreconditionError(
                    f"fencing_epoch is {epoch}, but that of run {self._run_id!r} is "
                    f"{error.current}: another client has attached since, or the process of the "
                    "run was started again; attach to take the run over",
                    reason="STALE_EPOCH",
                    metadata={"run_id": self._run_id, "fencing_epoch": str(error.current)},
                ) from error

    async def _enter(
        self,
        epoch: int,
        step: int,
        record: Mapping[str, float],
        samples: Sequence[coordinator_pb2.Sample],
    ) -> None:
        if step <= self._step:
            await self._store.rewind(self._run_id, step - 1, epoch=epoch)
        if samples:
            # Before the record: who reads that finds them.
            taken = coordinator_pb2.ListSamplesResponse(step=step, samples=samples)
            await self._store.append_entry(
                self._run_id, RunStream.SAMPLES, taken.SerializeToString(), epoch, step=step
            )
        entry = JournalEntry(
            epoch=epoch,
            step=step,
            operation=LOG_OPERATION,
            sequence=0,
            result={"record": record, "num_samples": len(samples)},
        )
        await self._store.append_journal(self._run_id, entry)

    async def _read_on(self) -> None:
        for entry in await self._store.read_journal(self._run_id, self._entry_id):
            self._entry_id = entry.entry_id
            if entry.operation == REWIND_OPERATION:
                self._step = min(self._step, entry.step)
            elif entry.operation == LOG_OPERATION and entry.step > self._step:
                self._epoch, self._step = entry.epoch, entry.step
                self._record = entry.result["record"]


def check_step(
    epoch: int,
    step: int,
    metrics: Mapping[str, float],
    samples: Sequence[coordinator_pb2.Sample],
) -> dict[str, float]:
    """The record of a step that a client made.

    Raises:
        InvalidRequestError: A field is out of range; names it.
    """
    if epoch < 1:
        raise InvalidRequestError(f"fencing_epoch is {epoch}: give that of AttachRun's answer")
    if not 1 <= step <= MAX_STEP:
        raise InvalidRequestError(f"step is {step}: give 1 to {MAX_STEP}")
    if not 1 <= len(metrics) <= MAX_METRICS:
        raise InvalidRequestError(f"metrics has {len(metrics)} values: give 1 to {MAX_METRICS}")
    for name, value in metrics.items():
        if not re.fullmatch(METRIC_NAME_PATTERN, name):
            raise InvalidRequestError(
                f"metrics has the name {name[:200]!r}: give 1 to 128 letters, digits and "
                'characters of "_./:@%-"'
            )
        if name == "step":
            raise InvalidRequestError('metrics has the name "step": the field step says it')
        if not abs(value) <= MAX_VALUE:
            raise InvalidRequestError(
                f"metrics[{name!r}] is {value}: give a finite float32, or leave the name out"
            )
    if len(samples) > MAX_SAMPLES:
        raise InvalidRequestError(f"samples has {len(samples)} rows: give at most {MAX_SAMPLES}")
    for sample in samples:
        for name, part in sample.reward_parts.items():
            if not abs(part) <= MAX_VALUE:
                raise InvalidRequestError(
                    f"reward_parts[{name[:200]!r}] of the sample of row {sample.row} is {part}: "
                    "give a finite float32, or leave the part out"
                )
    num_bytes = sum(sample.ByteSize() for sample in samples)
    if num_bytes > MAX_SAMPLES_BYTES:
        raise InvalidRequestError(
            f"samples have {num_bytes} bytes: give at most {MAX_SAMPLES_BYTES}, fewer or shorter "
            "ones"
        )
    return {"step": step, **metrics}
