"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.rank_processes import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Up to eight processes that play ranks; each starts when a test first needs it."""
    # Brings torch along, which most tests can do without.
    from support.rank_processes import RankPool

    with RankPool(8) as pool:
        yield pool
