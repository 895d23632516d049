"""What a check is, what it finds, and the list of all of them."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolemesh.coordinator.compliance.subject import Subject

REWARD_ROLES = ("reward", "cost")
SAMPLING_ROLES = ("rollout", "actor")
LOGPROB_ROLES = ("reference", "actor")
MODEL_ROLES = ("reference", "critic", "actor", "rollout")
"""Roles that cannot do without WorkerService."""
ALL_ROLES = (*REWARD_ROLES, "reference", "critic", *SAMPLING_ROLES)


class Level(enum.StrEnum):
    """How binding a sentence of the contract is."""

    MUST = "MUST"
    """A run with a server that breaks it fails, or learns from wrong numbers."""
    SHOULD = "SHOULD"
    """Nothing breaks, but people and programs are told less than they could be."""


class Outcome(enum.StrEnum):
    """What a check came to."""

    HOLDS = "holds"
    BROKEN = "broken"
    SKIPPED = "skipped"
    """It says nothing about this server."""
    NOT_RUN = "not run"
    """The server was gone before."""


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
    """Nothing is called any more: what came before is judged."""


class Serves(enum.StrEnum):
    """What a server has to serve for a check to say anything about it."""

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
    """The check says nothing about this server; the text says why."""


CheckFunction = Callable[["Subject"], Awaitable[None]]
"""Returns when the contract holds; raises one of the two errors above, or what the call raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One sentence of the contract and the function that holds a server to it."""

    check_id: str
    """Stable, "group.name"."""
    level: Level
    contract: str
    """What the proto says."""
    roles: Sequence[str]
    phase: Phase
    serves: Serves
    run: CheckFunction

    def is_named(self, names: Sequence[str]) -> bool:
        """Whether one of the names is its id or its group; no names name all."""
        group = self.check_id.partition(".")[0]
        return not names or self.check_id in names or group in names


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check came to."""

    check: Check
    outcome: Outcome
    seconds: float
    sent: str = ""
    """What the server was asked, where it broke the contract."""
    came: str = ""
    """What it answered; of a check that was skipped, why."""
    remedy: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether a MUST does not hold, or could not be seen to hold."""
        fails = self.outcome in (Outcome.BROKEN, Outcome.NOT_RUN)
        return fails and self.check.level is Level.MUST

    def to_dict(self) -> dict[str, Any]:
        """As one JSON object."""
        return {
            "check": self.check.check_id,
            "level": self.check.level.value,
            "outcome": self.outcome.value,
            "contract": self.check.contract,
            "sent": self.sent,
            "came": self.came,
            "remedy": self.remedy,
            "seconds": round(self.seconds, 3),
        }


CHECKS: list[Check] = []
"""Every check, in the order in which the modules define them."""


def check(
    check_id: str,
    level: Level,
    contract: str,
    *,
    roles: Sequence[str] = ALL_ROLES,
    phase: Phase = Phase.WORK,
    serves: Serves = Serves.ANYTHING,
) -> Callable[[CheckFunction], CheckFunction]:
    """Adds a function to the list of checks."""

    def add(function: CheckFunction) -> CheckFunction:
        CHECKS.append(
            Check(
                check_id=check_id,
                level=level,
                contract=contract,
                roles=roles,
                phase=phase,
                serves=serves,
                run=function,
            )
        )
        return function

    return add
