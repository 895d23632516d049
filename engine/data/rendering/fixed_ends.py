"""What many rendered prompts have in common at both ends, as far as it can be encoded once.

A chat template writes the same system turn in front of each prompt, and the same opening of the
answer behind it. Both are most of the tokens where prompts are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class FixedEnds:
    """Finds the common ends of texts, cut where a tokenizer cuts a text itself.

    A tokenizer cuts a text at the tokens that were added to its vocabulary, and encodes the pieces
    by themselves. It takes the leftmost of them, and the longest of those. So it cuts at every
    occurrence of one that no other contains, and into the beginning of which no end of one reaches.

    Example: of "<s>Add.<s>1+1<e><s>" and "<s>Add.<s>2<e><s>" they are "<s>Add.<s>" and "<e><s>".
    """

    def __init__(self, tokenizer: Any) -> None:
        """Takes a tokenizer of the tokenizers library that encodes pieces by themselves."""
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        # Some take the space around them along, or want one there.
        is_plain = not any(one.lstrip or one.rstrip or one.single_word for one in added)
        self._contents: list[str] = []
        self._cutting: set[str] = set()
        if is_plain and not getattr(tokenizer, "split_special_tokens", False):
            self._contents = [one.content for one in added]
            self._cutting = {one.content for one in added if not one.normalized}
        self._is_safe: dict[str, bool] = {}

    def of(self, texts: Sequence[str]) -> tuple[str, str]:
        """The common beginning and end of texts, which do not overlap in any; each may be empty."""
        if not self._cutting or len(texts) < 2:
            return "", ""
        head = _beginning(texts)
        head = head[: max((head.rfind(one) + len(one) for one in self._in(head)), default=0)]
        tail = _beginning([text[len(head) :][::-1] for text in texts])[::-1]
        tail = tail[min((tail.find(one) for one in self._in(tail)), default=len(tail)) :]
        return head, tail

    def _in(self, text: str) -> list[str]:
        """The tokens in a text at each occurrence of which it is cut."""
        found = [content for content in self._cutting if content in text]
        for content in found:
            if content not in self._is_safe:
                self._is_safe[content] = self._always_cuts(content)
        return [content for content in found if self._is_safe[content]]

    def _always_cuts(self, content: str) -> bool:
        return not any(
            (content in other and content != other)
            or any(content.startswith(other[at:]) for at in range(1, len(other)))
            for other in self._contents
        )


def _beginning(texts: Sequence[str]) -> str:
    """The longest beginning that all texts share."""
    # Of sorted texts the first and the last share the least.
    first, last = min(texts), max(texts)
    same = (at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
    return first[: next(same, min(len(first), len(last)))]
