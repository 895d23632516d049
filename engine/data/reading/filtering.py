"""Measures rows, so that those that are too long are left out before the shuffle and counted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from rolemesh.engine.data.rendering.rendering import Renderer
from rolemesh.engine.data.row_store import ROWS_AT_ONCE, UNMEASURED, Rows
from rolemesh.engine.data.rows import Completion, PromptRow

_Found = tuple[int, int, bool]


class Bounds:
    """Measures rows as far as some bounds ask, see `row_store.Measure`.

    Every prompt is rendered. Tokens are made only of a text that may have more than a bound allows:
    that a short one fits is told from its bytes. Those tokens are not kept.
    """

    def __init__(
        self,
        renderer: Renderer,
        *,
        max_prompt_tokens: int | None,
        max_row_tokens: int | None,
        measured_from: int | None = None,
    ) -> None:
        """Takes the bounds; None is no bound.

        Args:
            renderer: Renderer that makes tokens.
            max_prompt_tokens: Longest prompt.
            max_row_tokens: Longest prompt with its longest completion. Bare texts carry it
                themselves, and are never too long.
            measured_from: Prompts of more tokens are looked for later, and not too long.
        """
        self._renderer = renderer
        self._max_prompt_tokens = max_prompt_tokens
        self._max_row_tokens = max_row_tokens
        bounds = (max_prompt_tokens, max_row_tokens, measured_from)
        self._least = min((bound for bound in bounds if bound is not None), default=None)

    def __call__(self, rows: Sequence[PromptRow]) -> list[_Found]:
        """The lengths of some rows; raises DataInvalidError if one cannot be rendered or read."""
        if self._least is None:
            for row in rows:
                if row.images:
                    # Their faults show at the start, as those of texts do.
                    self._renderer.prompt(row)
            return [(UNMEASURED, UNMEASURED, True)] * len(rows)
        prompts = [row for row in rows if row.text is None]
        texts = self._renderer.prompt_texts(prompts)
        lengths = self._renderer.prompt_lengths(prompts, texts, self._least)
        if self._max_row_tokens is None:
            found = iter([self._judged(length, length) for length in lengths])
        else:
            found = iter(self._with_completions(prompts, texts, lengths, self._max_row_tokens))
        return [
            (UNMEASURED, UNMEASURED, True) if row.text is not None else next(found) for row in rows
        ]

    def _judged(self, prompt_tokens: int, row_tokens: int) -> _Found:
        is_short = (
            self._max_prompt_tokens is None or prompt_tokens <= self._max_prompt_tokens
        ) and (self._max_row_tokens is None or row_tokens <= self._max_row_tokens)
        return prompt_tokens, row_tokens, is_short

    def _with_completions(
        self, rows: Sequence[PromptRow], texts: Sequence[str], lengths: list[int], limit: int
    ) -> list[_Found]:
        renderer = self._renderer
        wholes: list[int] = []
        doubtful = []
        for at, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            bounds = [renderer.completion_bound(row, one) for one in _completions(row)]
            most = abs(length) + max(bounds, default=0)
            # What is left out is told of with its number of tokens.
            is_short = most <= limit and self._judged(length, -1)[2]
            if not is_short:
                doubtful.append(at)
            wholes.append(-int(most) if is_short else UNMEASURED)
        inexact = [at for at in doubtful if lengths[at] < 0]
        measured = renderer.batch_lengths([texts[at] for at in inexact])
        for at, length in zip(inexact, measured, strict=True):
            lengths[at] = length
        given = [(at, one) for at in doubtful for one in _completions(rows[at])]
        longest = dict.fromkeys(doubtful, 0)
        made = renderer.completion_lengths([(rows[at], one) for at, one in given])
        for (at, _), length in zip(given, made, strict=True):
            longest[at] = max(longest[at], length)
        for at in doubtful:
            wholes[at] = lengths[at] + longest[at]
        return [self._judged(*both) for both in zip(lengths, wholes, strict=True)]


def long_prompts(rows: Rows, renderer: Renderer, max_tokens: int) -> list[tuple[int, int]]:
    """Lengths and places in `rows` of the prompts with more than max_tokens tokens, longest first.

    Only those are rendered of which the store does not know that they are short enough. Bare texts
    have no prompt.

    Raises:
        DataInvalidError: A row cannot be rendered.
    """
    known = rows.tokens("prompt")
    long = (numpy.abs(known) > max_tokens) & ~rows.has("text")
    exact = numpy.flatnonzero(long & (known > 0))
    found = list(zip(known[exact].tolist(), exact.tolist(), strict=True))
    doubtful = numpy.flatnonzero(long & (known < 0)).tolist()
    for first in range(0, len(doubtful), ROWS_AT_ONCE):
        places = doubtful[first : first + ROWS_AT_ONCE]
        doubted = [rows[at] for at in places]
        texts = renderer.prompt_texts(doubted)
        lengths = renderer.prompt_lengths(doubted, texts, max_tokens)
        found += [(length, at) for length, at in zip(lengths, places, strict=True) if length > 0]
    found = [one for one in found if one[0] > max_tokens]
    return sorted(found, key=lambda one: (-one[0], one[1]))


def _completions(row: PromptRow) -> list[Completion]:
    given = (row.completion, row.chosen, row.rejected)
    return [completion for completion in given if completion is not None]
