"""Reward clients that do as they are told, and rows for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rolemesh.services.reward.outside.base import (
    Judgement,
    OutsideRewardError,
    RewardAnswerInvalidError,
    RewardClient,
    RewardRow,
    RewardUnavailableError,
)

Answer = Callable[[Sequence[RewardRow]], Judgement] | OutsideRewardError | float
"""What a request comes to: computed, raised, or given after so many seconds."""


def row(completion: str, prompt: str = "p", answer: str = "") -> RewardRow:
    """A row; its reward is the length of the completion."""
    return RewardRow(prompt=prompt, completion=completion, query=prompt + completion, answer=answer)


def lengths(rows: Sequence[RewardRow]) -> Judgement:
    return Judgement(rewards=[float(len(given.completion)) for given in rows])


def unavailable(retry_after_s: float | None = None) -> RewardUnavailableError:
    return RewardUnavailableError("fake", found="status 503", retry_after_s=retry_after_s)


def lie() -> RewardAnswerInvalidError:
    return RewardAnswerInvalidError("fake", expected="1", found="NaN", remedy="mend it")


class FakeClient(RewardClient):
    """Answers by a script, then with the lengths of completions."""

    def __init__(self, script: Sequence[Answer] = (), name: str = "fake") -> None:
        self.endpoint = name
        self.script = list(script)
        self.asked: list[list[str]] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.cancelled = 0
        self.is_closed = False

    async def ask(self, rows: Sequence[RewardRow]) -> Judgement:
        self.asked.append([given.completion for given in rows])
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            answer = self.script.pop(0) if self.script else lengths
            if isinstance(answer, OutsideRewardError):
                raise answer
            if isinstance(answer, float):
                await asyncio.sleep(answer)
                return lengths(rows)
            await asyncio.sleep(0)
            return answer(rows)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1

    def sent(self, row: RewardRow) -> bytes:
        return row.completion.encode()

    async def close(self) -> None:
        self.is_closed = True
