"""Weights and checkpoints as services tell of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rolemesh.coordinator.sdk.values.experience import Report
from rolemesh.coordinator.sdk.values.messages import FromMessage, from_message
from rolemesh.v1 import cuts_pb2, weights_pb2


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was saved, loaded or exported."""

    policy_version: int
    num_bytes: int
    """On disk."""
    manifest_sha256: str
    report: Report

    @staticmethod
    def of(result: weights_pb2.CheckpointResult) -> Checkpoint:
        """From its message."""
        return from_message(Checkpoint, result, report=Report.of(result.report))


@dataclass(frozen=True, slots=True)
class Cut:
    """The state of training after a step, kept in the memory of the service's host."""

    step: int
    policy_version: int
    num_bytes: int
    """Over all ranks."""

    @staticmethod
    def of(step: int, told: cuts_pb2.Cut | cuts_pb2.CutResult) -> Cut:
        """From its message."""
        return from_message(Cut, told, step=step)


@dataclass(frozen=True, slots=True)
class Parameter(FromMessage):
    """A parameter of a model."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """E.g. "bfloat16"."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Every parameter of a model, and the version of its weights."""

    policy_version: int
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights that a service has published; this names them and holds none."""

    reference: weights_pb2.WeightsRef = field(repr=False)
    """As it travels; not to be changed."""
    report: Report = field(repr=False)

    @property
    def policy_version(self) -> int:
        """Version of the weights."""
        return self.reference.policy_version

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters, in the model's order."""
        return tuple(Parameter.of(one) for one in self.reference.parameters)

    def __repr__(self) -> str:
        return f"Weights(version={self.policy_version}, parameters={len(self.parameters)})"


@dataclass(frozen=True, slots=True)
class Checksums:
    """SHA-256 of each parameter as a holder has it."""

    policy_version: int
    by_rank: tuple[Mapping[str, str], ...]
    """Of ranks 0, 1, ...: hexadecimal by name."""
