"""Descriptions that a service gives of itself, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rolemesh.coordinator.sdk.values.messages import FromMessage, from_message
from rolemesh.v1 import worker_pb2


class WorkerState(StrEnum):
    """State of a service."""

    IDLE = "idle"
    INITIALIZING = "initializing"
    READY = "ready"
    BUSY = "busy"
    ASLEEP = "asleep"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """How busy a device is right now."""

    rank: int
    device: str
    busy: float
    """Share of time since the look before, 0 to 1."""
    memory_bytes: int
    memory_total_bytes: int


@dataclass(frozen=True, slots=True)
class Status:
    """How a service is."""

    state: WorkerState
    run_id: str
    """Run that holds it, empty when none does."""
    policy_version: int
    operation: str
    """In progress, empty when idle."""
    progress: str
    """Of that operation: stage, done and total."""
    resident_bytes: int
    experience_bytes: int
    failure: str
    devices: tuple[DeviceLoad, ...]

    @staticmethod
    def of(answer: worker_pb2.GetStatusResponse) -> Status:
        """From its message."""
        progress = answer.progress
        return from_message(
            Status,
            answer,
            progress=f"{progress.stage} {progress.done}/{progress.total}" if progress.stage else "",
        )


@dataclass(frozen=True, slots=True)
class Capabilities(FromMessage):
    """What a service can do."""

    role: str
    services: tuple[str, ...]
    """Full names, e.g. "rolemesh.v1.TrainerService"."""
    world_size: int
    """Ranks behind its address."""
    accepts_references: bool
    """Whether it pulls experience; otherwise rows have to be sent along."""
    experience_capacity_bytes: int
    spec_schema_json: str
    """JSON Schema of what initialize takes."""
    versions: Mapping[str, str]
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Initialized:
    """What a service loaded."""

    policy_version: int
    num_parameters: int
    facts: Mapping[str, str]
