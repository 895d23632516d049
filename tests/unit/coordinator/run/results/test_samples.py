"""Samples of steps: what is kept of a row, and what happens when it cannot be had."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.fake_runs import Recorder

from rolemesh.coordinator.dataflow.futures import CallFuture, ExperienceFuture, Outcome
from rolemesh.coordinator.run.results import samples
from rolemesh.coordinator.run.results.samples import FAILURES_UNTIL_GIVEN_UP, SampleTaker
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunStream
from rolemesh.rpc.errors import UnavailableError
from rolemesh.rpc.experience.columns import ColumnData, Columns
from rolemesh.rpc.samples import rows as sampled_rows
from rolemesh.rpc.samples.rows import (
    MAX_TEXT_BYTES,
    MAX_TOKENS,
    fetch_samples,
    rows_of_whole_trajectories,
    to_samples,
)
from rolemesh.rpc.samples.sessions import MAX_CALLS, MAX_LOG_BYTES
from rolemesh.v1 import coordinator_pb2, experience_pb2


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
            "rewards/parts": ColumnData.text(['{"python/acc": 1}', "{}"]),
        }
    )
    short, cut = to_samples(columns, rows=[0, 32])
    assert (short.row, short.prompt, short.completion, short.answer) == (0, "short", "", "")
    assert (list(short.token_ids), list(short.logprobs), short.policy_version) == ([9], [-0.5], 4)
    assert math.isnan(short.reward)
    assert list(short.advantages) == list(short.loss_mask) == []
    assert dict(short.reward_parts) == {"python/acc": 1.0}
    assert (cut.row, dict(cut.reward_parts)) == (32, {})
    assert list(cut.token_ids) == list(range(MAX_TOKENS))
    assert len(cut.logprobs) == MAX_TOKENS
    # Never in the middle of a character.
    assert cut.prompt == "x" + "ä" * ((MAX_TEXT_BYTES - 1) // 2)


@pytest.mark.parametrize("text", ["", "[]", '{"a": "b"}', '{"a": true}', '{"a": NaN}'])
def test_parts_that_are_no_numbers_are_refused(text: str) -> None:
    columns = Columns(
        {
            "tokens": ColumnData.sequence([[7]]),
            "prompt_lengths": ColumnData.row([1], np.int64),
            "rewards/parts": ColumnData.text([text]),
        }
    )
    with pytest.raises(ValueError, match="rewards/parts of row 3 is no"):
        to_samples(columns, rows=[3])


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


def session_of(**more: Any) -> str:
    call = {"number": 0, "num_added_tokens": 1, "num_sampled_tokens": 1, "use": "trained"}
    return json.dumps({"branch": 0, "num_branches": 1, "attempts": 1, "calls": [call], **more})


def with_sessions(*sessions: str) -> Columns:
    """Rows of two prompts, in turn, with two samples of each."""
    places = range(len(sessions))
    return Columns(
        {
            "tokens": ColumnData.sequence([[7, 8] for _ in places]),
            "prompt_lengths": ColumnData.row([1 for _ in places], np.int64),
            "prompt_ids": ColumnData.row([5 + place // 2 for place in places], np.int64),
            "sample_indexes": ColumnData.row([place % 2 for place in places], np.int64),
            "session": ColumnData.text(sessions),
        }
    )


def test_a_row_of_an_agent_tells_of_its_session_within_bounds() -> None:
    call = {"number": 1, "num_added_tokens": 9, "num_sampled_tokens": 2, "use": "untrained"}
    long = session_of(log="x" + "\u00e4" * MAX_LOG_BYTES, left_out=[call] * (MAX_CALLS + 1))
    first, second = to_samples(with_sessions(session_of(), long), rows=[0, 1])
    assert (first.session.prompt_id, first.session.sample_index) == (5, 0)
    assert (second.session.prompt_id, second.session.sample_index) == (5, 1)
    assert [one.use for one in first.session.calls] == [coordinator_pb2.CALL_USE_TRAINED]
    assert (first.session.log, len(first.session.left_out)) == ("", 0)
    assert len(second.session.left_out) == MAX_CALLS
    assert second.session.left_out[0].use == coordinator_pb2.CALL_USE_UNTRAINED
    # The end of it stays, and no half of a character.
    assert second.session.log == "\u00e4" * (MAX_LOG_BYTES // 2)
    # A batch of no agents has no column of that name.
    (plain,) = to_samples(Columns({"tokens": ColumnData.sequence([[7]]),
        "prompt_lengths": ColumnData.row([1], np.int64)}), rows=[0])  # fmt: skip
    assert not plain.HasField("session")


@pytest.mark.parametrize(
    ("told", "what"),
    [
        ("", "is no JSON"),
        ("[]", "is no object"),
        ("[" * 100_000, "is no JSON"),
        (session_of(branch=-1), "branch is no whole number of 0 to"),
        (session_of(attempts=True), "attempts is no"),
        (session_of(num_branches=2**31), "num_branches is no"),
        (session_of(log=["a"]), "log is no text"),
        (session_of(calls={"a": 1}), "calls is no list of objects"),
        (session_of(calls=[7]), "calls is no list of objects"),
        (session_of(left_out=[{"number": 0}]), "use of a call in left_out is none of"),
        (session_of(calls=[{"number": 0, "use": "shared"}]), "num_added_tokens is no"),
    ],
    ids=lambda value: value[:24],
)
def test_what_is_no_session_is_refused_with_the_row(told: str, what: str) -> None:
    with pytest.raises(ValueError, match=rf"column session of row 3: .*{what}"):
        to_samples(with_sessions(told), rows=[3])


@pytest.mark.parametrize(
    ("keys", "max_rows", "rows"),
    [
        ("aabcc", 3, [0, 1, 2]),
        ("aabcc", 2, [0, 1]),
        ("aabcc", 1, [0]),
        ("aabcc", 9, [0, 1, 2, 3, 4]),
        ("abcdefgh", 4, [0, 2, 4, 6]),
        # Rows of one trajectory need not be neighbours.
        ("abab", 2, [0, 2]),
        ("aaaab", 2, [0, 1]),
    ],
)
def test_trajectories_are_taken_whole(keys: str, max_rows: int, rows: list[int]) -> None:
    assert rows_of_whole_trajectories([(ord(key), 0) for key in keys], max_rows) == rows


@pytest.mark.parametrize("has_sessions", [True, False])
async def test_rows_of_one_session_are_fetched_together(
    has_sessions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = with_sessions(*[session_of()] * 8)
    if not has_sessions:
        columns = Columns({name: one for name, one in columns.items() if name != "session"})
    # Prompt 5 has one trajectory of two branches, and so on.
    index = ColumnData.row([0] * 8, np.int64)
    columns |= {"sample_indexes": index}
    asked: list[list[str]] = []

    async def fetch(
        _: object, reference: object, names: Sequence[str], rows: Any = None, **__: Any
    ) -> Columns:
        asked.append(list(names))
        found = Columns({name: columns[name] for name in names})
        return found if rows is None else found.select(rows)

    monkeypatch.setattr(sampled_rows, "fetch_columns", fetch)
    schemas = [experience_pb2.ColumnSchema(name=name) for name in columns]
    group = experience_pb2.ColumnGroup(columns=schemas)
    reference = experience_pb2.ExperienceRef(num_rows=8, groups=[group])
    samples = await fetch_samples(lambda _: pytest.fail("nobody is asked"), reference, 4)
    if has_sessions:
        assert [one.row for one in samples] == [0, 1, 4, 5]
        assert [one.session.prompt_id for one in samples] == [5, 5, 7, 7]
        assert asked[0] == ["prompt_ids", "sample_indexes"]
    else:
        assert [one.row for one in samples] == [0, 2, 4, 6]
        assert asked == [["tokens", "prompt_lengths"]]


class Final:
    """A graph whose answers are never made again."""

    def newest(self, outcome: asyncio.Future[Outcome]) -> asyncio.Future[Outcome]:
        return outcome


def experience_of(outcome: asyncio.Future[Outcome]) -> ExperienceFuture:
    part = CallFuture(nodes=(), outcomes=(outcome,), columns=frozenset({"tokens"}))
    return ExperienceFuture(Final(), (part,))


def held_by_nobody() -> Outcome:
    """What a call has made, on a service that is gone."""
    column = experience_pb2.ColumnSchema(name="tokens", kind=experience_pb2.COLUMN_KIND_SEQUENCE)
    shard = experience_pb2.Shard(experience_id="x", num_rows=4, address="127.0.0.1:1")
    group = experience_pb2.ColumnGroup(columns=[column], shards=[shard])
    return Outcome(
        report=experience_pb2.CallReport(),
        experience=experience_pb2.ExperienceRef(run_id="run", num_rows=4, groups=[group]),
    )


@pytest.mark.parametrize("num_rows", [0, 4])
async def test_samples_that_cannot_be_had_are_told_once_and_then_given_up(num_rows: int) -> None:
    store, recorder = MemoryStateStore(), Recorder()
    taker = SampleTaker(store, "run", None, recorder, num_rows, None)
    outcome = asyncio.get_running_loop().create_future()
    outcome.set_result(held_by_nobody())
    experience = experience_of(outcome)
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


class Fetches:
    """Takes the place of `fetch_samples`: a sample that says how often it was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        self.fails = False
        self.called = asyncio.Event()
        monkeypatch.setattr(samples, "fetch_samples", self._fetch)

    async def _fetch(self, *_: object) -> list[coordinator_pb2.Sample]:
        self.number += 1
        self.called.set()
        if self.fails:
            raise UnavailableError("the service is gone", reason="SERVICE_UNREACHABLE")
        return [coordinator_pb2.Sample(row=self.number)]


