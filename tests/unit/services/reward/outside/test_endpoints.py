import asyncio
import itertools

import pytest
from support.fake_rewards import FakeClient, lengths, lie, row, unavailable

from rolemesh.engine.specs import OpenRlhfRewardSpec
from rolemesh.services.reward.outside import endpoints
from rolemesh.services.reward.outside.base import (
    Judgement,
    RewardAnswerInvalidError,
    RewardRefusedError,
    RewardTimeoutError,
    RewardUnavailableError,
)
from rolemesh.services.reward.outside.endpoints import EndpointReward

FOREVER_S = 3600.0


def spec(**given):
    return OpenRlhfRewardSpec.model_validate({"urls": ["http://h/get_reward"], **given})


class Naps:
    """Waits that take no time, and a clock that they move."""

    def __init__(self):
        self.taken = []
        self.now = 0.0

    async def sleep(self, seconds):
        self.taken.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)

    def clock(self):
        return self.now


def reward(*clients, naps=None, observer=None, **given):
    naps = naps or Naps()
    return EndpointReward(
        "r", spec(**given), clients, sleep=naps.sleep, clock=naps.clock, observer=observer
    )


async def test_rows_go_in_batches_and_rewards_come_back_in_order():
    client = FakeClient()
    rows = [row("x" * number) for number in range(1, 6)]
    judged = await reward(client, batch_size=2).judge(rows)
    assert sorted(map(len, client.asked)) == [1, 2, 2]
    assert judged.rewards == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert not judged.failures


async def test_rows_that_are_large_together_go_apart(monkeypatch):
    monkeypatch.setattr(endpoints, "MAX_REQUEST_BYTES", 10)
    client = FakeClient()
    await reward(client, batch_size=16).judge([row("x" * 6), row("y" * 6), row("z" * 20)])
    assert sorted(client.asked) == [["x" * 6], ["y" * 6], ["z" * 20]]


async def test_no_more_requests_are_in_flight_than_allowed():
    client = FakeClient()
    judged = await reward(client, batch_size=1, concurrency=3).judge([row("a")] * 20)
    assert client.most_in_flight == 3
    # Three have a place at once, the others wait.
    assert judged.metrics["queue_peak"] == 17.0


async def test_tries_end_with_the_deadline_and_their_waits_stay_short():
    naps = Naps()
    client = FakeClient([unavailable()] * 10_000)
    asked = reward(client, naps=naps, deadline_s=120, breaker_pause_s=5)
    told = []
    asked._sleep = _telling(asked, told, asked._sleep)
    judged = await asked.judge([row("abc")])
    assert isinstance(judged.failures[0], RewardUnavailableError)
    # With a random wait of 2.5 s on average, five tries would have ended long before.
    assert 120 - endpoints.LONGEST_BACKOFF_S <= naps.now < 120
    assert max(naps.taken) <= 5.0
    assert len(naps.taken) > 20
    # While it waits it says so; afterwards there is nothing to say.
    assert told[3].startswith("does not answer, try 5, for ")
    assert "s of at most 120 s (" in told[3]
    assert asked.trouble() == ""


def _telling(asked, told, sleep):
    async def tell(seconds):
        told.append(asked.trouble())
        await sleep(seconds)

    return tell


async def test_what_may_pass_is_tried_again_with_growing_random_waits():
    naps = Naps()
    client = FakeClient([unavailable()] * 4)
    judged = await reward(client, naps=naps, tries=5, breaker_failures=9).judge([row("abc")])
    assert judged.rewards == [3.0]
    assert len(naps.taken) == 4
    for number, taken in enumerate(naps.taken):
        assert 0 <= taken <= endpoints.BACKOFF_S * 2**number
    assert judged.metrics["retries"] == 4.0
    assert judged.metrics["errors"] == 4.0


async def test_retry_after_is_kept():
    naps = Naps()
    await reward(FakeClient([unavailable(retry_after_s=42.0)]), naps=naps).judge([row("a")])
    assert naps.taken == [42.0]


async def test_waits_that_would_end_after_the_deadline_are_not_begun():
    naps = Naps()
    client = FakeClient([unavailable(retry_after_s=500.0)])
    judged = await reward(client, naps=naps, deadline_s=300.0).judge([row("a")])
    assert isinstance(judged.failures[0], RewardUnavailableError)
    assert naps.taken == []


@pytest.mark.parametrize(
    "error",
    [lie(), RewardRefusedError("fake", expected="200", found="404", remedy="mend the URL")],
    ids=["lie", "refusal"],
)
async def test_what_cannot_pass_is_not_tried_again(error):
    client = FakeClient([error])
    judged = await reward(client).judge([row("a")])
    assert judged.failures == {0: error}
    assert len(client.asked) == 1


async def test_a_batch_that_fails_leaves_the_others_their_rewards():
    client = FakeClient([lie()])
    judged = await reward(client, batch_size=2).judge([row("a"), row("b"), row("ccc")])
    assert judged.rewards == [None, None, 3.0]
    assert sorted(judged.failures) == [0, 1]
    assert isinstance(judged.failures[0], RewardAnswerInvalidError)


