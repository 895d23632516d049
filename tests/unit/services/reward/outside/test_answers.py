"""The log of outside answers: what it gives back, and what it takes for no record."""

import asyncio
import json
import math
import os
import random
import struct
import sys
import zlib

import pytest
from support.fake_rewards import FakeClient, lengths, lie, row, unavailable

from rolemesh.engine.specs import DropGroupSpec, FailSpec, GiveValueSpec, OpenRlhfRewardSpec
from rolemesh.services.reward.outside import answers
from rolemesh.services.reward.outside.answers import AnswerLog, Answers, current_answers
from rolemesh.services.reward.outside.base import (
    Judgement,
    OutsideRewardError,
    RewardAnswerInvalidError,
    RewardUnavailableError,
)
from rolemesh.services.reward.outside.endpoints import EndpointReward

BEGIN = 4096
CALL = ("reward.compute_reward", 0, 0)
DROP = DropGroupSpec()


class Logs:
    """A file, opened again as often as one likes, as by a process that was started again."""

    def __init__(self, path):
        self.path = path
        self.told = []
        self.path.write_bytes(bytes(BEGIN))

    def open(self, step=1):
        log = AnswerLog(os.open(self.path, os.O_RDWR), BEGIN, self.told.append)
        log.turn_to(step)
        return log

    def call(self, step=1, call=CALL):
        return Answers(self.open(step), step, call)

    @property
    def records(self):
        return self.path.read_bytes()[BEGIN:]


@pytest.fixture
def logs(tmp_path):
    return Logs(tmp_path / "log")


async def get(known, sent, outcome, policy=DROP, source="judge"):
    """One request; the outcome is what the judge answers if it is asked, None: it must not be."""

    async def ask():
        assert outcome is not None, "asked again"
        if isinstance(outcome, OutsideRewardError):
            raise outcome
        return outcome

    return await known.get(known.key_of(source, sent), len(sent), policy, ask)


async def test_what_another_service_writes_is_taken_in_as_it_grows(logs, tmp_path):
    other = Logs(tmp_path / "other")

    def read(start, num_bytes):
        return other.path.read_bytes()[start : start + num_bytes]

    own = logs.open(step=2)
    theirs = other.open(step=1)
    calls = Answers(theirs, 1, CALL)
    await get(calls, [b"old"], Judgement(rewards=[0.5]))
    own.take_in(1, read)
    theirs.turn_to(2)
    for number in range(3):
        sent, given = [bytes([number])], Judgement(rewards=[float(number)])
        await get(Answers(theirs, 2, CALL), sent, given)
        whole = other.path.read_bytes()
        # One that is being written.
        other.path.write_bytes(whole + whole[BEGIN : BEGIN + 20])
        own.take_in(1, read)
        other.path.write_bytes(whole)
        own.take_in(1, read)
        assert await get(Answers(own, 2, CALL), sent, None) == given
    assert logs.records == b""
    with pytest.raises(AssertionError, match="asked again"):
        await get(Answers(own, 2, CALL), [b"old"], None)


async def test_an_answer_comes_back_exactly_in_another_process(logs):
    draw = random.Random(3)
    rewards = [draw.gauss(0, 1e-30), -0.0, 5e-324, 3.4028234663852886e38, 0.1 + 0.2, None]
    sent = [bytes([number]) for number in range(6)]
    failure = lie()
    given = Judgement(
        rewards=rewards,
        failures={5: failure},
        metrics={"length": draw.random(), "x": math.inf},
        parts=[{"acc": draw.random()}, *[{}] * 5],
    )
    assert await get(logs.call(), sent, given) is given
    back = await get(logs.call(), sent, None)
    assert [one if one is None else struct.pack("<d", one) for one in back.rewards] == [
        one if one is None else struct.pack("<d", one) for one in rewards
    ]
    assert (back.metrics, back.parts) == (given.metrics, given.parts)
    assert str(back.failures[5]) == str(failure)
    assert type(back.failures[5]) is RewardAnswerInvalidError


@pytest.mark.parametrize("policy", [DROP, GiveValueSpec(value=-1.0)])
async def test_a_failure_that_the_run_survives_comes_back_as_it_was(logs, policy):
    failure = unavailable()
    with pytest.raises(RewardUnavailableError):
        await get(logs.call(), [b"a", b"b"], failure, policy)
    with pytest.raises(RewardUnavailableError) as back:
        await get(logs.call(), [b"a", b"b"], None, policy)
    assert str(back.value) == str(failure)
    assert back.value.may_pass


async def test_a_failure_that_ends_the_run_is_asked_again_when_it_goes_on(logs):
    with pytest.raises(RewardUnavailableError):
        await get(logs.call(), [b"a"], unavailable(), FailSpec())
    partly = Judgement(rewards=[None], failures={0: lie()})
    assert await get(logs.call(), [b"a"], partly, FailSpec()) is partly
    assert logs.records == b""
    mended = Judgement(rewards=[2.0])
    assert await get(logs.call(), [b"a"], mended, FailSpec()) is mended
    assert (await get(logs.call(), [b"a"], None, FailSpec())).rewards == [2.0]


