"""One keyed call while it works: compute, progress, phases, report."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from rolemesh.engine.hardware.memory import PhaseMemory
from rolemesh.rpc import tracing
from rolemesh.rpc.errors import UnavailableError
from rolemesh.services.runtime.calls.compute import Computes
from rolemesh.services.runtime.server.operations import Operation
from rolemesh.v1 import experience_pb2

Result = TypeVar("Result")

COMPUTE = "compute"
"""Phase of work on the compute thread when no other phase is open."""

NANOSECONDS = 1_000_000_000


class MetricNotFiniteError(ValueError):
    """A metric is NaN or infinite: it is refused here, so that it never reaches a chart as 0."""


class _Frame:
    """A phase that is open; time of phases inside it is not its own."""

    def __init__(self, call: Call, name: str, parent: _Frame | None) -> None:
        self.call = call
        self.name = name
        self.parent = parent
        self.inner_s = 0.0


_open_frame: ContextVar[_Frame | None] = ContextVar("rolemesh_open_phase", default=None)


class Call:
    """What a servicer's work is handed. Made by Runtime.keyed, one an operation.

    Invariant: every second belongs to at most one phase, the innermost open one.

    Example::

        async def work(call: Call) -> ExperienceResult:
            batch = await runtime.pull(request.experience, ["tokens", "prompt_lengths"], call)
            column = await call.compute(trainer.compute_values, batch, call.progress)
            produced = runtime.publish(request.key, Experience({"values": column}))
            report = call.report({}, batch.num_tokens)  # phases "fetch" and "compute"
            return ExperienceResult(experience=produced, report=report)
    """

    def __init__(
        self,
        operation: Operation,
        compute: Computes,
        *,
        rank: int = 0,
        device: str = "cpu",
    ) -> None:
        """Begins.

        Args:
            operation: That the call works on.
            compute: The compute thread.
            rank: This one, for the report.
            device: Whose memory is measured while functions run, e.g. "cpu" or "cuda:1".
        """
        self._rank = rank
        self._device = device
        self._operation = operation
        self._compute = compute
        self._phases: dict[str, float] = {}
        self._fetched_bytes: dict[str, int] = {}
        self._memory: dict[str, PhaseMemory] = {}
        self._lock = threading.Lock()
        self._is_abandoned = threading.Event()
        self._join_events: Callable[[Message], Message | None] | None = None

    async def compute(self, fn: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Runs fn(*args, **kwargs) on the compute thread.

        The time goes to the innermost open phase, or to "compute" when none is open; waiting for
        the thread goes to "queue".

        Raises:
            UnavailableError: The work was given up before it began.
        """
        submitted = time.monotonic()

        def timed() -> Result:
            # Work that was given up while it waited must not begin.
            self._check_wanted("queued")
            self._add("queue", time.monotonic() - submitted)
            frame = _open_frame.get()
            if frame is not None and frame.call is self:
                frame.inner_s += time.monotonic() - submitted
                with self._measured(frame.name):
                    return fn(*args, **kwargs)
            with self.phase(COMPUTE), self._measured(COMPUTE):
                return fn(*args, **kwargs)

        return await self._compute.run(timed)

    def progress(self, stage: str, done: int = 0, total: int = 0) -> None:
        """Says how far the work is. May be called from any thread, as often as one likes.

        Raises:
            UnavailableError: The work is given up: the service drains, or a newer coordinator of
                the run has attached to it.
        """
        self._check_wanted(stage)
        operation = self._operation
        operation.stage, operation.done, operation.total = stage, done, total

    def tell(self, event: Message) -> None:
        """Tells the callers something ahead of the result. May be called from any thread.

        The event is a message type of which the response has a field. Callers get it before a
        result that the work returns later.
        """
        whole = event if self._join_events is None else self._join_events(event)
        if whole is not None:
            operation = self._operation
            operation.task.get_loop().call_soon_threadsafe(operation.add_event, whole)

    def join_events(self, join: Callable[[Message], Message | None]) -> None:
        """From now on callers are told what `join` returns for each event, unless it is None."""
        self._join_events = join

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the block's wall time to a phase, less what inner phases take."""
        frame = _Frame(self, name, _open_frame.get())
        token = _open_frame.set(frame)
        started = time.monotonic()
        try:
            with tracing.span(name):
                yield
        finally:
            elapsed = time.monotonic() - started
            _open_frame.reset(token)
            # Phases that ran side by side inside this one may add up to more than its own time.
            self._add(name, max(0.0, elapsed - frame.inner_s))
            if frame.parent is not None:
                frame.parent.inner_s += elapsed

    def add_fetched(self, transport: str, num_bytes: int) -> None:
        """Counts experience bytes that were pulled for this call."""
        with self._lock:
            self._fetched_bytes[transport] = self._fetched_bytes.get(transport, 0) + num_bytes

    def finite(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The same metrics, for a report that was made before.

        Raises:
            MetricNotFiniteError: Names the metric.
        """
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise MetricNotFiniteError(
                    f"metric {name!r} of {self._operation.name} is {value}: the computation "
                    "diverged; lower the learning rate, or look at the rewards of this step"
                )
        return dict(metrics)

    def report(self, metrics: Mapping[str, float], num_tokens: int) -> experience_pb2.CallReport:
        """What the call took so far.

        Raises:
            MetricNotFiniteError: Names the metric.
        """
        report = experience_pb2.CallReport(metrics=self.finite(metrics), num_tokens=num_tokens)
        with self._lock:
            report.fetched_bytes.update(self._fetched_bytes)
            for name, seconds in self._phases.items():
                report.phases.add(phase=name, duration=_duration(seconds))
            for name, memory in self._memory.items():
                report.memory.add(
                    phase=name,
                    rank=self._rank,
                    peak_bytes=memory.peak_bytes,
                    source=_source(memory),
                )
        return report

    @property
    def is_abandoned(self) -> bool:
        """Whether the work is given up."""
        return self._is_abandoned.is_set()

    def abandon(self) -> None:
        """Makes the next progress call raise, so that the work ends early."""
        self._is_abandoned.set()

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        """Notes the block's peak of memory. On the compute thread, which runs one at a time."""
        with PhaseMemory(self._device) as memory:
            yield
        with self._lock:
            known = self._memory.get(name)
            if known is None or memory.peak_bytes > known.peak_bytes:
                self._memory[name] = memory

    def _check_wanted(self, stage: str) -> None:
        if self._is_abandoned.is_set():
            raise UnavailableError(
                f"the service drains or was attached anew: {self._operation.name} was given up at "
                f"{stage!r}",
                reason="SERVICE_DRAINING",
            )

    def _add(self, name: str, seconds: float) -> None:
        with self._lock:
            self._phases[name] = self._phases.get(name, 0.0) + seconds


def _source(memory: PhaseMemory) -> experience_pb2.MemorySource.ValueType:
    if memory.source == "cuda":
        return experience_pb2.MEMORY_SOURCE_DEVICE
    if memory.is_of_phase:
        return experience_pb2.MEMORY_SOURCE_RESIDENT
    return experience_pb2.MEMORY_SOURCE_RESIDENT_SINCE_START


def _duration(seconds: float) -> Duration:
    nanoseconds = round(seconds * NANOSECONDS)
    return Duration(seconds=nanoseconds // NANOSECONDS, nanos=nanoseconds % NANOSECONDS)
