"""Awaiting of several works side by side, of which one failure fails all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

Result = TypeVar("Result")


async def together(works: Iterable[Awaitable[Result]]) -> list[Result]:
    """Runs coroutines, or tasks that have begun, side by side.

    When one fails, the others are cancelled and have ended before its exception is raised, alone
    and as it is. The same holds when the caller is cancelled.

    Returns:
        The results, in the order of the works.
    """
    # Not a TaskGroup: its exception is a group, a failing task hides that the caller is cancelled,
    # and after a failure Python 3.11 leaves the caller marked as one that is being cancelled.
    tasks: list[asyncio.Future[Result]] = []
    try:
        tasks.extend(asyncio.ensure_future(work) for work in works)
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def all_ended(works: Iterable[Awaitable[Result]]) -> list[Result]:
    """Runs coroutines side by side, each to its end: what a failed one began goes on elsewhere.

    When the caller is cancelled, they are, too, and have ended before.

    Returns:
        The results, in the order of the works.

    Raises:
        BaseException: The failure of the first work that failed, in the order of the works.
    """
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
