"""Records of runs as a coordinator reports them, as immutable values."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rolemesh.coordinator.sdk.values.html import definition_list, table
from rolemesh.coordinator.sdk.values.messages import FromMessage, from_message
from rolemesh.v1 import coordinator_pb2

FloatArray: TypeAlias = npt.NDArray[np.float64]


class RunState(StrEnum):
    """State of a run."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    FAILED = "failed"
    PAUSING = "pausing"
    PAUSED = "paused"
    RECOVERING = "recovering"

    @property
    def is_final(self) -> bool:
        """Whether nothing follows."""
        return self in (RunState.SUCCEEDED, RunState.STOPPED, RunState.FAILED)


@dataclass(frozen=True, slots=True)
class Run(FromMessage):
    """A training run."""

    run_id: str
    name: str
    state: RunState
    step: int
    """Steps finished."""
    num_steps: int
    """Steps planned."""
    created_at: datetime.datetime
    updated_at: datetime.datetime
    directory: str
    """Folder of its files, on the coordinator's host."""
    failure: str
    """Why it failed, empty otherwise."""
    metrics: Mapping[str, float]
    """Of the newest step."""
    algorithm: str
    activity: str
    """What it does right now; of a run that early stopping ended, why."""
    recoveries: int
    """How often it had to recover from a failure."""
    endpoints: Mapping[str, str]
    """Base URLs where programs ask its policy, by service, while the run goes on. The key is the
    service's own."""

    def _repr_html_(self) -> str:
        facts: dict[str, object] = {
            "run": self.run_id,
            "name": self.name,
            "algorithm": self.algorithm,
            "state": f"{self.state} {self.failure}".strip(),
            "step": f"{self.step} of {self.num_steps}",
            "now": self.activity,
            "reward": self.metrics.get("reward/mean"),
        }
        return definition_list(facts)


