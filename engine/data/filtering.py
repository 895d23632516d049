"""Leaves out rows that are too long, before the shuffle, and counts them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rolemesh.engine.data.rendering import Renderer
from rolemesh.engine.data.rows import PromptRow

_ROWS_AT_ONCE = 1024
"""Rows that are tokenised at once: the tokenizer spreads a batch over its threads."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Filtered:
    """The rows that are left, and counts of the others."""

    rows: Sequence[PromptRow]
    num_left_out: int
    shortest: int
    """Tokens of the shortest row that was measured; 0 when none was."""
    longest: int
    """Tokens of the longest row that was measured; 0 when none was."""


def without_long_rows(
    rows: Sequence[PromptRow],
    renderer: Renderer,
    *,
    max_prompt_tokens: int | None,
    max_row_tokens: int | None,
) -> Filtered:
    """Leaves out the rows whose rendered prompt, or whole, is too long.

    Bare texts always stay: they carry the bound on whole rows, and are cut when they are read. The
    tokens that are made here are not kept: to render a prompt again takes a tenth of a millisecond.

    Args:
        rows: Rows of one split of a source.
        renderer: Renderer that makes tokens.
        max_prompt_tokens: Longest prompt; None for any.
        max_row_tokens: Longest prompt with its longest completion; None for any.

    Raises:
        DataInvalidError: A row cannot be rendered.
    """
    if max_prompt_tokens is None and max_row_tokens is None:
        return Filtered(rows=rows, num_left_out=0, shortest=0, longest=0)
    kept: list[PromptRow] = []
    measured: list[int] = []
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[first : first + _ROWS_AT_ONCE]
        prompts = [row for row in some if row.text is None]
        lengths = iter(renderer.batch_lengths([renderer.prompt_text(row) for row in prompts]))
        for row in some:
            if row.text is not None:
                kept.append(dataclasses.replace(row, max_text_tokens=max_row_tokens))
                continue
            num_prompt_tokens = next(lengths)
            num_tokens = num_prompt_tokens
            if max_row_tokens is not None:
                num_tokens += _longest_completion(row, renderer)
            measured.append(num_tokens)
            if (max_prompt_tokens is None or num_prompt_tokens <= max_prompt_tokens) and (
                max_row_tokens is None or num_tokens <= max_row_tokens
            ):
                kept.append(row)
    return Filtered(
        rows=kept,
        num_left_out=len(rows) - len(kept),
        shortest=min(measured, default=0),
        longest=max(measured, default=0),
    )


def long_prompts(
    rows: Sequence[PromptRow], renderer: Renderer, max_tokens: int
) -> list[tuple[int, str]]:
    """Lengths and places of the rendered prompts with more than max_tokens tokens, longest first.

    A text that has no more bytes than that is not tokenised, since a token stands for at least one
    byte. Bare texts have no prompt.

    Raises:
        DataInvalidError: A row cannot be rendered.
    """
    texts = [(row.where, renderer.prompt_text(row)) for row in rows if row.text is None]
    doubtful = [(where, text) for where, text in texts if len(text.encode()) > max_tokens]
    found: list[tuple[int, str]] = []
    for first in range(0, len(doubtful), _ROWS_AT_ONCE):
        some = doubtful[first : first + _ROWS_AT_ONCE]
        lengths = renderer.batch_lengths([text for _, text in some])
        measured = zip(lengths, (where for where, _ in some), strict=True)
        found += [(length, where) for length, where in measured if length > max_tokens]
    return sorted(found, key=lambda one: -one[0])


def _longest_completion(row: PromptRow, renderer: Renderer) -> int:
    given = (row.completion, row.chosen, row.rejected)
    lengths = [
        len(renderer.completion(row, completion).tokens)
        for completion in given
        if completion is not None
    ]
    return max(lengths, default=0)
