"""Bounds of the notes in a report, which tell people of a call that has succeeded."""

from __future__ import annotations

from collections.abc import Sequence

MAX_NOTES = 8
MAX_CHARACTERS = 1000
"""Of each note."""


def bounded(notes: Sequence[str]) -> list[str]:
    """The first notes, each cut where it is too long."""
    return [note[:MAX_CHARACTERS] for note in notes[:MAX_NOTES]]
