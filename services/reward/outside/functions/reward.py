"""The reward of a Python function: its batches, and the processes that judge them."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rolemesh.engine.data.answers import answer_as_given
from rolemesh.engine.sandbox.host import Sandbox
from rolemesh.engine.specs import FailSpec, PythonRewardSpec
from rolemesh.services.reward.outside.answers import kept
from rolemesh.services.reward.outside.base import (
    Judgement,
    OutsideReward,
    OutsideRewardError,
    RewardRow,
    checked_metrics,
    checked_rewards,
    current_step,
)
from rolemesh.services.reward.outside.counts import RequestCounts, RequestObserver
from rolemesh.services.reward.outside.functions.process import FunctionProcess

logger = logging.getLogger(__name__)


class FunctionReward(OutsideReward):
    """Calls a user's function in at most `concurrency` processes.

    Owner: one event loop. Invariant: a process is in `_idle` or makes one call. The next call
    replaces a process that was ended. A call is never repeated: the same rows would fail again.

    Example: 40 rows with batch_size 16 and concurrency 1 are three calls, one after another. When
    the second hangs its rows fail after timeout_s, and a new process makes the third.
    """

    def __init__(
        self,
        name: str,
        spec: PythonRewardSpec,
        sandbox: Sandbox,
        *,
        observer: RequestObserver | None = None,
    ) -> None:
        """Prepares; starts no process yet.

        Args:
            name: Name of the reward, for metrics.
            spec: The function, and its limits.
            sandbox: Where it runs.
            observer: Observer of each call.
        """
        self._name = name
        self._spec = spec
        self._sandbox = sandbox
        self._observer = observer
        self._places = asyncio.Semaphore(spec.concurrency)
        self._idle: list[FunctionProcess] = []
        self._all: set[FunctionProcess] = set()
        self._takes_images: bool | None = None
        """None before the first process has said so."""

    async def open(self) -> None:
        """Starts a process, so that a function which cannot be imported shows at once."""
        if not self._all:
            self._idle.append(await self._start())

    @property
    def takes_images(self) -> bool:
        """See `OutsideReward.takes_images`: whether the function has such a parameter."""
        return bool(self._takes_images)

    async def judge(self, rows: Sequence[RewardRow]) -> Judgement:
        """Judges rows; see `OutsideReward.judge`."""
        if self._takes_images is None and any(row.images is not None for row in rows):
            # What is sent of rows is known before a process is there to take them.
            await self.open()
        counts = RequestCounts()
        rewards: list[float | None] = []
        parts: list[Mapping[str, float]] = []
        failures: dict[int, OutsideRewardError] = {}
        sums: dict[str, float] = {}
        size = self._spec.batch_size
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        failed: list[OutsideRewardError] = []
        found = await asyncio.gather(
            *(self._judge_batch(batch, counts, failed) for batch in batches)
        )
        for batch, judgement in zip(batches, found, strict=True):
            if isinstance(judgement, OutsideRewardError):
                failures.update(
                    dict.fromkeys(range(len(rewards), len(rewards) + len(batch)), judgement)
                )
                rewards += [None] * len(batch)
                parts += [{}] * len(batch)
                continue
            rewards += judgement.rewards
            parts += [judgement.parts_of(row) for row in range(len(batch))]
            for metric, value in judgement.metrics.items():
                sums[metric] = sums.get(metric, 0.0) + value * len(batch) / len(rows)
        return Judgement(
            rewards=rewards,
            failures=failures,
            metrics={**sums, **counts.metrics()},
            parts=parts if any(parts) else [],
        )

    async def close(self) -> None:
        """Ends all processes, and with them the calls in flight."""
        self._idle.clear()
        while self._all:
            await self._all.pop().end()

    async def _judge_batch(
        self, rows: Sequence[RewardRow], counts: RequestCounts, failed: list[OutsideRewardError]
    ) -> Judgement | OutsideRewardError:
        plain = [_plain(row, with_images=self.takes_images) for row in rows]
        sent = [json.dumps(row).encode() for row in plain]
        # Before it waits for its place: calls are known by their order.
        ask = kept(self._name, sent, self._spec.on_failure, functools.partial(self._call, plain))
        async with counts.place(self._places):
            if failed and isinstance(self._spec.on_failure, FailSpec):
                # The step has failed already, so further calls would change nothing.
                return failed[0]
            try:
                with counts.request(self._name, self._observer):
                    return await ask()
            except OutsideRewardError as error:
                failed.append(error)
                return error

    async def _call(self, rows: list[dict[str, Any]]) -> Judgement:
        process = await self._ready()
        try:
            found = await process.call(rows, current_step.get())
        finally:
            if process.is_open:
                self._idle.append(process)
            else:
                self._all.discard(process)
        endpoint = f"python:{self._spec.function}"
        rewards = checked_rewards(
            found.rewards,
            len(rows),
            endpoint,
            minimum=self._spec.minimum,
            maximum=self._spec.maximum,
            takes_none=True,
        )
        metrics = checked_metrics(found.metrics, endpoint)
        return replace(found, rewards=rewards, metrics=metrics)

    async def _ready(self) -> FunctionProcess:
        """An idle process that lives, or a new one."""
        while self._idle:
            process = self._idle.pop()
            if process.is_alive:
                return process
            # The process ended between two calls, so neither call is the cause.
            self._all.discard(process)
            await process.end()
        return await self._start()

    async def _start(self) -> FunctionProcess:
        process = FunctionProcess(self._spec, self._sandbox)
        self._all.add(process)
        try:
            loaded = await process.start()
        except BaseException:
            self._all.discard(process)
            raise
        self._takes_images = loaded.takes_images
        logger.info(
            "%s: process %d, form %s, sandbox %s",
            *(self._spec.function, process.pid, loaded.form, self._sandbox),
        )
        return process


def _plain(row: RewardRow, *, with_images: bool) -> dict[str, Any]:
    images = {"images": row.images} if with_images and row.images is not None else {}
    return {
        "prompt": row.prompt,
        "completion": row.completion,
        "query": row.query,
        "completion_ids": row.completion_tokens,
        "answer": answer_as_given(row.answer, row.metadata),
        "metadata": dict(row.metadata),
        **images,
    }
