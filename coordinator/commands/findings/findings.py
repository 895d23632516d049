"""Findings of commands that look at something, and how they are shown."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from rolemesh.coordinator.commands.terminal.console import JsonConsole, say


class Level(enum.IntEnum):
    """How bad a finding is."""

    OK = 0
    WARN = 1
    SKIP = 2
    """It was not looked at."""
    FAIL = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    what: str
    """Its name, e.g. "torch"."""
    text: str
    remedy: str = ""
    """What to do; empty when nothing is."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "level": self.level.name}


def ok(what: str, text: str) -> Finding:
    """Nothing is to be done."""
    return Finding(level=Level.OK, what=what, text=text)


def warn(what: str, text: str, remedy: str) -> Finding:
    """A run is possible, but not as it should be."""
    return Finding(level=Level.WARN, what=what, text=text, remedy=remedy)


def fail(what: str, text: str, remedy: str = "") -> Finding:
    """A run is not possible."""
    return Finding(level=Level.FAIL, what=what, text=text, remedy=remedy)


def enough(is_enough: bool, what: str, text: str, remedy: str) -> Finding:
    """Nothing is to be done where there is enough, e.g. of memory."""
    return ok(what, text) if is_enough else warn(what, text, remedy)


_COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.SKIP: "yellow", Level.FAIL: "red"}


class FindingsShown:
    """Shows findings as they come, to people or as one JSON object a line."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._console = Console()
        self.counts = dict.fromkeys(Level, 0)
        """Findings shown, by level."""

    def show(self, finding: Finding) -> None:
        """Shows one."""
        self.counts[finding.level] += 1
        if self._as_json:
            JsonConsole().write("finding", finding.to_dict())
            return
        mark = f"[{_COLOURS[finding.level]}]{finding.level.name:4}[/]"
        self._console.print(f"{mark}  {finding.what:<15}", end="", highlight=False)
        say(self._console, finding.text)
        if finding.remedy:
            say(self._console, f"{'':21}-> {finding.remedy}")
