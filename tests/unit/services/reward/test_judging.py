import asyncio
import base64
import contextlib
import json
import math

import pytest
import torch
from support.fake_calls import FakeCall
from support.fake_rewards import lie

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.images.prompt_images import PromptImage, images_text
from rolemesh.engine.rewards.sources import RewardInvalidError
from rolemesh.engine.specs import DropGroupSpec, FailSpec, GiveValueSpec
from rolemesh.rpc.errors import UnavailableError
from rolemesh.services.reward import judging
from rolemesh.services.reward.judging import OutsideSource, OwnSource, RewardSources
from rolemesh.services.reward.outcome import judged_columns, judgement_metrics
from rolemesh.services.reward.outside.base import Judgement, OutsideReward, RewardAnswerInvalidError
from rolemesh.services.reward.outside_rows import RowReader


class Scripted(OutsideReward):
    """Gives what it is told to."""

    def __init__(self, rewards=(), failures=None, error=None, hangs=False, parts=()):
        self.rewards, self.failures, self.error = list(rewards), failures or {}, error
        self.hangs, self.parts = hangs, parts
        self.rows = []
        self.is_cancelled = self.is_closed = False

    async def judge(self, rows):
        self.rows = list(rows)
        if self.error is not None:
            raise self.error
        if self.hangs:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.is_cancelled = True
                raise
        return Judgement(
            rewards=self.rewards,
            failures=self.failures,
            metrics={"errors": 1.0},
            parts=self.parts,
        )

    async def close(self):
        self.is_closed = True


class Own:
    columns = ("completion_text",)
    reads_images = False
    full_score = 1.0

    def __init__(self, *rewards):
        self.rewards = rewards

    def score(self, batch, progress):
        return torch.tensor(self.rewards)


def batch(num_rows=3):
    texts = [f"c{row}" for row in range(num_rows)]
    ids = [[1, 2, row] for row in range(num_rows)]
    masks = [[True, True]] * num_rows
    return Experience(
        {
            "tokens": Column.ragged(ColumnKind.SEQUENCE, ids, torch.int64),
            "prompt_lengths": Column(ColumnKind.ROW, torch.tensor([1] * num_rows)),
            "prompt_text": Column.text(["p"] * num_rows),
            "completion_text": Column.text(texts),
            "answer": Column.text(["a"] * num_rows),
            "metadata": Column.text(['{"level": 2}'] * num_rows),
            "loss_mask": Column.ragged(ColumnKind.COMPLETION, masks, torch.bool),
        }
    )


def outside(reward, weight=1.0, name="outside", on_failure=None):
    return OutsideSource(
        name=name,
        weight=weight,
        reward=reward,
        reader=RowReader(None),
        on_failure=on_failure or FailSpec(),
    )


@contextlib.contextmanager
def sources_of(*given):
    sources = RewardSources(given)
    try:
        yield sources
    finally:
        sources.close()


async def judged(*given, prompt_ids=None, num_rows=3):
    with sources_of(*given) as sources:
        ids = None if prompt_ids is None else torch.tensor(prompt_ids)
        return await sources.judge(batch(num_rows), FakeCall(), ids)


async def test_rewards_are_the_weighted_sum_of_what_applies():
    found = await judged(
        outside(Scripted([1.0, None, 3.0]), weight=2.0),
        OwnSource(name="own", weight=0.5, reward=Own(1.0, 2.0, 4.0)),
    )
    assert found.rewards_B.tolist() == [2.5, 1.0, 8.0]
    assert found.by_source["outside"].nan_to_num(-1.0).tolist() == [1.0, -1.0, 3.0]
    assert found.metrics["outside/errors"] == 1.0


async def test_rows_are_whole_and_plain():
    source = Scripted([0.0] * 3)
    await judged(outside(source))
    row = source.rows[2]
    assert (row.prompt, row.completion, row.query, row.answer) == ("p", "c2", "pc2", "a")
    assert (row.prompt_tokens, row.completion_tokens) == ((1,), (2, 2))
    assert row.metadata == {"level": 2}