async def test_a_try_that_takes_too_long_is_cancelled_and_counts_as_passing():
    client = FakeClient([FOREVER_S])
    judged = await reward(client, timeout_s=0.01).judge([row("ab")])
    assert judged.rewards == [2.0]
    assert client.cancelled == 1
    client = FakeClient([FOREVER_S])
    judged = await reward(client, timeout_s=0.01, tries=1).judge([row("ab")])
    assert isinstance(judged.failures[0], RewardTimeoutError)
    assert "timeout_s" in str(judged.failures[0])


async def test_a_slow_request_is_hedged_once_and_the_loser_is_cancelled():
    slow, quick = FakeClient([FOREVER_S], "slow"), FakeClient((), "quick")
    judged = await reward(slow, quick, hedge_after_s=0.01).judge([row("abcd")])
    assert judged.rewards == [4.0]
    assert (len(slow.asked), len(quick.asked), slow.cancelled) == (1, 1, 1)
    assert judged.metrics["hedged"] == 1.0
    assert (slow.in_flight, quick.in_flight) == (0, 0)


async def test_a_quick_answer_is_not_hedged_and_a_quick_error_is_told_at_once():
    client = FakeClient([lie()])
    judged = await reward(client, hedge_after_s=FOREVER_S, batch_size=1).judge([row("a"), row("b")])
    assert judged.metrics["hedged"] == 0.0
    assert list(judged.failures) == [0]


async def test_requests_go_to_the_least_busy_replica():
    busy, idle = FakeClient([0.05], "busy"), FakeClient((), "idle")
    await reward(busy, idle, batch_size=1, concurrency=2).judge([row("a")] * 6)
    assert len(busy.asked) == 1
    assert len(idle.asked) == 5


async def test_a_replica_that_fails_again_and_again_is_left_alone_and_tried_once_after_the_pause():
    naps = Naps()
    dead, alive = FakeClient([unavailable()] * 50, "dead"), FakeClient((), "alive")
    asked = reward(dead, alive, naps=naps, batch_size=1, concurrency=1, breaker_failures=2, tries=3)
    await asked.judge([row("a")] * 10)
    assert len(dead.asked) == 2
    naps.now += 100.0
    await asked.judge([row("a")] * 10)
    assert len(dead.asked) == 3
    dead.script.clear()
    naps.now += 100.0
    judged = await asked.judge([row("a")] * 10)
    assert len(dead.asked) > 4
    assert judged.metrics["errors"] == 0.0


@pytest.mark.parametrize("hedge_after_s", [None, FOREVER_S])
async def test_requests_that_begin_at_once_are_spread_over_replicas(hedge_after_s):
    clients = [FakeClient([0.01] * 8), FakeClient([0.01] * 8)]
    asked = reward(*clients, batch_size=1, concurrency=8, hedge_after_s=hedge_after_s)
    await asked.judge([row("a")] * 8)
    assert [len(client.asked) for client in clients] == [4, 4]


@pytest.mark.parametrize("hedge_after_s", [None, FOREVER_S])
async def test_one_request_tries_again_and_the_others_wait_for_it_and_spend_no_try(hedge_after_s):
    naps = Naps()
    client = FakeClient([unavailable(), 0.01])
    asked = reward(
        client,
        naps=naps,
        batch_size=1,
        concurrency=8,
        tries=1,
        breaker_failures=1,
        hedge_after_s=hedge_after_s,
    )
    await asked.judge([row("a")])
    naps.now += 100.0
    judging = asyncio.create_task(asked.judge([row("a")] * 8))
    await asyncio.sleep(0)
    while not client.in_flight:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert len(client.asked) == 2
    assert (await judging).rewards == [1.0] * 8
    assert len(client.asked) == 9


async def test_a_cancelled_trial_lets_the_next_request_try():
    naps = Naps()
    client = FakeClient([unavailable(), FOREVER_S])
    asked = reward(client, naps=naps, tries=1, breaker_failures=1)
    await asked.judge([row("a")])
    naps.now += 100.0
    judging = asyncio.create_task(asked.judge([row("a")]))
    while not client.in_flight:  # noqa: ASYNC110
        await asyncio.sleep(0)
    judging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await judging
    assert (await asked.judge([row("a")])).rewards == [1.0]


@pytest.mark.parametrize(("policy", "num_asked"), [("fail", 2), ("drop_group", 9)])
async def test_a_failure_that_ends_the_step_ends_the_asking(policy, num_asked):
    client = FakeClient([lie()] * 2)
    asked = reward(client, batch_size=1, concurrency=2, on_failure={"type": policy})
    judged = await asked.judge([row("a")] * 9)
    assert len(client.asked) == num_asked
    assert len(judged.failures) == (9 if policy == "fail" else 2)


async def test_when_all_are_left_alone_the_reason_names_the_last_failure():
    client = FakeClient([unavailable()] * 50)
    policy = {"type": "drop_group"}
    judged = await reward(
        client, tries=1, breaker_failures=1, batch_size=1, concurrency=1, on_failure=policy
    ).judge([row("a"), row("b")])
    assert len(client.asked) == 1
    assert "not asked" in str(judged.failures[1])
    assert "status 503" in str(judged.failures[1])


