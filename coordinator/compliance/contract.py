"""The words of the contract: its roles, how binding a sentence is, and how a server breaks it."""

from __future__ import annotations

import enum

from rolemesh.engine.specs.columns import COLUMNS
from rolemesh.v1 import experience_pb2, tensor_pb2

REWARD_ROLES = ("reward", "cost")
SAMPLING_ROLES = ("rollout", "actor")
LOGPROB_ROLES = ("reference", "teacher", "actor")
MODEL_ROLES = ("reference", "teacher", "critic", "actor", "rollout")
"""Roles that need WorkerService."""
ALL_ROLES = (*REWARD_ROLES, "reference", "teacher", "critic", *SAMPLING_ROLES)


def column_schema(name: str) -> experience_pb2.ColumnSchema:
    """Kind and dtype of one of the columns that the protos name."""
    kind, dtype = COLUMNS[name]
    return experience_pb2.ColumnSchema(
        name=name,
        kind=experience_pb2.ColumnKind.Value(f"COLUMN_KIND_{kind.upper()}"),
        dtype=tensor_pb2.DataType.Value(f"DATA_TYPE_{dtype.upper()}"),
    )


class Level(enum.StrEnum):
    """How binding a sentence of the contract is."""

    MUST = "MUST"
    """A run with a server that breaks it fails, or learns from wrong numbers."""
    SHOULD = "SHOULD"
    """Without it nothing breaks, but people and programs learn less than they could."""


class Outcome(enum.StrEnum):
    """How a check ended."""

    HOLDS = "holds"
    BROKEN = "broken"
    SKIPPED = "skipped"
    """The check does not apply to this server."""
    NOT_RUN = "not run"
    """The server had stopped before."""


class Phase(enum.IntEnum):
    """When a check runs: checks of a phase see the service in the same state."""

    BEFORE = 0
    """No run holds the service."""
    INITIALIZE = 1
    """The run of the suite takes it."""
    WORK = 2
    """The run of the suite holds it."""
    DRAIN = 3
    """The run gives it back."""
    AFTER = 4
    """Nothing is called any more. The answers of earlier phases are judged."""


class Serves(enum.StrEnum):
    """The services that a server needs for a check to apply to it."""

    ANYTHING = "anything"
    RUNS = "runs"
    """WorkerService and references: a service that takes part in a run."""
    TRAJECTORIES = "trajectories"
    """A reward that takes trajectories inline."""


class BrokenContractError(Exception):
    """The server does not do what the sentence says."""

    def __init__(self, *, sent: str, came: str, remedy: str) -> None:
        super().__init__(f"{sent}: {came}")
        self.sent = sent
        self.came = came
        self.remedy = remedy


class NotApplicableError(Exception):
    """The check does not apply to this server; the text says why."""