async def test_a_row_to_which_nothing_applies_is_an_error():
    with pytest.raises(RewardInvalidError, match="no reward applies to row 1"):
        await judged(outside(Scripted([1.0, None, 1.0])))


async def test_a_sum_that_does_not_fit_float32_is_an_error():
    with pytest.raises(RewardInvalidError, match="finite"):
        await judged(outside(Scripted([1e300, 0.0, 0.0])))


async def test_a_failure_fails_by_default_with_the_reason():
    with pytest.raises(RewardAnswerInvalidError, match="NaN"):
        await judged(outside(Scripted([1.0, None, 1.0], {1: lie()})))


async def test_a_failure_of_the_whole_is_one_of_each_row():
    policy = GiveValueSpec(value=-1.0)
    found = await judged(outside(Scripted(error=lie()), on_failure=policy))
    assert found.rewards_B.tolist() == [-1.0] * 3
    assert found.metrics["outside/failed_rows"] == 3.0


async def test_a_value_stands_for_failures_alone_and_not_for_what_does_not_apply():
    found = await judged(
        outside(Scripted([None, None, 1.0], {0: lie()}), on_failure=GiveValueSpec(value=9.0)),
        OwnSource(name="own", weight=1.0, reward=Own(0.0, 0.5, 0.0)),
    )
    assert found.rewards_B.tolist() == [9.0, 0.5, 1.0]


async def test_a_failure_drops_all_rows_of_its_prompt_and_no_other():
    found = await judged(
        outside(Scripted([None, 2.0, 3.0, 4.0], {0: lie()}), on_failure=DropGroupSpec()),
        prompt_ids=[7, 8, 7, 8],
        num_rows=4,
    )
    assert found.is_judged_B.tolist() == [False, True, False, True]
    assert found.rewards_B[[1, 3]].tolist() == [2.0, 4.0]
    assert found.rewards_B[[0, 2]].isnan().all()
    assert found.metrics["outside/dropped_rows"] == 2.0


async def test_without_groups_nothing_can_be_dropped():
    with pytest.raises(RewardAnswerInvalidError):
        await judged(
            outside(Scripted([None, 2.0, 3.0], {0: lie()}), on_failure=DropGroupSpec()),
        )


async def test_a_row_that_two_sources_fail_is_dropped_once():
    found = await judged(
        outside(Scripted([None, 1.0, 1.0], {0: lie()}), name="a", on_failure=DropGroupSpec()),
        outside(Scripted([None, 1.0, None], {0: lie(), 2: lie()}), name="b",
                on_failure=GiveValueSpec(value=0.0)),
        prompt_ids=[1, 2, 3],
    )  # fmt: skip
    assert found.is_judged_B.tolist() == [False, True, True]
    assert found.rewards_B[1:].tolist() == [2.0, 1.0]


async def test_a_call_that_is_no_longer_wanted_cancels_its_requests(monkeypatch):
    monkeypatch.setattr(judging, "HEARTBEAT_S", 0.02)
    source, call = Scripted(hangs=True), FakeCall()
    with sources_of(outside(source)) as sources:
        task = asyncio.create_task(sources.judge(batch(), call, None))
        async with asyncio.timeout(20):
            while call.stages.count("ask outside") < 3:  # noqa: ASYNC110 - told by no event
                await asyncio.sleep(0.01)
        call.is_wanted = False
        with pytest.raises(UnavailableError):
            await task
    assert source.is_cancelled
    assert source.is_closed


async def test_a_source_that_fails_the_step_cancels_the_others():
    slow = Scripted(hangs=True)
    broken = Scripted(error=KeyError("a defect"))
    with pytest.raises(KeyError):
        await judged(outside(slow, name="slow"), outside(broken, name="broken"))
    assert slow.is_cancelled


