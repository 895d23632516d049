"""Handling of requests that every reward over the network shares.

It has batches, bounded concurrency, tries, hedging, replicas with a breaker each, and a cache. The
protocols are `RewardClient`s, which do none of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import tenacity

from rolemesh.engine.granted.circuit_breaker import CircuitBreaker
from rolemesh.engine.specs import EndpointRewardSpec, FailSpec
from rolemesh.rpc.together import together
from rolemesh.services.reward.outside.answers import kept
from rolemesh.services.reward.outside.base import (
    Judgement,
    OutsideReward,
    OutsideRewardError,
    RewardClient,
    RewardRow,
    RewardTimeoutError,
    RewardUnavailableError,
)
from rolemesh.services.reward.outside.breaker import Replica
from rolemesh.services.reward.outside.cache import RewardCache
from rolemesh.services.reward.outside.counts import RequestCounts, RequestObserver

MAX_REQUEST_BYTES = 3 * 2**20
"""Most bytes of the rows of one request: gRPC servers refuse 4 MiB, web servers often less."""

BACKOFF_S = 0.5
"""Upper end of the first random wait; it doubles with every further one (full jitter, see
https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/)."""

LONGEST_BACKOFF_S = 5.0
"""Upper end of the longest one: a reward that is back is asked again soon."""

LISTENING_S = 10.0
"""Longest wait at the start of a run for a reward to listen: it may start beside the run."""

_jitter = tenacity.wait_random_exponential(multiplier=BACKOFF_S, max=LONGEST_BACKOFF_S)


@dataclass(frozen=True, slots=True)
class _Unanswered:
    """A request that has failed and is tried again."""

    since: float
    """When it was sent first."""
    number: int
    """Of the try that comes next, or is on its way."""
    error: OutsideRewardError
    """What the last one came to."""


class EndpointReward(OutsideReward):
    """Asks replicas of one reward. Owner: the loop on which it is first used.

    Invariant: when `judge` has returned, raised or been cancelled, none of its requests runs.

    Example: 40 rows with batch_size 16 are three requests. The first to fail with 503 is sent
    again, to the least busy replica; one that is answered by NaN is not, and its rows fail.
    """

    def __init__(
        self,
        name: str,
        spec: EndpointRewardSpec,
        clients: Sequence[RewardClient],
        *,
        observer: RequestObserver | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares; sends nothing yet.

        Args:
            name: Name of the reward, for metrics.
            spec: Settings of the requests.
            clients: One client for each replica.
            observer: Observer of each request.
            sleep: Coroutine that waits between tries.
            clock: Returns seconds, for the breakers and for deadlines of requests.
        """
        self._name = name
        self._spec = spec
        self._observer = observer
        self._sleep = sleep
        self._clock = clock
        self._unanswered: dict[object, _Unanswered] = {}
        """Requests that have failed and are tried again."""
        self._replicas = [
            Replica(client, CircuitBreaker(spec.breaker_failures, spec.breaker_pause_s, clock))
            for client in clients
        ]
        self._cache = RewardCache(spec.cache_rows)
        self._places = asyncio.Semaphore(spec.concurrency)

    @property
    def takes_images(self) -> bool:
        """See `OutsideReward.takes_images`."""
        return self._replicas[0].client.takes_images

    async def open(self) -> None:
        """Waits a little for a replica to listen, if a failure would end the first step anyway.

        Raises:
            RewardUnavailableError: No replica takes a connection.
        """
        if not isinstance(self._spec.on_failure, FailSpec):
            return
        refused: dict[str, str] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LISTENING_S):
                while True:
                    for url in self._spec.urls:
                        try:
                            await _connect(url)
                        except OSError as error:
                            refused[url] = str(error) or type(error).__name__
                        else:
                            return
                    await self._sleep(BACKOFF_S)
        found = "; ".join(f"{url}: {why}" for url, why in refused.items()) or "silence"
        raise RewardUnavailableError(
            self._name, found=found, expected="a server that listens at its URL"
        )

    async def judge(self, rows: Sequence[RewardRow]) -> Judgement:
        """Judges rows; see `OutsideReward.judge`."""
        counts = RequestCounts()
        rewards: list[float | None] = [None] * len(rows)
        parts: list[Mapping[str, float]] = [{}] * len(rows)
        failures: dict[int, OutsideRewardError] = {}
        means: dict[str, list[tuple[float, int]]] = {}
        sent = [self._replicas[0].client.sent(row) for row in rows]
        keys = [RewardCache.key(content) for content in sent] if self._cache.is_on else []
        asked = self._unknown(rows, keys, rewards, parts, counts)

        async def one(batch: Sequence[int]) -> None:
            request = functools.partial(self._with_tries, [rows[i] for i in batch], counts)
            # Before it waits for its place: requests are known by their order.
            ask = kept(self._name, [sent[i] for i in batch], self._spec.on_failure, request)
            async with counts.place(self._places):
                if failures and isinstance(self._spec.on_failure, FailSpec):
                    # The step has failed already, so further tries would only take time.
                    failures.update(dict.fromkeys(batch, next(iter(failures.values()))))
                    return
                try:
                    found = await ask()
                except OutsideRewardError as error:
                    failures.update(dict.fromkeys(batch, error))
                    return
            for place, index in enumerate(batch):
                if place in found.failures:
                    failures[index] = found.failures[place]
                    continue
                rewards[index], parts[index] = found.rewards[place], found.parts_of(place)
                if keys:
                    self._cache.put(keys[index], rewards[index], parts[index])
            for metric, value in found.metrics.items():
                means.setdefault(metric, []).append((value, len(batch)))

        sizes = [len(content) for content in sent]
        await together(one(batch) for batch in _batches(asked, sizes, self._spec.batch_size))
        if keys:
            _copy_to_equal_rows(keys, rewards, parts, failures)
        return Judgement(
            rewards=rewards,
            failures=failures,
            parts=parts if any(parts) else [],
            metrics={
                **{metric: _mean(parts) for metric, parts in means.items()},
                **counts.metrics(),
            },
        )

    def trouble(self) -> str:
        """See `OutsideReward.trouble`."""
        unanswered = list(self._unanswered.values())
        if not unanswered:
            return ""
        worst = min(unanswered, key=lambda one: one.since)
        seconds = self._clock() - worst.since
        return (
            f"does not answer, try {worst.number}, for {seconds:.0f} s of at most "
            f"{self._spec.deadline_s:.0f} s ({worst.error.found})"
        )

    async def close(self) -> None:
        """Closes every replica's connections."""
        for replica in self._replicas:
            await replica.client.close()

    def _unknown(
        self,
        rows: Sequence[RewardRow],
        keys: Sequence[bytes],
        rewards: list[float | None],
        parts: list[Mapping[str, float]],
        counts: RequestCounts,
    ) -> list[int]:
        """Rows to send: one of each set of equal rows. Fills in what the cache has."""
        if not keys:
            return list(range(len(rows)))
        asked, seen = [], set()
        for index, key in enumerate(keys):
            if self._cache.has(key):
                rewards[index], parts[index] = self._cache.get(key)
                counts.cache_hits += 1
            elif key not in seen:
                asked.append(index)
                seen.add(key)
        return asked

    async def _with_tries(self, rows: Sequence[RewardRow], counts: RequestCounts) -> Judgement:
        """Sends one request until it is answered or must not be sent again."""
        since = self._clock()
        ends_at, most = since + self._spec.deadline_s, self._spec.tries

        def is_last(state: tenacity.RetryCallState) -> bool:
            is_over = self._clock() + state.upcoming_sleep >= ends_at
            return is_over or (most is not None and state.attempt_number >= most)

        tries = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(_may_pass),
            stop=is_last,
            wait=_wait,
            sleep=self._sleep,
            reraise=True,
        )
        failed: Replica | None = None
        request = object()
        try:
            async for attempt in tries:
                with attempt:
                    await self._trials(ends_at - self._clock())
                    # A replica that fails at once is the least busy one. The next try goes to
                    # another.
                    replica = self._least_busy(but=failed)
                    number = attempt.retry_state.attempt_number
                    if number > 1:
                        counts.retries += 1
                    left_s = ends_at - self._clock()
                    try:
                        judgement = await self._hedged(replica, rows, left_s, counts)
                    except OutsideRewardError as error:
                        failed = replica
                        self._unanswered[request] = _Unanswered(since, number + 1, error)
                        raise
        finally:
            self._unanswered.pop(request, None)
        return judgement

    async def _hedged(
        self, first: Replica, rows: Sequence[RewardRow], left_s: float, counts: RequestCounts
    ) -> Judgement:
        """Returns the first answer; if it takes long, a second equal request is sent, too."""
        pending = {first.begin(self._ask(first, rows, left_s, counts))}
        try:
            done, _ = await asyncio.wait(pending, timeout=self._spec.hedge_after_s)
            if not done:
                with contextlib.suppress(RewardUnavailableError):  # no second replica
                    other = self._least_busy(but=first)
                    pending.add(other.begin(self._ask(other, rows, left_s, counts)))
                    counts.hedged += 1
            while True:
                done, left = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                answered = [task for task in done if task.exception() is None]
                if answered or not left:
                    return (answered or list(done))[0].result()
                pending = left
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _ask(
        self, replica: Replica, rows: Sequence[RewardRow], left_s: float, counts: RequestCounts
    ) -> Judgement:
        """Sends it once, to one replica."""
        timeout_s = max(0.0, min(self._spec.timeout_s, left_s))
        try:
            with counts.request(self._name, self._observer):
                try:
                    async with asyncio.timeout(timeout_s):
                        judgement = await replica.client.ask(rows)
                except TimeoutError:
                    raise RewardTimeoutError(
                        replica.client.endpoint,
                        expected=f"an answer within {timeout_s:.3g} s",
                        found="none",
                        remedy="give timeout_s more, batch_size less, or make the reward faster",
                    ) from None
        except OutsideRewardError as error:
            replica.last_error = error
            # An answer, even a wrong one, is a sign of life.
            (replica.breaker.failed if error.may_pass else replica.breaker.succeeded)()
            raise
        replica.breaker.succeeded()
        return judgement

    async def _trials(self, left_s: float) -> None:
        """If no replica may be asked, waits for the request that tries one again.

        That may take longer than breaker_pause_s. The wait does not use up tries.
        """
        if all(replica.breaker.wait_s > 0 for replica in self._replicas):
            trials = [replica.trial for replica in self._replicas if replica.trial is not None]
            if trials:
                await asyncio.wait(
                    trials, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED
                )

    def _least_busy(self, but: Replica | None) -> Replica:
        """Chooses the replica to ask, if possible another one than `but`.

        Raises:
            RewardUnavailableError: The breakers of all replicas are open.
        """
        ready = [replica for replica in self._replicas if replica.breaker.wait_s == 0]
        ready = [replica for replica in ready if replica is not but] or ready
        if ready:
            # A replica that is due for a trial must get a request at some time, even if it is busy.
            return min(ready, key=lambda replica: (not replica.breaker.is_open, replica.in_flight))
        soonest = min(self._replicas, key=lambda replica: replica.breaker.wait_s)
        raise RewardUnavailableError(
            soonest.client.endpoint,
            found=f"{self._spec.breaker_failures} failures in a row, so that it is not asked for "
            f"breaker_pause_s; the last: {soonest.last_error}",
            retry_after_s=soonest.breaker.wait_s,
        )


