"""Turns of a run that tunes itself: which settings it has from which step on, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rolemesh.coordinator.recipe.sections.tuning import Settings
from rolemesh.coordinator.trackers.files import whole_lines

TURNS_FILE = "tuning.jsonl"
"""In the folder of a run that tunes itself: its turns, one a line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What became of settings that were tried."""

    settings: Settings
    is_kept: bool
    why: str
    """In words."""
    expected_s: float
    """Of a step, as it was expected."""
    measured_s: float | None
    """The median of the steps that were counted; None where none was made."""
    before_s: float
    """The same of the best settings until then."""
    has_failed: bool = False
    """Whether something failed meanwhile: they are not tried again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A decision between two steps."""

    step: int
    """Steps made; the settings hold from the next one on."""
    settings: Settings
    best: Settings
    """Those that are kept so far."""
    expected_s: float | None = None
    """Of a step with the settings; None where they are the best."""
    verdict: Verdict | None = None
    """Of the settings that were tried before; None where none were."""
    is_last: bool = False
    """Whether nothing else will be tried."""

    @property
    def is_trial(self) -> bool:
        """Whether the settings have to show what they are worth."""
        return self.settings != self.best

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Reads what `to_dict` gave.

        Raises:
            TypeError: It is nothing of the kind.
        """
        verdict = values["verdict"]
        return cls(**{**values, "verdict": None if verdict is None else Verdict(**verdict)})


def read_turns(directory: Path) -> list[Turn]:
    """The turns of the run in a folder, oldest first; none where it did not tune itself."""
    return [Turn.from_dict(json.loads(line)) for _, line in whole_lines(directory / TURNS_FILE)]
