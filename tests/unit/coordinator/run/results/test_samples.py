"""Samples of steps: what is kept of a row, and what happens when it cannot be had."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from support.fake_runs import Recorder

from rolemesh.coordinator.dataflow.futures import CallFuture, ExperienceFuture, Outcome
from rolemesh.coordinator.run.results.samples import FAILURES_UNTIL_GIVEN_UP, SampleTaker
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunStream
from rolemesh.rpc.columns import ColumnData, Columns
from rolemesh.rpc.sampled_rows import MAX_TEXT_BYTES, MAX_TOKENS, to_samples
from rolemesh.v1 import experience_pb2


def test_a_row_is_cut_where_it_is_too_long_and_empty_where_a_column_is_missing() -> None:
    long = "ä" * MAX_TEXT_BYTES
    length = MAX_TOKENS + 5
    columns = Columns(
        {
            "tokens": ColumnData.sequence([[7, 8, 9], [1, *range(length)]]),
            "prompt_lengths": ColumnData.row([2, 1], np.int64),
            "logprobs": ColumnData.completion([[-0.5], np.zeros(length)]),
            "policy_versions": ColumnData.completion([[4], np.full(length, 5)], np.int64),
            "prompt_text": ColumnData.text(["short", "x" + long]),
        }
    )
    short, cut = to_samples(columns, rows=[0, 32])
    assert (short.row, short.prompt, short.completion, short.answer) == (0, "short", "", "")
    assert (list(short.token_ids), list(short.logprobs), short.policy_version) == ([9], [-0.5], 4)
    assert math.isnan(short.reward)
    assert list(short.advantages) == list(short.loss_mask) == []
    assert cut.row == 32
    assert list(cut.token_ids) == list(range(MAX_TOKENS))
    assert len(cut.logprobs) == MAX_TOKENS
    # Never in the middle of a character.
    assert cut.prompt == "x" + "ä" * ((MAX_TEXT_BYTES - 1) // 2)


def test_a_row_without_a_completion_is_a_sample() -> None:
    columns = Columns(
        {
            "tokens": ColumnData.sequence([[7, 8]]),
            "prompt_lengths": ColumnData.row([2], np.int64),
            "policy_versions": ColumnData.completion([[]], np.int64),
        }
    )
    (sample,) = to_samples(columns, rows=[3])
    assert (sample.row, list(sample.token_ids), sample.policy_version) == (3, [], 0)


class Final:
    """A graph whose answers are never made again."""

    def newest(self, outcome: asyncio.Future[Outcome]) -> asyncio.Future[Outcome]:
        return outcome


async def held_by_nobody() -> ExperienceFuture:
    """Experience whose holder is gone."""
    column = experience_pb2.ColumnSchema(name="tokens", kind=experience_pb2.COLUMN_KIND_SEQUENCE)
    shard = experience_pb2.Shard(experience_id="x", num_rows=4, address="127.0.0.1:1")
    group = experience_pb2.ColumnGroup(columns=[column], shards=[shard])
    outcome = asyncio.get_running_loop().create_future()
    outcome.set_result(
        Outcome(
            report=experience_pb2.CallReport(),
            experience=experience_pb2.ExperienceRef(run_id="run", num_rows=4, groups=[group]),
        )
    )
    part = CallFuture(nodes=(), outcomes=(outcome,), columns=frozenset({"tokens"}))
    return ExperienceFuture(Final(), (part,))


@pytest.mark.parametrize("num_rows", [0, 4])
async def test_samples_that_cannot_be_had_are_told_once_and_then_given_up(num_rows: int) -> None:
    store, recorder = MemoryStateStore(), Recorder()
    taker = SampleTaker(store, "run", None, recorder, num_rows, None)
    experience = await held_by_nobody()
    for step in range(1, FAILURES_UNTIL_GIVEN_UP + 1):
        await taker.take(step, experience)
    channels = len(taker._channels)
    await taker.close()
    # By now nobody is asked any more.
    taker._channels.clear()
    await taker.take(9, experience)
    assert taker._channels == {}
    assert await store.read_entries("run", RunStream.SAMPLES) == []
    if num_rows == 0:
        assert (channels, recorder.events) == (0, [])
    else:
        (note,) = recorder.events
        assert note.startswith("samples of step 1 cannot be shown")
        assert "run.samples: 0" in note