class RunList(tuple[Run, ...]):
    """Runs, newest first."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        rows = [(run.run_id, run.name, run.state, run.step, run.activity) for run in self]
        return table(("run", "name", "state", "step", "now"), rows)


class MetricTable(Mapping[str, FloatArray]):
    """Metrics of steps as arrays of equal length; NaN where a step has none.

    Example::

        table["reward/mean"][table.steps > 10].mean()
    """

    def __init__(self, steps: npt.NDArray[np.int64], series: Mapping[str, FloatArray]) -> None:
        self.steps = steps
        """Ascending, int64 [n]."""
        self._series = dict(series)

    @staticmethod
    def of(pages: Sequence[coordinator_pb2.GetMetricsResponse]) -> MetricTable:
        """One table of pages that follow each other; a page may lack a metric that others have."""
        names = sorted({one.name for page in pages for one in page.series})
        parts: dict[str, list[FloatArray]] = {name: [] for name in names}
        for page in pages:
            known = {one.name: np.array(one.values, dtype=np.float64) for one in page.series}
            for name in names:
                parts[name].append(known.get(name, np.full(len(page.steps), np.nan)))
        steps = np.array([step for page in pages for step in page.steps], dtype=np.int64)
        return MetricTable(steps, {name: np.concatenate(part) for name, part in parts.items()})

    def __getitem__(self, name: str) -> FloatArray:
        """Values of a metric, one a step."""
        return self._series[name]

    def __iter__(self) -> Iterator[str]:
        """Names."""
        return iter(self._series)

    def __len__(self) -> int:
        """How many metrics there are."""
        return len(self._series)

    def __repr__(self) -> str:
        return f"MetricTable(steps={len(self.steps)}, metrics={len(self)})"

    def _repr_html_(self) -> str:
        rows = [
            (int(step), *(float(self._series[name][at]) for name in self._series))
            for at, step in enumerate(self.steps)
        ]
        return table(("step", *self._series), rows[-10:])


@dataclass(frozen=True, slots=True)
class DataflowNode:
    """One call of a step."""

    name: str
    service: str
    kind: str
    pool: str
    state: str
    ready_s: float | None
    """When its inputs existed, in seconds since the step began."""
    started_s: float | None
    ended_s: float | None
    is_critical: bool
    """Whether the step waited for it."""
    num_tokens: int
    num_bytes: int
    """Bytes of experience that it pulled."""
    phases: Mapping[str, float]
    """Seconds by phase."""
    after: tuple[str, ...]
    """Names of the calls whose results it needs."""
    policy_version: int | None
    pulled_bytes: Mapping[str, int]
    """num_bytes by the way that they took, e.g. "shm", "grpc", or "grpc_4" over four connections.
    """


@dataclass(frozen=True, slots=True)
class Dataflow(FromMessage):
    """The calls of a step."""

    step: int
    is_made: bool
    nodes: tuple[DataflowNode, ...]

    def _repr_html_(self) -> str:
        rows = [
            (one.name, one.pool, one.state, one.started_s, one.ended_s, one.is_critical)
            for one in self.nodes
        ]
        return table(("call", "pool", "state", "started s", "ended s", "critical"), rows)


@dataclass(frozen=True, slots=True)
class PlannedTask:
    """The calls of one role and method in a step."""

    name: str
    pool: str
    """That they were planned for; empty where they need no device."""
    is_ahead: bool
    """Whether they sample for a later step."""
    start_s: float | None
    """When the first starts, as predicted; None where the plan has no such call."""
    predicted_s: float | None
    measured_s: float | None
    """Seconds in which any of them was at work; None where none was measured."""

    @property
    def error(self) -> float | None:
        """Predicted / measured - 1."""
        return _error(self.predicted_s, self.measured_s)


@dataclass(frozen=True, slots=True)
class PlannedPool:
    """A pool of the plan, of the recipe, or of both."""

    name: str
    planned_devices: str
    """Number and kind, e.g. "4 h100"; empty where the plan has no such pool."""
    planned_roles: tuple[str, ...]
    """Each with its layout p-t-d, e.g. "actor 1-2-2"."""
    devices: tuple[str, ...]
    """Of the recipe; none where that has no such pool."""
    roles: tuple[str, ...]
    """Of the recipe, each with its layout."""


@dataclass(frozen=True, slots=True)
class RunPlan(FromMessage):
    """A predicted step beside the measured one: medians of its newest steps, but the first two."""

    step_s: float
    """As predicted."""
    measured_step_s: float | None
    """None before the third step."""
    num_steps: int
    """That were measured."""
    tokens: float
    """Of a step, prompts included, that the prediction is for."""
    measured_tokens: float | None
    rows: str
    """That the prediction is for, in words."""
    basis: str
    """What the prediction stands on, in words."""
    tasks: tuple[PlannedTask, ...]
    pools: tuple[PlannedPool, ...]

    @property
    def error(self) -> float | None:
        """Predicted / measured seconds of a step - 1."""
        return _error(self.step_s, self.measured_step_s)

    def _repr_html_(self) -> str:
        rows = [(one.name, one.pool, one.predicted_s, one.measured_s) for one in self.tasks]
        step = ("step", "", self.step_s, self.measured_step_s)
        return table(("call", "pool", "predicted s", "measured s"), [*rows, step])


def _error(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured - 1 if predicted is not None and measured else None


@dataclass(frozen=True, slots=True, eq=False)
class DeviceUse:
    """How busy a device was over time."""

    service: str
    rank: int
    device: str
    times: FloatArray
    """Unix times in seconds, [n]."""
    busy: npt.NDArray[np.float32]
    """Share of time since the look before, 0 to 1, [n]."""
    memory_bytes: npt.NDArray[np.int64]
    """In use, [n]."""
    memory_total_bytes: int

    @staticmethod
    def of(series: coordinator_pb2.DeviceUseSeries) -> DeviceUse:
        """From its message."""
        return from_message(
            DeviceUse,
            series,
            times=np.array([one.seconds + one.nanos * 1e-9 for one in series.times], np.float64),
            busy=np.array(series.busy, dtype=np.float32),
            memory_bytes=np.array(series.memory_bytes, dtype=np.int64),
        )


class AlertLevel(StrEnum):
    """How pressing an alert is."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class Alert(FromMessage):
    """Something that deserves attention."""

    level: AlertLevel
    rule: str
    """Stable name, e.g. "ROLE_WAITS"."""
    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class LogPiece:
    """A piece of a log."""

    text: str
    offset: int
    """Of its first byte."""
    next_offset: int
    """Where to go on."""
    logs: tuple[str, ...]
    """Names of all logs of the run."""


@dataclass(frozen=True, slots=True)
class RegisteredService(FromMessage):
    """A service that the coordinator knows."""

    role: str
    address: str
    pid: int
    """On its host, 0 when not known."""
    lease_until: datetime.datetime
    status: str
    """What it last said of itself."""
    run_id: str
    """Run that it takes part in."""
    name: str
    """Its name in that run, e.g. "actor" or "rollout-1"."""
