"""Tests of which samples are made together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rolemesh.coordinator.sdk.values.experience import Prompt
from rolemesh.coordinator.tinker.forms.forms import SampleCall, SamplingParams
from rolemesh.coordinator.tinker.models import sampling as tinker_sampling
from rolemesh.coordinator.tinker.models.fair_turns import Client, FairTurns
from rolemesh.coordinator.tinker.models.sampling import Sampling
from rolemesh.coordinator.tinker.models.trained import TrainedModel
from rolemesh.rpc.experience.columns import ColumnData, Columns


class Model:
    """A model whose samples are the draw of their prompt."""

    version = 0
    is_open = True

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.generations: list[int] = []
        self._draws = 0
        self.scorings: list[int] = []
        self.actor = SimpleNamespace(
            sample=self._sample, put=self._put, compute_logprobs=self._compute_logprobs
        )
        self.mesh = SimpleNamespace(
            step=0, begin_step=lambda step: None, fetch=self._fetch, release=self._release
        )

    def next_draw(self) -> int:
        self._draws += 1
        return self._draws

    async def making(self, work: Callable[[], Awaitable[Any]]) -> Any:
        return await work()

    async def _sample(self, prompts: Sequence[Prompt], **_: Any) -> Columns:
        self.generations.append(len(prompts))
        draws = [[(prompt.prompt_id or 0) % 1000] for prompt in prompts]
        rows = [[*prompt.tokens, *draw] for prompt, draw in zip(prompts, draws, strict=True)]
        return Columns(
            {
                "tokens": ColumnData.sequence([np.array(row) for row in rows]),
                "prompt_lengths": ColumnData.row([len(row) - 1 for row in rows], np.int64),
                "logprobs": ColumnData.completion([np.zeros(1) for _ in rows]),
                "finished": ColumnData.row([True] * len(rows), np.bool_),
            }
        )

    async def _put(self, columns: Columns) -> Columns:
        return columns

    async def _compute_logprobs(self, rows: Columns, name: str, *, top_k: int) -> Columns:
        """Minus each token; the likeliest are 1, 2, ... with that log-prob."""
        prompts = rows["tokens"].rows()
        self.scorings.append(len(prompts))
        scores = [-prompt[1:].astype(np.float32) for prompt in prompts]
        made = {"scores": ColumnData.completion(scores)}
        if top_k:
            ids = [np.tile(np.arange(1, top_k + 1), (len(one), 1)) for one in scores]
            made["scores_top_ids"] = ColumnData.completion(ids, np.int32)
            made["scores_top"] = ColumnData.completion([-one.astype(np.float32) for one in ids])
        return Columns(made)

    async def _fetch(self, made: Columns, names: Sequence[str]) -> Columns:
        return made

    async def _release(self, made: Any) -> None:
        pass


async def drawn(model: Model, *asked: tuple[list[int], int]) -> list[list[int]]:
    """What is drawn for prompts and seeds that come one right after the other."""
    sampling = Sampling(cast(TrainedModel, model), 16, FairTurns())
    calls = [
        SampleCall(
            sampling_session_id="s",
            prompt=np.array(prompt),
            num_samples=1,
            params=SamplingParams(max_tokens=1, seed=seed),
        )
        for prompt, seed in asked
    ]
    tasks = []
    for call in calls:
        tasks.append(asyncio.create_task(sampling.sample(call, 0, Client("ann"))))
        # As over HTTP.
        await asyncio.sleep(0.001)
    results = await asyncio.gather(*tasks)
    return [one.sequences[0].tokens.tolist() for one in results]


@pytest.fixture
def long_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause that ends a batch, and that no stall of a busy machine reaches."""
    monkeypatch.setattr(tinker_sampling, "_GATHER_S", 0.5)


@pytest.mark.usefixtures("long_pause")
async def test_prompts_of_one_seed_are_sampled_together() -> None:
    model = Model()
    asked = [([place, 7], 4) for place in range(6)]
    found = await drawn(model, *asked)
    assert model.generations == [6]
    # And each as it is alone.
    assert await asyncio.gather(*(drawn(Model(), one) for one in asked)) == [[one] for one in found]


@pytest.mark.usefixtures("long_pause")
async def test_one_prompt_with_one_seed_gives_the_same_twice() -> None:
    model = Model()
    first, second, other = await drawn(model, ([5, 7], 4), ([5, 7], 4), ([5, 7], 3))
    assert first == second != other
    # Equal draws in one generation would count on.
    assert model.generations == [2, 1]


async def test_prompts_that_come_together_are_scored_together() -> None:
    model = Model()
    sampling = Sampling(cast(TrainedModel, model), 16, FairTurns())

    def call(*prompt: int, **asked: Any) -> SampleCall:
        return SampleCall(
            sampling_session_id="s",
            prompt=np.array(prompt),
            num_samples=1,
            params=SamplingParams(max_tokens=1),
            **asked,
        )

    calls = [
        call(5, 7, 9, prompt_logprobs=True),
        call(4, 3),
        call(8, prompt_logprobs=True),
        call(6, 2, prompt_logprobs=True),
        call(5, 7, 9, topk_prompt_logprobs=2),
        call(5, 7, 9, prompt_logprobs=True, prompt_logprobs_last_n=1),
    ]
    found = await asyncio.gather(*(sampling.sample(one, 0, Client("ann")) for one in calls))
    # One generation; those without and those with likeliest tokens.
    assert model.generations == [6]
    assert sorted(model.scorings) == [1, 3]
    told = [None if one.prompt_logprobs is None else one.prompt_logprobs.tolist() for one in found]
    nan = float("nan")
    np.testing.assert_equal(told, [[nan, -7, -9], None, [nan], [nan, -2], None, [nan, nan, -9]])
    topk = found[4].topk_prompt_logprobs
    assert topk is not None
    assert topk.token_ids.tolist() == [[0, 0], [1, 2], [1, 2]]
    assert topk.logprobs[1:].tolist() == [[-1, -2], [-1, -2]]
    assert [one.topk_prompt_logprobs for one in found[:4]] == [None] * 4
