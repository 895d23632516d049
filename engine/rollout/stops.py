"""Where a completion ends beside the model's own stop tokens: given texts and tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rolemesh.engine.data.rendering.rendering import ChatTokenizer
from rolemesh.engine.specs import SamplingSpec

_WINDOW_TOKENS = 8
"""Tokens without text that may stand inside a stop text."""


def stop_check(
    sampling: SamplingSpec, tokenizer: ChatTokenizer
) -> Callable[[Sequence[int]], bool] | None:
    """Says of the tokens so far whether they end the completion; None where nothing is given.

    Asked after each token, so it looks at the last ones alone. The texts are looked for in what
    the tokens say, special tokens among them.

    Example: with the stop text "</answer>" the completion ends with the token that brings its last
    character, whatever else that token says.
    """
    texts, ids = sampling.stop, frozenset(sampling.stop_token_ids)
    if not texts and not ids:
        return None
    # A token that has text has a byte of it at least.
    window = max((len(text.encode()) for text in texts), default=0) + _WINDOW_TOKENS

    def is_complete(tokens: Sequence[int]) -> bool:
        if tokens[-1] in ids:
            return True
        if not texts:
            return False
        decoded = str(tokenizer.decode(list(tokens[-window:]), skip_special_tokens=False))
        return any(text in decoded for text in texts)

    return is_complete
