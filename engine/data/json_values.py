"""Values of tables as JSON has them, and how deep they may nest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_ANSWER_DEPTH = 60
"""Most levels of an answer that is no text. Services take JSON of 64, and the metadata is one."""


def json_value(value: Any) -> Any:
    """The value with null for NaN and the infinities, which JSON lacks.

    Raises:
        TypeError: It holds raw bytes.
    """
    if isinstance(value, Mapping):
        return {str(key): json_value(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(part) for part in value]
    if isinstance(value, bytes):
        raise TypeError(f"a column holds {len(value)} raw bytes, which JSON cannot")
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def nests_too_deep(value: Any) -> bool:
    """Whether a value nests deeper than services read; looks level by level."""
    level = [value]
    for _ in range(MAX_ANSWER_DEPTH):
        nested = [part for part in level if isinstance(part, Mapping | list | tuple)]
        level = [
            inner
            for part in nested
            for inner in (part.values() if isinstance(part, Mapping) else part)
        ]
        if not level:
            return False
    return True
