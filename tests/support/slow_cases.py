"""Cases of a test of which some are made by `make test`, and the others by `make test-slow`."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import pytest


def mostly_slow(fast: Container[int], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The cases for `parametrize`: those of the numbers in `fast` as they are, the others slow."""
    return [
        pytest.param(*case, marks=() if number in fast else pytest.mark.slow)
        for number, case in enumerate(cases)
    ]
