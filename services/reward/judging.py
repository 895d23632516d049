"""Makes one reward for each row from all sources, ours and those from outside.

Shape letters: B rows.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rolemesh.engine.algorithms.judged import whole_groups
from rolemesh.engine.experience import Experience
from rolemesh.engine.rewards.sources import RewardInvalidError, RewardSource, checked
from rolemesh.engine.specs import DropGroupSpec, FailurePolicySpec, GiveValueSpec
from rolemesh.engine.specs.columns import IMAGES, TRAJECTORY_COLUMNS
from rolemesh.rpc.loop_thread import LoopThread
from rolemesh.rpc.together import together
from rolemesh.services.reward.outside.base import (
    Judgement,
    OutsideReward,
    OutsideRewardError,
    RewardRow,
)
from rolemesh.services.reward.outside_rows import RowReader
from rolemesh.services.runtime.calls.call import Call

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""How often a call that waits for an outside reward checks whether its caller still waits."""

OPEN_S = 330.0
"""Longest wait for outside rewards to open. A user's function, which has its own limit, may load a
model when it is imported."""

CLOSE_S = 10.0
"""Longest wait for connections and processes of an outside reward to end."""

ASK = "ask"
"""Name of the phase in which a call waits for outside rewards, and computes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSource:
    """A source that judges in this process."""

    name: str
    weight: float
    reward: RewardSource


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideSource:
    """A source that is asked outside of this process."""

    name: str
    weight: float
    reward: OutsideReward
    reader: RowReader
    on_failure: FailurePolicySpec


Source = OwnSource | OutsideSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Rewards of a batch."""

    rewards_B: torch.Tensor
    """float32; NaN for a row that is not judged."""
    is_judged_B: torch.Tensor
    """bool; False for all rows of a prompt of which one could not be judged."""
    by_source: dict[str, torch.Tensor] = field(default_factory=dict)
    """float32 [B] of each, before its weight; NaN where it does not apply, or failed."""
    parts: tuple[Mapping[str, float], ...] = ()
    """Numbers beside the reward of each row, by "<source>/<part>"."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the requests, by "<source>/<metric>"."""
    notes: tuple[str, ...] = ()
    """Why rows have no reward of a source, for people."""