async def told(store: MemoryStateStore) -> list[tuple[int, int]]:
    """Step and number of the fetch of each sample that the store has."""
    entries = await store.read_entries("run", RunStream.SAMPLES)
    responses = [coordinator_pb2.ListSamplesResponse.FromString(e.payload) for e in entries]
    return [(one.step, sample.row) for one in responses for sample in one.samples]


async def test_samples_are_fetched_beside_the_update_and_told_after_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, fetches = MemoryStateStore(), Fetches(monkeypatch)
    taker = SampleTaker(store, "run", None, Recorder(), 4, None)
    outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    experience = experience_of(outcome)
    taker.begin(1, experience)
    await asyncio.sleep(0)
    assert fetches.number == 0, "the rows are not there yet"
    outcome.set_result(held_by_nobody())
    await asyncio.wait_for(fetches.called.wait(), 5)
    assert await told(store) == [], "the step is not made yet"
    await taker.take(1, experience)
    assert await told(store) == [(1, 1)]
    assert fetches.number == 1
    # Without a begin, and where the begun are those of a step that was not made.
    await taker.take(2, experience)
    taker.begin(3, experience)
    await taker.take(4, experience)
    assert [step for step, _ in await told(store)] == [1, 2, 4]
    await taker.close()


async def test_samples_of_a_service_that_was_lost_meanwhile_are_fetched_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, fetches, recorder = MemoryStateStore(), Fetches(monkeypatch), Recorder()
    taker = SampleTaker(store, "run", None, recorder, 4, None)
    outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    outcome.set_result(held_by_nobody())
    for step in range(1, FAILURES_UNTIL_GIVEN_UP + 2):
        fetches.fails = True
        fetches.called.clear()
        taker.begin(step, experience_of(outcome))
        await asyncio.wait_for(fetches.called.wait(), 5)
        fetches.fails = False
        await taker.take(step, experience_of(outcome))
        assert (await told(store))[-1] == (step, 2 * step)
    assert recorder.events == []


async def test_what_was_begun_ends_with_a_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    fetches = Fetches(monkeypatch)
    taker = SampleTaker(MemoryStateStore(), "run", None, Recorder(), 4, None)
    outcomes = [asyncio.get_running_loop().create_future() for _ in range(2)]
    taker.begin(1, experience_of(outcomes[0]))
    taker.begin(1, experience_of(outcomes[1]))
    await taker.close()
    for outcome in outcomes:
        outcome.set_result(held_by_nobody())
    await asyncio.sleep(0.01)
    assert fetches.number == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