def test_one_source_of_ours_alone_gives_what_it_gives():
    with sources_of(OwnSource(name="own", weight=1.0, reward=Own(1.0))) as sources:
        assert sources.full_score == 1.0
        assert sources.columns == ("completion_text",)
        assert not sources.may_drop
        assert not sources.tells_sources
    with sources_of(OwnSource(name="own", weight=2.0, reward=Own(1.0))) as sources:
        assert sources.full_score is None


@pytest.mark.parametrize("takes", [True, False])
async def test_images_are_read_where_a_source_takes_them_and_the_experience_has_some(takes):
    class Looking(Scripted):
        takes_images = takes

    image = PromptImage.of(b"\x89PNG\r\n\x1a\nseen", (1, 2, 2))
    texts = Column.text([images_text([image]), "", images_text([image, image])])
    source = outside(Looking([1.0, 2.0, 3.0]))
    held = {*batch().columns, "images"}
    with sources_of(source, OwnSource(name="own", weight=1.0, reward=Own(1.0, 1.0, 1.0))) as given:
        assert ("images" in given.columns_of(held)) is takes
        assert given.columns_of(batch().columns) == given.columns
        read = (batch() | Experience({"images": texts})).require(given.columns_of(held))
        await given.judge(read, FakeCall(), None)
    url = "data:image/png;base64," + base64.b64encode(image.data).decode()
    shown = [row.images for row in source.reward.rows]
    assert shown == ([(url,), (), (url, url)] if takes else [None] * 3)


def test_a_source_of_ours_that_reads_images_gets_them():
    class Seeing(Own):
        reads_images = True

    with sources_of(OwnSource(name="own", weight=1.0, reward=Seeing(1.0))) as sources:
        assert sources.columns_of(["completion_text", "images"]) == ("completion_text", "images")
        assert sources.columns_of(["completion_text"]) == ("completion_text",)


async def test_masks_of_dropped_rows_are_false_also_of_those_that_a_judge_before_dropped():
    source = outside(Scripted([None, 2.0, 3.0], {0: lie()}), on_failure=DropGroupSpec())
    before = Column(ColumnKind.ROW, torch.tensor([True, True, False]))
    given = batch() | Experience({"is_judged": before})
    with sources_of(source) as sources:
        found = await sources.judge(given, FakeCall(), torch.tensor([1, 2, 3]))
        columns = judged_columns("costs", given, found, sources)
    assert columns["is_judged"].values.tolist() == [False, True, False]
    assert columns["loss_mask"].values.tolist() == [False] * 2 + [True] * 2 + [False] * 2
    metrics = judgement_metrics(columns, "costs", "cost", None, None, ())
    assert metrics["cost/dropped_rows"] == 2.0
    assert metrics["cost/mean"] == 2.5
    assert metrics["cost/outside/mean"] == 2.5
    assert metrics["cost/outside/absent_rows"] == 1.0


async def test_parts_are_a_column_and_their_means_metrics_of_the_source():
    first = outside(Scripted([1.0] * 3, parts=[{"acc": 1.0}, {"acc": 0.0, "form": 2.0}, {}]))
    second = outside(Scripted([1.0] * 3), name="bare")
    with sources_of(first, second) as sources:
        found = await sources.judge(batch(), FakeCall(), None)
        columns = judged_columns("costs", batch(), found, sources)
    assert [json.loads(text) for text in columns["costs/parts"].strings()] == [
        {"outside/acc": 1.0},
        {"outside/acc": 0.0, "outside/form": 2.0},
        {},
    ]
    metrics = judgement_metrics(columns, "costs", "cost", None, None, ())
    assert (metrics["cost/outside/acc"], metrics["cost/outside/form"]) == (0.5, 2.0)
    assert not any(name.startswith("cost/bare/acc") for name in metrics)


def test_of_nothing_judged_there_is_no_mean():
    rewards = Column(ColumnKind.ROW, torch.full((2,), math.nan))
    none = Column(ColumnKind.ROW, torch.zeros(2).bool())
    metrics = judgement_metrics(
        Experience({"rewards": rewards, "is_judged": none}), "rewards", "reward", None, None, ()
    )
    assert metrics == {"reward/dropped_rows": 2.0}