async def test_equal_rows_are_asked_for_once_where_rewards_are_remembered():
    client = FakeClient()
    asked = reward(client, cache_rows=2, batch_size=1)
    first = await asked.judge([row("a"), row("a"), row("bb")])
    assert first.rewards == [1.0, 1.0, 2.0]
    assert sorted(client.asked) == [["a"], ["bb"]]
    again = await asked.judge([row("bb"), row("ccc")])
    assert again.rewards == [2.0, 3.0]
    assert again.metrics["cache_hits"] == 1.0
    # "a" was used longest ago, and room is for two.
    await asked.judge([row("a")])
    assert client.asked[-1] == ["a"]


async def test_parts_are_remembered_with_their_reward():
    client = FakeClient([lambda rows: Judgement(rewards=[1.0], parts=[{"acc": 0.5}])])
    asked = reward(client, cache_rows=2, batch_size=1)
    assert (await asked.judge([row("a"), row("a")])).parts == [{"acc": 0.5}] * 2
    assert (await asked.judge([row("bb"), row("a")])).parts == [{}, {"acc": 0.5}]
    assert (await asked.judge([row("bb")])).parts == []


async def test_failures_are_not_remembered():
    client = FakeClient([lie()])
    asked = reward(client, cache_rows=8)
    assert sorted((await asked.judge([row("a"), row("a")])).failures) == [0, 1]
    assert (await asked.judge([row("a")])).rewards == [1.0]


async def test_nothing_is_remembered_unless_asked_for():
    client = FakeClient()
    asked = reward(client)
    for _ in range(2):
        await asked.judge([row("a"), row("a")])
    assert client.asked == [["a", "a"]] * 2


async def test_none_is_remembered_as_not_applicable():
    client = FakeClient([lambda rows: Judgement(rewards=[None])])
    asked = reward(client, cache_rows=8)
    for _ in range(2):
        judged = await asked.judge([row("a")])
        assert judged.rewards == [None]
        assert not judged.failures
    assert len(client.asked) == 1


async def test_metrics_of_batches_are_weighted_by_their_rows():
    client = FakeClient(
        [
            lambda rows: Judgement(rewards=[0.0] * 3, metrics={"length": 1.0}),
            lambda rows: Judgement(rewards=[0.0], metrics={"length": 5.0, "other": 7.0}),
        ]
    )
    judged = await reward(client, batch_size=3, concurrency=1).judge([row("a")] * 4)
    assert judged.metrics["length"] == pytest.approx(2.0)
    assert judged.metrics["other"] == 7.0


async def test_a_cancelled_judgement_leaves_no_task_and_no_request():
    client = FakeClient([FOREVER_S] * 50)
    asked = reward(client, batch_size=1, concurrency=4, hedge_after_s=0.01)
    before = asyncio.all_tasks()
    task = asyncio.create_task(asked.judge([row("a")] * 20))
    while client.in_flight < 8:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before
    assert client.in_flight == 0
    # Places and breakers are as before: the next judgement works.
    client.script.clear()
    assert (await asked.judge([row("abc")])).rewards == [3.0]


async def test_a_defect_of_a_client_is_not_taken_for_a_failure_of_the_reward():
    def broken(rows):
        raise KeyError("our own bug")

    with pytest.raises(KeyError):
        await reward(FakeClient([broken])).judge([row("a")])


async def test_every_request_is_told_to_the_observer():
    class Told(list):
        def reward_request(self, name, outcome, seconds):
            self.append((name, outcome, seconds >= 0))

    told = Told()
    await reward(FakeClient([unavailable(), lengths]), observer=told).judge([row("a")])
    assert told == [("r", "RewardUnavailableError", True), ("r", "ok", True)]


async def test_closing_closes_every_client():
    clients = [FakeClient(), FakeClient()]
    await reward(*clients).close()
    assert all(client.is_closed for client in clients)


def test_waits_are_random():
    # 20 draws of a continuous law are equal with chance 0.
    naps = [Naps() for _ in range(20)]
    for nap in naps:
        asyncio.run(reward(FakeClient([unavailable()]), naps=nap).judge([row("a")]))
    assert len(set(itertools.chain.from_iterable(nap.taken for nap in naps))) == 20


async def test_a_run_does_not_begin_with_a_reward_that_nobody_serves(monkeypatch):
    monkeypatch.setattr(endpoints, "LISTENING_S", 0.2)
    nobody = "http://127.0.0.1:9/"  # the port of discard, which needs rights to listen on
    alone = reward(FakeClient(), urls=[nobody])
    with pytest.raises(RewardUnavailableError, match=r"127\.0\.0\.1:9.*Connect call failed"):
        await alone.open()
    # Whoever has declared what a failure means may begin without.
    await reward(FakeClient(), urls=[nobody], on_failure={"type": "drop_group"}).open()
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        replicas = [nobody, f"http://127.0.0.1:{port}/"]
        await reward(FakeClient(), FakeClient(), urls=replicas).open()
