"""Probes of a reward: each tries one thing and reports what it finds."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rolemesh.services.reward.outside.base import (
    Judgement,
    OutsideReward,
    OutsideRewardError,
    RewardRefusedError,
    RewardRow,
    RewardTimeoutError,
    current_step,
)
from rolemesh.services.reward.outside.check import samples

TOLERANCE = 1e-3
"""Largest difference between two rewards of one row: relative, or absolute below 1. A model rounds
differently in a batch and alone."""

MOST_AT_ONCE = 8
"""Most requests that the probe of concurrency sends at once, if the source allows so many."""

PAUSE_S = 0.1
"""Pause before a request is sent again. A run waits longer, and so survives more."""

MOST_ALONE = 3
"""Most rows that are also judged alone."""


class Level(StrEnum):
    """Result of a probe."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The finding of a probe."""

    probe: str
    level: Level
    text: str
    remedy: str = ""


Malformed = Callable[[], Awaitable[object]]
"""Sends a malformed request; returns the answer, or raises OutsideRewardError."""


class Prober:
    """Tries one reward. Owner: one loop, one `run`."""

    def __init__(
        self,
        reward: OutsideReward,
        rows: Sequence[RewardRow],
        *,
        at_once: int,
        malformed: Malformed | None,
        is_keyed: bool = False,
        tries: int = 1,
    ) -> None:
        """Prepares; sends nothing yet.

        Args:
            reward: The reward to try. It must not repeat requests, and must not cache.
            rows: Rows to send, at least one.
            at_once: Number of concurrent requests that it has to serve.
            tries: Times that a request is sent at most, while what fails may pass.
            malformed: Sends a malformed request; None: the protocol has none.
            is_keyed: Requests carry keys of rows and step, so a service may recognise a repeat.
                Each call then gets its own step.
        """
        self._reward = reward
        self._rows = list(rows)
        self._at_once = min(at_once, MOST_AT_ONCE)
        self._malformed = malformed
        self._tries = tries
        self._num_calls = 0
        self._passed: list[OutsideRewardError] = []
        """Errors of calls that were answered when they were made again."""
        self._steps: Iterator[int] = itertools.count() if is_keyed else itertools.repeat(0)
        self.first: Judgement | None = None
        """Judgement of the first call with all rows."""
        self.seconds = 0.0
        """Seconds of that call."""

    async def run(self) -> AsyncIterator[Finding]:
        """Yields all findings.

        If the first call fails, or the reward is lost later, no further probe is made.
        """
        started = time.monotonic()
        self.first = await self._judged(self._rows)
        self.seconds = time.monotonic() - started
        finding = self._answered(self.first)
        yield finding
        if finding.level is Level.FAIL:
            return
        repeated = await self._judged(self._rows)
        finding = self._same(repeated)
        is_steady = finding.level is Level.OK
        for probe in (None, *self._probes(is_steady)):
            if probe is not None:
                finding = await probe()
            lost = await self._lost(finding)
            yield lost or finding
            if lost:
                return
        if self._passed:
            yield self._passing()

    def _probes(self, is_steady: bool) -> Iterator[Callable[[], Awaitable[Finding]]]:
        """The probes after the first two calls, in order."""
        row = self._rows[0]
        yield lambda: self._ordered(is_steady)
        yield lambda: self._alone(is_steady)
        yield lambda: self._bears("empty", "an empty completion", [samples.like(row, "")])
        yield lambda: self._bears("unicode", "letters of many kinds", samples.odd_rows(row))
        yield self._long
        yield lambda: self._many(is_steady)
        malformed = self._malformed
        if malformed is not None:
            yield lambda: self._malformed_input(malformed)
        yield lambda: self._bears("after", "the first rows once more, after all this", self._rows)

    async def _lost(self, finding: Finding) -> Finding | None:
        """A finding in place of one that failed, if the reward does not answer any more."""
        if finding.level in (Level.OK, Level.SKIP):
            return None
        judgement = await self._judged(self._rows)
        errors = list(judgement.failures.values())
        if not errors or not all(error.may_pass for error in errors):
            return None
        return _fail(
            "lost",
            f"does not answer any more since the probe {finding.probe!r}: {errors[0]}",
            "look into its log for what it does not bear, start it again, and check it again",
        )

    def _passing(self) -> Finding:
        return Finding(
            probe="tries",
            level=Level.WARN,
            text=f"{len(self._passed)} of {self._num_calls} requests failed and were answered when "
            f"they were sent again: {self._passed[0]}",
            remedy="a run sends a request again until deadline_s has passed, but waits; fix it if "
            "you can",
        )

    def _answered(self, judgement: Judgement) -> Finding:
        if judgement.failures:
            error = judgement.failures[min(judgement.failures)]
            return _fail("answer", str(error))
        found = [reward for reward in judgement.rewards if reward is not None]
        count = len(self._rows)
        if not found:
            return _fail(
                "answer",
                f"none of {count} rows got a reward, only None",
                "a run needs a reward for each row: try rows to which it applies (--jsonl)",
            )
        text = (
            f"{count} row{'s' * (count > 1)} in {1000 * self.seconds:.0f} ms, "
            f"{min(found):g} to {max(found):g}"
        )
        if len(found) < count:
            text += f"; to {count - len(found)} rows it does not apply"
        return Finding(probe="answer", level=Level.OK, text=text)

    def _same(self, repeated: Judgement) -> Finding:
        problem = _difference(self._expected(range(len(self._rows))), repeated)
        if repeated.failures or problem is None:
            return _of_failure("repeat", repeated) or _ok("repeat", "the same rows get the same")
        return Finding(
            probe="repeat",
            level=Level.WARN,
            text=f"the same rows got other rewards: {problem}",
            remedy="right for a reward that samples; leave cache_rows at 0",
        )

    async def _ordered(self, is_steady: bool) -> Finding:
        rewards = self._expected(range(len(self._rows)))
        if not is_steady or all(_close(rewards[0], reward) for reward in rewards):
            why = "all rows got the same reward" if is_steady else "rewards change by themselves"
            return Finding(
                probe="order",
                level=Level.SKIP,
                text=f"{why}, so that their order cannot be told",
                remedy="give rows that earn different rewards: --jsonl" if is_steady else "",
            )
        # In reverse and rotated by one: one of them shows a service that sorts or loses the order.
        count = len(self._rows)
        for order in (range(count - 1, -1, -1), [*range(1, count), 0]):
            judgement = await self._judged([self._rows[index] for index in order])
            if judgement.failures:
                return _of_failure("order", judgement) or _ok("order", "")
            problem = _difference(self._expected(order), judgement)
            if problem is not None:
                return _fail(
                    "order",
                    f"rewards do not follow their rows when these come in another order: {problem}",
                    "give one reward a row, in the order of the request",
                )
        return _ok("order", "rewards follow their rows in any order")

    async def _alone(self, is_steady: bool) -> Finding:
        for index in range(min(MOST_ALONE, len(self._rows))):
            judgement = await self._judged([self._rows[index]])
            failed = _of_failure("alone", judgement)
            if failed is not None:
                return failed
            problem = _difference(self._expected([index]), judgement)
            if problem is not None and is_steady:
                return Finding(
                    probe="alone",
                    level=Level.WARN,
                    text=f"a row alone got another reward than among others: {problem}",
                    remedy="right for a reward that compares; batch_size must then hold a whole "
                    "group, and cache_rows stay 0",
                )
        return _ok("alone", "a row alone gets what it gets among others")

    async def _bears(self, probe: str, what: str, rows: Sequence[RewardRow]) -> Finding:
        judgement = await self._judged(rows)
        failed = _of_failure(probe, judgement)
        if failed is None:
            return _ok(probe, f"takes {what}")
        return _fail(probe, f"fails with {what}: {failed.text}", "a policy writes such things")

    async def _long(self) -> Finding:
        judgement = await self._judged([samples.long_row(self._rows[0])])
        failed = _of_failure("long", judgement)
        if failed is None:
            return _ok("long", f"takes a completion of {samples.LONG_CHARACTERS} characters")
        return Finding(
            probe="long",
            level=Level.WARN,
            text=f"fails with {samples.LONG_CHARACTERS} characters: {failed.text}",
            remedy="keep completions shorter (rollout), or say in on_failure what becomes of such",
        )

    async def _many(self, is_steady: bool) -> Finding:
        if self._at_once < 2:
            return Finding(
                probe="concurrency", level=Level.SKIP, text="the source asks one after another"
            )
        # One that fails by itself now and then is asked again; one that fails only here is not.
        tries = self._tries if self._passed else 1
        judgements = await asyncio.gather(
            *(self._judged(self._rows, tries=tries) for _ in range(self._at_once))
        )
        failed = [judgement for judgement in judgements if judgement.failures]
        if failed:
            error = failed[0].failures[min(failed[0].failures)]
            return _fail(
                "concurrency",
                f"{len(failed)} of {self._at_once} requests at once failed: {error}",
                "let it serve more at once, or set concurrency to 1",
            )
        expected = self._expected(range(len(self._rows)))
        problems = [_difference(expected, judgement) for judgement in judgements]
        problem = next((problem for problem in problems if problem is not None), None)
        if problem is not None and is_steady:
            return _fail(
                "concurrency",
                f"among {self._at_once} requests at once a row got another reward: {problem}",
                "answers of requests must not mix; set concurrency to 1 until that is fixed",
            )
        return _ok("concurrency", f"bears {self._at_once} requests at once")

    async def _malformed_input(self, send: Malformed) -> Finding:
        advice = "answer such with a status that says so (400, INVALID_ARGUMENT): others are "
        advice += "tried again, or taken for rewards"
        for left in reversed(range(self._tries if self._passed else 1)):
            try:
                came = await send()
                break
            except RewardRefusedError as error:
                return _ok("malformed", f"refuses what is no request: {error.found}")
            except OutsideRewardError as error:
                if left and error.may_pass:
                    continue
                text = f"does not refuse what is no request, but answers {error.found}"
                return Finding(probe="malformed", level=Level.WARN, text=text, remedy=advice)
        text = f"takes what is no request, and answers {came!r:.100}"
        return Finding(probe="malformed", level=Level.WARN, text=text, remedy=advice)

    async def _judged(self, rows: Sequence[RewardRow], *, tries: int | None = None) -> Judgement:
        """Judges rows, again while what fails may pass, as a run does."""
        failed: list[OutsideRewardError] = []
        for number in range(self._tries if tries is None else tries):
            if number:
                await asyncio.sleep(PAUSE_S)
            judgement = await self._judged_once(rows)
            errors = list(judgement.failures.values())
            if not errors:
                self._passed += failed
                return judgement
            failed.append(errors[0])
            # A slow one is not asked again: that would take `tries` times as long.
            if any(not e.may_pass or isinstance(e, RewardTimeoutError) for e in errors):
                break
        return judgement

    async def _judged_once(self, rows: Sequence[RewardRow]) -> Judgement:
        self._num_calls += 1
        current_step.set(next(self._steps))
        try:
            return await self._reward.judge(rows)
        except OutsideRewardError as error:
            return Judgement(
                rewards=[None] * len(rows), failures=dict.fromkeys(range(len(rows)), error)
            )

    def _expected(self, order: Sequence[int]) -> list[float | None]:
        assert self.first is not None
        return [self.first.rewards[index] for index in order]


def _close(left: float | None, right: float | None) -> bool:
    if left is None or right is None:
        return left is right
    return abs(left - right) <= TOLERANCE * max(1.0, abs(left))


def _difference(expected: Sequence[float | None], judgement: Judgement) -> str | None:
    """Describes the first row whose reward is not the expected one; None if there is none."""
    for row, (before, now) in enumerate(zip(expected, judgement.rewards, strict=True)):
        if not _close(before, now):
            return f"row {row} got {_shown(now)}, where {_shown(before)} was expected"
    return None


def _shown(reward: float | None) -> str:
    return "None" if reward is None else f"{reward:g}"


def _of_failure(probe: str, judgement: Judgement) -> Finding | None:
    if not judgement.failures:
        return None
    return _fail(probe, str(judgement.failures[min(judgement.failures)]))


def _ok(probe: str, text: str) -> Finding:
    return Finding(probe=probe, level=Level.OK, text=text)


def _fail(probe: str, text: str, remedy: str = "") -> Finding:
    return Finding(probe=probe, level=Level.FAIL, text=text, remedy=remedy)