class RewardSources:
    """The sources of one reward. Owner: the service's loop.

    Invariant: outside rewards run on their own loop, which `close` ends.

    Example: a source of weight 1 that gives (1, None) and one of weight 0.5 that gives (2, 2) make
    the rewards (2, 1).
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        """Takes the sources: at least one, each with its own name."""
        self._sources = tuple(sources)
        self._loop = LoopThread("outside-rewards", "reward")
        self._own = [source for source in sources if isinstance(source, OwnSource)]
        outside = [source for source in sources if isinstance(source, OutsideSource)]
        self._outside = outside
        self.may_drop = any(isinstance(source.on_failure, DropGroupSpec) for source in outside)
        """Whether rows may be left without a reward."""
        self.asks_outside = bool(outside)
        """Whether one of the sources is outside."""
        self.tells_sources = bool(outside) or len(sources) > 1
        """Whether there are metrics for each source."""
        own = [column for source in self._own for column in source.reward.columns]
        self.columns: tuple[str, ...] = tuple(
            dict.fromkeys((*own, *(TRAJECTORY_COLUMNS if outside else ())))
        )
        """Columns that each experience must have."""
        self._reads_images = any(source.reward.reads_images for source in self._own)
        is_alone = len(sources) == len(self._own) == 1 and sources[0].weight == 1.0
        self.full_score = self._own[0].reward.full_score if is_alone else None
        """Reward of a trajectory that is right in full; None when there is no such thing."""

    def columns_of(self, held: Container[str]) -> tuple[str, ...]:
        """Columns to read of an experience that holds these: images only if a source takes them.

        Images are large. Whether an outside source takes them is known once all are open.
        """
        wants = self._reads_images or any(source.reward.takes_images for source in self._outside)
        return (*self.columns, IMAGES) if wants and IMAGES in held else self.columns

    def open(self) -> None:
        """Prepares outside rewards, so that a lasting fault shows now. Not for use on the loop.

        Raises:
            OutsideRewardError: One of them cannot work; all are closed again.
        """
        try:
            for source in self._outside:
                self._loop.run(source.reward.open(), OPEN_S)
        except BaseException:
            self.close()
            raise

    async def judge(self, batch: Experience, call: Call, prompt_ids: torch.Tensor | None) -> Judged:
        """Asks all sources: outside ones at the same time, ours one after another.

        Args:
            batch: The rows, with `columns_of` their experience.
            call: The call for which it works.
            prompt_ids: int64 [B], equal for the rows of a group; None: each row is its own group,
                and none may be dropped.

        Raises:
            OutsideRewardError: A source failed whose failures end the step; the first such error.
            RewardInvalidError: A reward of ours is wrong, or no source applies to a row.
        """
        num_rows = len(batch)
        values: dict[str, torch.Tensor] = {}

        async def ask(source: OutsideSource) -> Judgement:
            rows = await call.compute(source.reader.read, batch)
            return await self._loop.run_async(_judgement(source.reward, rows))

        async def score() -> None:
            for source in self._own:
                scores = await call.compute(source.reward.score, batch, call.progress)
                values[source.name] = checked(scores, num_rows)
            with call.phase(ASK):
                await self._all_done(tasks, call)

        tasks = {source.name: asyncio.ensure_future(ask(source)) for source in self._outside}
        await together([*tasks.values(), score()])
        metrics: dict[str, float] = {}
        notes: list[str] = []
        parts: list[dict[str, float]] = [{} for _ in range(num_rows)]
        failed_B = torch.zeros(num_rows, dtype=torch.bool)
        for source in self._outside:
            judgement = tasks[source.name].result()
            values[source.name], dropped_B = _after_failures(source, judgement, prompt_ids)
            if judgement.failures:
                notes.append(_note(source, judgement))
                logger.warning("%s", notes[-1])
            failed_B |= dropped_B
            for row, of_row in enumerate(judgement.parts):
                parts[row] |= {f"{source.name}/{part}": value for part, value in of_row.items()}
            metrics |= {f"{source.name}/{name}": value for name, value in judgement.metrics.items()}
            metrics[f"{source.name}/failed_rows"] = float(len(judgement.failures))
            dropped = _whole_groups(dropped_B, prompt_ids)
            metrics[f"{source.name}/dropped_rows"] = float(dropped.sum())
        is_judged_B = ~_whole_groups(failed_B, prompt_ids)
        rewards_B = self._total(values, is_judged_B)
        return Judged(
            rewards_B=rewards_B,
            is_judged_B=is_judged_B,
            by_source=values,
            parts=tuple(parts),
            metrics=metrics,
            notes=tuple(notes),
        )

    async def _all_done(self, tasks: dict[str, asyncio.Task[Judgement]], call: Call) -> None:
        """Waits for outside rewards; raises when the call is no longer wanted."""
        waiting = set(tasks.values())
        while waiting:
            stage = self._troubles() or f"ask {', '.join(tasks)}"
            call.progress(stage, len(tasks) - len(waiting), len(tasks))
            done, waiting = await asyncio.wait(
                waiting, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()

    def _troubles(self) -> str:
        """What keeps sources from an answer, for people; empty where nothing does."""
        troubles = [(source.name, source.reward.trouble()) for source in self._outside]
        return "; ".join(f"reward {name} {trouble}" for name, trouble in troubles if trouble)

    async def take_part(self, batch: Experience, call: Call) -> None:
        """Does the work of a rank whose output does not count: its share of our own models."""
        for source in self._own:
            await call.compute(source.reward.score, batch, call.progress)

    def close(self) -> None:
        """Ends all requests, connections and processes. Not on the loop."""
        for source in self._outside if self._loop.is_running else ():
            try:
                self._loop.run(source.reward.close(), CLOSE_S)
            except TimeoutError:
                logger.warning("outside reward %s did not close in time", source.name)
        self._loop.close(CLOSE_S)

    def _total(self, values: dict[str, torch.Tensor], is_judged_B: torch.Tensor) -> torch.Tensor:
        """float32 [B], the weighted sum of the sources that apply; NaN for a row not judged."""
        total_B = torch.zeros(len(is_judged_B), dtype=torch.float64)
        applies_B = torch.zeros(len(is_judged_B), dtype=torch.bool)
        for source in self._sources:
            values_B = values[source.name].double()
            total_B += source.weight * values_B.nan_to_num(0.0)
            applies_B |= ~values_B.isnan()
        nothing = (is_judged_B & ~applies_B).nonzero().flatten()
        if len(nothing):
            raise RewardInvalidError(
                f"no reward applies to row {int(nothing[0])} ({len(nothing)} such rows): every "
                f"source of {[source.name for source in self._sources]} gave None; add one that "
                "judges every row"
            )
        # In float32, as it is sent: a number that does not fit is refused.
        checked(total_B[is_judged_B].float(), int(is_judged_B.sum()))
        return total_B.masked_fill(~is_judged_B, math.nan).float()


async def _judgement(reward: OutsideReward, rows: Sequence[RewardRow]) -> Judgement:
    """Its judgement of the rows. A failure of the whole request counts as one of each row."""
    if not rows:
        return Judgement(rewards=[])
    try:
        return await reward.judge(rows)
    except OutsideRewardError as error:
        return Judgement(
            rewards=[None] * len(rows), failures=dict.fromkeys(range(len(rows)), error)
        )


def _after_failures(
    source: OutsideSource, judgement: Judgement, prompt_ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards of a source after its failure policy, float32 [B], and the rows to drop, bool [B]."""
    failures = judgement.failures
    values_B = torch.tensor(
        [math.nan if reward is None else reward for reward in judgement.rewards],
        dtype=torch.float32,
    )
    dropped_B = torch.zeros(len(values_B), dtype=torch.bool)
    if not failures:
        return values_B, dropped_B
    policy = source.on_failure
    if isinstance(policy, GiveValueSpec):
        values_B[list(failures)] = policy.value
    elif isinstance(policy, DropGroupSpec) and prompt_ids is not None:
        dropped_B[list(failures)] = True
    else:
        raise failures[min(failures)]
    return values_B, dropped_B


def _note(source: OutsideSource, judgement: Judgement) -> str:
    """Why rows have no reward of a source, with what its policy makes of them."""
    failures = judgement.failures
    return (
        f"reward {source.name}: {len(failures)} of {len(judgement.rewards)} rows could not be "
        f"judged ({source.on_failure.type}): {failures[min(failures)]}"
    )


def _whole_groups(failed_B: torch.Tensor, prompt_ids: torch.Tensor | None) -> torch.Tensor:
    """The rows whose prompt has a row that failed, bool [B]; without prompts, those alone."""
    return failed_B if prompt_ids is None else whole_groups(failed_B, prompt_ids)
