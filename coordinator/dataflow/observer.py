"""Observers of a run: they are told of its phases, steps and events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

RECOVERING = "recovering"
"""In place of a role in `on_phase`, while a run recovers: the stage is what from, and how."""


class RunObserver(Protocol):
    """Shows a run to people. Called on the coordinator's loop; must return at once."""

    def on_phase(self, role: str, stage: str, done: int, total: int) -> None:
        """A role works on something.

        Args:
            role: e.g. "actor", or RECOVERING.
            stage: What it does, e.g. "generate: decode"; empty when it has finished.
            done: Units finished.
            total: Units in all, 0 when not known.
        """

    def on_estimate(self, step: int, seconds: float, gone_s: float) -> None:
        """A step that is being made will take so long, by those of its calls that were made.

        Told of the first step of an attempt, where its calls say it, again and again.

        Args:
            step: Its number.
            seconds: From its begin to its end.
            gone_s: Seconds of these that are gone.
        """

    def on_step(self, record: Mapping[str, float]) -> None:
        """A step was made; the record is a line of metrics.jsonl."""

    def on_event(self, text: str) -> None:
        """Something worth a line happened."""


class QuietObserver:
    """Shows nothing."""

    def on_phase(self, role: str, stage: str, done: int, total: int) -> None:
        """Shows nothing."""

    def on_estimate(self, step: int, seconds: float, gone_s: float) -> None:
        """Shows nothing."""

    def on_step(self, record: Mapping[str, float]) -> None:
        """Shows nothing."""

    def on_event(self, text: str) -> None:
        """Shows nothing."""