def _mean(parts: Sequence[tuple[float, int]]) -> float:
    """Mean over all rows, from pairs of a mean and its number of rows."""
    return sum(mean * rows for mean, rows in parts) / sum(rows for _, rows in parts)


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, OutsideRewardError) and error.may_pass


def _wait(state: tenacity.RetryCallState) -> float:
    """A random wait, or longer where the endpoint asks for it."""
    error = state.outcome.exception() if state.outcome is not None else None
    asked_s = error.retry_after_s if isinstance(error, RewardUnavailableError) else None
    return max(_jitter(state), asked_s or 0.0)


def _batches(rows: Sequence[int], num_bytes: Sequence[int], batch_size: int) -> list[list[int]]:
    """Cuts rows into batches of neighbours; a row that is too large goes alone."""
    batches: list[list[int]] = []
    held = 0
    for row in rows:
        if (
            not batches
            or len(batches[-1]) == batch_size
            or held + num_bytes[row] > MAX_REQUEST_BYTES
        ):
            batches.append([])
            held = 0
        batches[-1].append(row)
        held += num_bytes[row]
    return batches


def _copy_to_equal_rows(
    keys: Sequence[bytes],
    rewards: list[float | None],
    parts: list[Mapping[str, float]],
    failures: dict[int, OutsideRewardError],
) -> None:
    """Gives each repeated row the reward of the equal row before it."""
    first: dict[bytes, int] = {}
    for index, key in enumerate(keys):
        source = first.setdefault(key, index)
        if source != index:
            rewards[index], parts[index] = rewards[source], parts[source]
            if source in failures:
                failures[index] = failures[source]


async def _connect(url: str) -> None:
    """Opens a connection and closes it.

    Raises:
        OSError: No server listens there.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    _, writer = await asyncio.open_connection(parts.hostname, port)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
