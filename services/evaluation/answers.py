"""Answers of a policy as judges take them."""

from __future__ import annotations

from dataclasses import dataclass

from rolemesh.engine.data.rows import PromptRow


class UnscoredError(RuntimeError):
    """A completion could not be scored; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is judged."""

    row: PromptRow
    prompt: str
    """As text; for a classifier as the policy's template renders it."""
    completion: str
    """Its text, or what the answer in it is."""
    given: float | None = None
    """What the environment gave that played it; None: there was none."""
    images: tuple[str, ...] | None = None
    """Those of the prompt as data URLs, in its order; None: the task's data has none."""
