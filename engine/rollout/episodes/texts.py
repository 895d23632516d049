"""Between texts of an environment and tokens of an episode.

Tokens in, tokens out: what was sampled is never encoded again. What the environment says is encoded
alone (text as it is, messages as the chat template renders them), put behind the turn, and masked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rolemesh.engine.data.rendering.rendering import ChatTokenizer, Renderer

STOP_WINDOW_TOKENS = 8
"""Tokens without text that may stand inside a stop text while it is looked for as tokens come."""


class EpisodeTexts:
    """Encodes what an environment says, and finds where a turn ends. Thread-safe.

    Example: with the stop text "</calc>", `turn_end` of the tokens of "<calc>2+2</calc> is" is the
    number of those of "<calc>2+2</calc>".
    """

    def __init__(self, tokenizer: ChatTokenizer, max_observation_tokens: int) -> None:
        """Takes the policy's tokenizer, and how many tokens one observation may have."""
        self._renderer = Renderer(tokenizer)
        self._tokenizer = tokenizer
        self._max_observation_tokens = max_observation_tokens

    def encoded(self, text: str) -> list[int]:
        """The first tokens of a text of the environment, as many as one observation may have."""
        return self._renderer.tokens(text)[: self._max_observation_tokens] if text else []

    def rendered(self, messages: Sequence[Mapping[str, Any]], closed_by: int | None) -> list[int]:
        """Messages as the chat template continues the turn with them, their contents shortened.

        Args:
            messages: Of others than the policy.
            closed_by: Token by which the policy has closed its turn; None: it has not.

        Raises:
            DataInvalidError: The template does not take them.
        """
        left, shown = self._max_observation_tokens, []
        for message in messages:
            tokens = self._renderer.tokens(message["content"])
            kept, content = tokens[:left], message["content"]
            if len(kept) < len(tokens):
                # The cut may go through a character.
                content = self._tokenizer.decode(kept).rstrip("\N{REPLACEMENT CHARACTER}")
            shown.append({**message, "content": content})
            left -= len(kept)
        return self._renderer.continuation(shown, end_token=closed_by)

    def turn_end(self, tokens: Sequence[int], stop: Sequence[str]) -> int | None:
        """Number of the first tokens whose text holds a stop text; None when it never does.

        Text only grows at its end, so once it holds one it goes on holding it: halving finds it.
        """
        if not stop or not self._holds(tokens, stop):
            return None
        low, high = 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            if self._holds(tokens[:middle], stop):
                high = middle
            else:
                low = middle + 1
        return low

    def stop_check(self, stop: Sequence[str]) -> Callable[[Sequence[int]], bool] | None:
        """Tells a back end when to stop, looking at the last tokens alone: it is asked often.

        Where it misses one, `turn_end` finds it.
        """
        if not stop:
            return None
        # A token that has text has a byte of it at least.
        window = max(len(text.encode()) for text in stop) + STOP_WINDOW_TOKENS

        def is_complete(tokens: Sequence[int]) -> bool:
            return self._holds(tokens[-window:], stop) and self._holds(tokens, stop)

        return is_complete

    def _holds(self, tokens: Sequence[int], texts: Sequence[str]) -> bool:
        decoded = self.text(tokens)
        return any(text in decoded for text in texts)

    def text(self, tokens: Sequence[int]) -> str:
        """What tokens say, without special ones."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