async def test_a_late_answer_to_a_call_that_was_ended_does_not_replace_the_one_that_counts(logs):
    log, free = logs.open(), asyncio.Event()

    async def late():
        await free.wait()
        return Judgement(rewards=[0.2])

    ended = Answers(log, 1, CALL)
    asked = asyncio.create_task(ended.get(ended.key_of("judge", [b"a"]), 1, DROP, late))
    await asyncio.sleep(0)
    assert (await get(Answers(log, 1, CALL), [b"a"], Judgement(rewards=[0.1]))).rewards == [0.1]
    free.set()
    await asked
    assert (await get(Answers(log, 1, CALL), [b"a"], None)).rewards == [0.1]
    log.close()
    assert (await get(logs.call(), [b"a"], None)).rewards == [0.1]


async def test_equal_requests_of_a_call_have_an_answer_each(logs):
    first = logs.call()
    for reward in (1.0, 2.0, 3.0):
        await get(first, [b"a"], Judgement(rewards=[reward]))
    again = logs.call()
    assert [(await get(again, [b"a"], None)).rewards for _ in range(3)] == [[1.0], [2.0], [3.0]]
    assert (await get(again, [b"a"], Judgement(rewards=[4.0]))).rewards == [4.0]


async def test_only_the_same_request_of_the_same_call_takes_an_answer(logs):
    await get(logs.call(), [b"ab", b"c"], Judgement(rewards=[1.0, 1.0]))
    other = Judgement(rewards=[2.0, 2.0])
    for call in (
        ("evaluate.reward.compute_reward", 0, 0),
        ("reward.compute_reward", 1, 0),
        ("reward.compute_reward", 0, 1),
    ):
        known = logs.call(call=call)
        assert await get(known, [b"ab", b"c"], other) is other
    assert await get(logs.call(), [b"a", b"bc"], other) is other
    assert await get(logs.call(), [b"ab", b"c"], other, source="another") is other
    assert (await get(logs.call(), [b"ab", b"c"], None)).rewards == [1.0, 1.0]


async def test_answers_of_another_step_are_dropped(logs):
    log = logs.open(4)
    await get(Answers(log, 4, CALL), [b"a"], Judgement(rewards=[1.0]))
    late = Answers(log, 4, CALL)
    log.turn_to(7)
    assert logs.records == b""
    # A call of the step before that still ends leaves nothing in the log of this one.
    await get(late, [b"a"], Judgement(rewards=[1.0]))
    assert logs.records == b""
    await get(Answers(log, 7, CALL), [b"a"], Judgement(rewards=[2.0]))
    assert (await get(logs.call(7), [b"a"], None)).rewards == [2.0]
    logs.open(10)
    assert logs.records == b""


async def test_a_record_that_is_not_whole_is_cut_off_wherever_the_write_ended(logs):
    known = logs.call()
    await get(known, [b"a"], Judgement(rewards=[1.0]))
    whole = logs.records
    await get(known, [b"b"], Judgement(rewards=[2.0]))
    both = logs.records
    for kept in range(len(whole), len(both)):
        logs.path.write_bytes(bytes(BEGIN) + both[:kept])
        again = logs.call()
        assert logs.records == whole
        assert (await get(again, [b"a"], None)).rewards == [1.0]
        assert (await get(again, [b"b"], Judgement(rewards=[3.0]))).rewards == [3.0]
        assert (await get(logs.call(), [b"b"], None)).rewards == [3.0]


def framed(text):
    return struct.pack("<II", len(text), zlib.crc32(text)) + text


GOOD = {
    "step": 1,
    "source": "judge",
    "request": "0" * 64,
    "occurrence": 0,
    "rewards": [1.0],
    "failures": [],
    "metrics": {},
}


@pytest.mark.parametrize(
    "foreign",
    [
        b"\xff" * 5000,
        bytes(5000),
        struct.pack("<II", 2**32 - 1, 0) + b"x",
        framed(b"no json"),
        framed(b"[" * 100_000),
        *(
            framed(json.dumps({**GOOD, **change}).encode())
            for change in (
                {"rewards": [math.nan]},
                {"rewards": ["1.0"]},
                {"rewards": [True]},
                {"step": "1"},
                {"more": 1},
                {"failures": [{"row": 0}]},
            )
        ),
    ],
)
async def test_foreign_bytes_are_no_answers(logs, foreign):
    await get(logs.call(), [b"a"], Judgement(rewards=[1.0]))
    whole = logs.records
    logs.path.write_bytes(bytes(BEGIN) + whole + foreign)
    assert (await get(logs.call(), [b"a"], None)).rewards == [1.0]
    assert logs.records == whole


