"""Contract of a tracker: it is given a run, its scalars step by step, and its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Which run it is."""

    run_id: str
    """Unique, e.g. "quickstart-20261121-133000-1f2e3d"."""
    name: str
    """As the recipe says, e.g. "quickstart"."""
    directory: str
    """Absolute path of the folder of the run's files."""


class Tracker(Protocol):
    """Keeps the scalars of one run.

    The methods are called in this order and never two at once: `start` once, `log` for each step,
    `finish` once. They may block and raise: an outside tracker has a process of its own.

    Example::

        class Printing:
            def start(self, run, config): print(run.name, config["algorithm"]["type"])
            def log(self, step, scalars): print(step, scalars["reward/mean"])
            def finish(self, state): print(state)
    """

    def start(self, run: RunFacts, config: Mapping[str, Any]) -> None:
        """The run begins.

        Args:
            run: Which one.
            config: Its recipe as plain JSON values, without passwords.
        """

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """A step was made, or a policy evaluated before the first one.

        Args:
            step: Its number, from 1; 0 before the first one.
            scalars: Finite values by name, e.g. {"reward/mean": 0.25, "time/step": 1.5}.
        """

    def finish(self, state: str) -> None:
        """The run has ended: everything has to be kept when this returns.

        Args:
            state: "succeeded", "stopped" or "failed".
        """
