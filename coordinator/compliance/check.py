"""Definition of a check and of its finding, and the list of all checks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rolemesh.coordinator.compliance.contract import ALL_ROLES, Level, Outcome, Phase, Serves
from rolemesh.coordinator.compliance.subject import Subject

CheckFunction = Callable[[Subject], Awaitable[None]]
"""Returns when the contract holds; raises one of the two errors of
`contract`, or what the call raised."""


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
