"""What a teacher at a server says of a row: log-probs of its tokens, and what it finds likeliest.

It is asked by token ids and answers by token ids: each place of `prompt_logprobs` maps ids to
log-probs, of the token that stands there and of the likeliest ones. Texts in an answer are not
read. vLLM takes no temperature for these: they are the model's own, at temperature 1.

Shape letters: T completion tokens of the row, K likeliest tokens at each place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rolemesh.engine.rollout.servers.requests import answer_invalid, entries_of, logprob_in

ABOVE_ZERO = 1e-3
"""Rounding may raise the log of a probability of 1, or a sum of probabilities, by this much."""


@dataclass(frozen=True, slots=True)
class RowScores:
    """What a teacher says of one row."""

    logprobs: list[float]
    """[T], of the completion's tokens."""
    top_ids: list[list[int]]
    """[T][K], the likeliest tokens at the place of each, the likeliest first."""
    top: list[list[float]]
    """[T][K], their log-probs."""


def row_scores(
    answer: Any,
    tokens: Sequence[int],
    first: int,
    top_k: int,
    *,
    vocab_size: int | None,
    where: str,
) -> RowScores:
    """Reads an answer to `scoring_body`.

    Args:
        answer: JSON of the server.
        tokens: The row that was sent.
        first: Where its completion begins, 1 or later.
        top_k: K; so many at each place, and the token itself where it is none of them.
        vocab_size: Token ids are less; None: not known.
        where: The server, for errors.

    Raises:
        AnswerInvalidError: It has another form, other tokens than were sent, too few or too many at
            a place, ids outside the vocabulary, or numbers that are no log-probs.

    Example: with K = 1 the place {"7": -1.2, "4": -0.5} of the token 7 gives the log-prob -1.2, and
    the likeliest token 4 with -0.5.
    """
    scores = RowScores([], [], [])
    entries = entries_of(answer, len(tokens), where=where)
    for token, entry in zip(tokens[first:], entries[first - 1 :], strict=True):
        own = logprob_in(entry, token, where=where)
        told = {_id_of(text, vocab_size, where): text for text in entry}
        if len(told) not in (top_k, top_k + 1):
            raise answer_invalid(where, f"{top_k} likeliest tokens and the row's own", len(told))
        if len(told) == top_k + 1:
            # Here it is none of the likeliest.
            del told[token]
        pairs = [(logprob_in(entry, text, where=where), one) for one, text in told.items()]
        # Stable: of equally likely ones the server's first stays first.
        pairs.sort(key=lambda pair: -pair[0])
        top = [logprob for logprob, _ in pairs]
        if max(own, *top, -1.0) > ABOVE_ZERO or sum(map(math.exp, top)) > 1 + ABOVE_ZERO:
            raise answer_invalid(where, "log-probs (--logprobs-mode raw_logprobs)", [own, *top[:5]])
        if top and token not in told and own > top[-1]:
            raise answer_invalid(where, f"the {top_k} likeliest tokens", f"none of {own}")
        scores.logprobs.append(own)
        scores.top_ids.append([one for _, one in pairs])
        scores.top.append(top)
    return scores


def _id_of(text: str, vocab_size: int | None, where: str) -> int:
    if not text.isdecimal() or not text.isascii() or len(text) > len(str(2**31)):
        raise answer_invalid(where, "token ids", text)
    found = int(text)
    if found >= (2**31 if vocab_size is None else vocab_size):
        raise answer_invalid(
            where, f"token ids below {vocab_size}, of which the policy has so many", found
        )
    return found
