"""Expected answers that are no text: how they travel beside a row, and how they are read there.

A row's answer is text wherever it travels, and a number is its text. Any other JSON value travels
as its JSON text, with the value itself in the row's metadata under "answer": so every protocol has
it as text, and a reward function gets it as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

ANSWER = "answer"
"""Key of the metadata that holds an answer which is neither text nor a number."""


def json_text(value: Any) -> str:
    """A JSON value as the text of an answer."""
    return json.dumps(value, ensure_ascii=False)


def answer_as_given(text: str, metadata: Mapping[str, Any]) -> Any:
    """The answer as the data has it, where it is neither text nor a number; else its text.

    Args:
        text: The answer as it travels.
        metadata: The row's metadata.

    Example: '["4", "four"]' with the metadata {"answer": ["4", "four"]} is ["4", "four"], and with
    {} it is a text that only looks like a list.
    """
    value = metadata.get(ANSWER)
    # A data set may also have a column of that name that is not its answer.
    is_own = isinstance(value, bool | list | Mapping) and json_text(value) == text
    return value if is_own else text


def accepted(text: str) -> list[str]:
    """The texts that are right for an answer: itself, and the items of a list in JSON.

    Example: "4" -> ["4"], '["4", 5]' -> ['["4", 5]', "4", "5"], "[]" -> ["[]"].
    """
    if not text.startswith("["):
        return [text]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return [text]
    return [text, *(item if isinstance(item, str) else json_text(item) for item in value)]
