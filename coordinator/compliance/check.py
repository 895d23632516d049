"""Definition of a check and of its finding, and the list of all checks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rolemesh.coordinator.compliance.contract import ALL_ROLES, Level, Outcome, Phase, Serves
from rolemesh.coordinator.compliance.subject import Subject

CheckFunction = Callable[[Subject], Awaitable[None]]
"""Returns when the contract holds. Otherwise it raises one of the two errors of `contract`, or the
error of the call."""


@dataclass(frozen=True, slots=True)
class Check:
    """One sentence of the contract and the function that holds a server to it."""

    check_id: str
    """Id that does not change, as "group.name"."""
    level: Level
    contract: str
    """The sentence of the proto."""
    roles: Sequence[str]
    phase: Phase
    serves: Serves
    run: CheckFunction

    def is_named(self, names: Sequence[str]) -> bool:
        """Whether one of the names is its id or its group. Without names, all checks are meant."""
        group = self.check_id.partition(".")[0]
        return not names or self.check_id in names or group in names


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    check: Check
    outcome: Outcome
    seconds: float
    sent: str = ""
    """The request with which the server broke the contract."""
    came: str = ""
    """Its answer; for a skipped check the reason."""
    remedy: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether a MUST does not hold, or could not be checked."""
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
        CHECKS.append(Check(check_id, level, contract, roles, phase, serves, function))
        return function

    return add


run_check = partial(check, serves=Serves.RUNS)
"""A check of services that take part in runs."""