async def test_a_record_that_does_not_fit_its_request_is_not_taken(logs):
    _, request, occurrence = logs.call().key_of("judge", [b"a"])
    for change in ({"rewards": [1.0, 2.0]}, {"failures": [failure_of(row=7)]}):
        record = {**GOOD, "request": request, "occurrence": occurrence, **change}
        logs.path.write_bytes(bytes(BEGIN) + framed(json.dumps(record).encode()))
        asked = Judgement(rewards=[5.0])
        assert await get(logs.call(), [b"a"], asked) is asked


def failure_of(row):
    texts = dict.fromkeys(("endpoint", "expected", "found", "remedy"), "x")
    return {"row": row, "kind": "OutsideRewardError", **texts}


async def test_a_full_log_is_told_and_the_step_goes_on(logs, monkeypatch):
    known = logs.call()
    await get(known, [b"a"], Judgement(rewards=[1.0]))
    monkeypatch.setattr(answers, "MAX_LOG_BYTES", len(logs.records) + 10)
    asked = Judgement(rewards=[2.0])
    assert await get(known, [b"b"], asked) is asked
    assert len(logs.told) == 1
    assert "more than" in logs.told[0]
    again = logs.call()
    assert (await get(again, [b"a"], None)).rewards == [1.0]
    assert await get(again, [b"b"], asked) is asked


async def test_memory_that_is_full_leaves_whole_records(logs, monkeypatch):
    known = logs.call()
    await get(known, [b"a"], Judgement(rewards=[1.0]))
    whole = logs.records
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda to, text, at: pwrite(to, text[:20], at))
    asked = Judgement(rewards=[2.0])
    assert await get(known, [b"b"], asked) is asked
    assert logs.records == whole
    assert "enlarge /dev/shm" in logs.told[0]


async def test_a_request_that_is_cancelled_leaves_nothing(logs):
    known = logs.call()

    async def never():
        await asyncio.sleep(3600)

    task = asyncio.create_task(known.get(known.key_of("judge", [b"a"]), 1, DROP, never))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert logs.records == b""


async def test_a_process_that_is_killed_leaves_all_that_it_was_answered(logs):
    program = (
        "import asyncio, os; "
        "from rolemesh.engine.specs import DropGroupSpec; "
        "from rolemesh.services.reward.outside.answers import AnswerLog, Answers; "
        "from rolemesh.services.reward.outside.base import Judgement; "
        f"log = AnswerLog(os.open({str(logs.path)!r}, os.O_RDWR), {BEGIN}); log.turn_to(1); "
        f"known = Answers(log, 1, {CALL!r}); "
        "ask = lambda: asyncio.sleep(0, Judgement(rewards=[0.1])); "
        "asyncio.run(known.get(known.key_of('judge', [b'a']), 1, DropGroupSpec(), ask)); "
        "os.kill(os.getpid(), 9)"
    )
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await killed.wait() == -9
    assert (await get(logs.call(), [b"a"], None)).rewards == [0.1]


# --- with batches, tries and failures around it ---------------------------------------------


def reward(client, **given):
    spec = {"urls": ["http://h/get_reward"], "on_failure": {"type": "drop_group"}, **given}
    return EndpointReward("r", OpenRlhfRewardSpec.model_validate(spec), [client])


async def judged(logs, client, rows, **given):
    current_answers.set(logs.call())
    return await reward(client, **given).judge(rows)


async def test_a_step_that_is_made_again_asks_only_for_what_was_not_answered(logs):
    rows = [row(text) for text in ("a", "bb", "ccc", "dddd", "eeeee")]

    def means(rows):
        return Judgement(rewards=lengths(rows).rewards, metrics={"mean": len(rows) / 3})

    # The second of three requests is cut short with the process.
    client = FakeClient([means, 3600.0, means])
    asking = asyncio.create_task(judged(logs, client, rows, batch_size=2))
    while logs.records.count(b'"occurrence"') < 2:  # noqa: ASYNC110 - told by no event
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    again = FakeClient([means])
    found = await judged(logs, again, rows, batch_size=2)
    assert again.asked == [["ccc", "dddd"]]
    undisturbed = await reward(FakeClient([means] * 3), batch_size=2).judge(rows)
    assert found.rewards == undisturbed.rewards
    assert found.metrics["mean"] == undisturbed.metrics["mean"]


async def test_rows_that_failed_fail_again_though_the_judge_is_well_by_now(logs):
    rows = [row("a"), row("bb"), row("a")]
    found = await judged(logs, FakeClient([lie(), lengths, lengths]), rows, batch_size=1)
    assert set(found.failures) == {0}
    again = FakeClient()
    back = await judged(logs, again, rows, batch_size=1)
    assert again.asked == []
    assert back.rewards == found.rewards == [None, 2.0, 1.0]
    assert str(back.failures[0]) == str(found.failures[0])


async def test_without_a_log_a_judge_is_asked_each_time():
    current_answers.set(None)
    client = FakeClient()
    for _ in range(2):
        await reward(client).judge([row("a")])
    assert client.asked == [["a"], ["a"]]
