"""The sessions of an endpoint: bounds, keys, what a call may do, and what is forgotten first."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rolemesh.engine.seeds import derive_seed
from rolemesh.engine.sessions.session import CALL_BYTES, SessionError
from rolemesh.engine.sessions.store import (
    SESSION_BYTES,
    OpenSession,
    SessionLimitError,
    SessionRules,
    Sessions,
)
from rolemesh.engine.specs import SamplingSpec

PROMPT, SAMPLED = [1, 2, 3], [4, 5]
WHOLE_CALL = CALL_BYTES + 4 * len(PROMPT) + 8 * len(SAMPLED)


def make_sessions(*, max_sessions: int = 100, max_bytes: int = 1 << 20) -> Sessions:
    return Sessions(max_sessions=max_sessions, max_bytes=max_bytes)


def call(sessions: Sessions, opened: OpenSession, number: int = 1) -> None:
    sessions.begin(opened, number)
    for _ in range(number):
        sessions.end_call(opened, PROMPT, SAMPLED, [0.0, 0.0], [(0, 1)], finish_reason="stop")


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads that take turns after each few instructions, so that a lock's lack shows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_session_is_found_by_its_name_and_by_its_key_alone() -> None:
    sessions = make_sessions()
    one, other = sessions.open(session_id="one"), sessions.open()
    assert sessions.of_id("one") is one
    assert sessions.of_key(one.key) is one
    assert sessions.of_key(other.key) is other
    assert len({one.key, other.key, one.session_id, other.session_id}) == 4
    assert sessions.of_key("one") is None
    assert sessions.of_key("") is None
    assert sessions.of_id(one.key) is None


def test_a_name_is_taken_once() -> None:
    sessions = make_sessions()
    sessions.open(session_id="one")
    with pytest.raises(SessionError, match="session_id is 'one', which is taken"):
        sessions.open(session_id="one")
    assert len(sessions) == 1


def test_sessions_that_have_ended_make_room_the_oldest_first() -> None:
    sessions = make_sessions(max_sessions=3)
    first, second, third = (sessions.open(session_id=name) for name in "abc")
    for opened in (second, third):
        sessions.end(opened)
    sessions.open(session_id="d")
    # The oldest of all is open, and stays.
    assert sessions.of_id("a") is first
    assert sessions.of_id("b") is None
    assert sessions.of_key(second.key) is None
    assert sessions.of_id("c") is third
    assert len(sessions) == 3


def test_no_session_is_opened_while_all_are_open() -> None:
    sessions = make_sessions(max_sessions=2)
    for name in "ab":
        sessions.open(session_id=name)
    with pytest.raises(SessionLimitError, match=r"endpoint\.max_sessions is 2"):
        sessions.open()
    assert len(sessions) == 2


def test_memory_is_counted_and_given_back() -> None:
    sessions = make_sessions()
    opened = sessions.open()
    assert sessions.num_bytes == SESSION_BYTES
    call(sessions, opened)
    assert sessions.num_bytes == SESSION_BYTES + WHOLE_CALL
    sessions.begin(opened)
    longer = [*PROMPT, *SAMPLED, 6]
    sessions.end_call(opened, longer, [7], [0.0], [(0, 1)], finish_reason="stop")
    # Of a call that goes on, only what is new.
    assert sessions.num_bytes == SESSION_BYTES + WHOLE_CALL + CALL_BYTES + 4 + 8
    sessions.forget(opened)
    assert sessions.num_bytes == 0
    sessions.forget(opened)
    assert sessions.num_bytes == 0


def test_memory_is_bounded_before_a_call_begins() -> None:
    sessions = make_sessions(max_bytes=2 * SESSION_BYTES + WHOLE_CALL)
    old, new = sessions.open(session_id="old"), sessions.open(session_id="new")
    call(sessions, old)
    with pytest.raises(SessionLimitError, match=r"endpoint\.max_memory_mib"):
        sessions.begin(new)
    assert (new.num_begun, new.num_running) == (0, 0)
    sessions.end(old)
    call(sessions, new)
    assert sessions.of_id("old") is None
    assert sessions.num_bytes == SESSION_BYTES + WHOLE_CALL


def test_a_session_ends_once_and_makes_no_more_calls() -> None:
    sessions = make_sessions()
    opened = sessions.open(session_id="s")
    call(sessions, opened)
    sessions.end(opened, reward=0.5, call_rewards={0: 2.0})
    assert (opened.state, opened.reward, opened.session.rewards) == ("ended", 0.5, {0: 2.0})
    with pytest.raises(SessionError, match="has ended already"):
        sessions.end(opened, reward=1.0)
    assert opened.reward == 0.5
    with pytest.raises(SessionError, match="session s has ended"):
        sessions.begin(opened)
    assert opened.num_running == 0


def test_a_reward_of_no_call_leaves_the_session_open() -> None:
    sessions = make_sessions()
    opened = sessions.open()
    call(sessions, opened)
    with pytest.raises(SessionError, match="call 1"):
        sessions.end(opened, reward=1.0, call_rewards={1: 1.0})
    assert opened.state == "open"
    sessions.end(opened, reward=1.0, call_rewards={0: 1.0})


def test_a_session_that_is_forgotten_while_it_runs_takes_no_memory_afterwards() -> None:
    sessions = make_sessions()
    opened = sessions.open()
    sessions.begin(opened)
    sessions.forget(opened)
    assert opened.state == "ended"
    sessions.end_call(opened, PROMPT, SAMPLED, [0.0, 0.0], [(0, 1)], finish_reason="stop")
    assert sessions.num_bytes == 0
    assert opened.num_running == 0
    with pytest.raises(SessionError, match="has ended"):
        sessions.begin(opened)


def test_calls_are_bounded_by_number() -> None:
    sessions = make_sessions()
    opened = sessions.open(SessionRules(max_calls=3))
    call(sessions, opened)
    with pytest.raises(SessionLimitError, match="has made 1 calls, and may make 3"):
        sessions.begin(opened, 3)
    call(sessions, opened, 2)
    with pytest.raises(SessionLimitError, match="max_turns"):
        sessions.begin(opened)


def test_calls_that_came_to_nothing_count_as_made_and_no_longer_run() -> None:
    sessions = make_sessions()
    opened = sessions.open(SessionRules(max_calls=2))
    sessions.begin(opened, 2)
    assert opened.num_running == 2
    sessions.drop_call(opened)
    assert opened.num_running == 1
    sessions.drop_call(opened)
    # Otherwise a client could sample for ever by going before each end.
    with pytest.raises(SessionLimitError):
        sessions.begin(opened)
    assert sessions.num_bytes == SESSION_BYTES


def test_sampled_tokens_are_a_budget_of_all_calls_together() -> None:
    sessions = make_sessions()
    opened = sessions.open(SessionRules(max_sampled_tokens=7))
    assert sessions.begin(opened).max_new_tokens == 7
    sessions.end_call(opened, PROMPT, SAMPLED, [0.0, 0.0], [(0, 1)], finish_reason="stop")
    assert sessions.begin(opened, 2).max_new_tokens == 2
    with pytest.raises(SessionLimitError, match="has sampled 2 tokens, and may sample 7"):
        sessions.begin(opened, 6)
    for _ in range(2):
        sessions.end_call(opened, PROMPT, SAMPLED, [0.0, 0.0], [(0, 1)], finish_reason="stop")
    call(sessions, opened)
    with pytest.raises(SessionLimitError, match="max_tokens"):
        sessions.begin(opened)


def test_the_shorter_of_both_bounds_on_tokens_holds() -> None:
    sessions = make_sessions()
    sampling = SamplingSpec(max_new_tokens=5)
    opened = sessions.open(SessionRules(sampling=sampling, max_sampled_tokens=6))
    rules = sessions.begin(opened)
    assert (rules.sampling, rules.max_new_tokens) == (sampling, 5)
    sessions.end_call(opened, PROMPT, SAMPLED, [0.0, 0.0], [(0, 1)], finish_reason="stop")
    assert sessions.begin(opened).max_new_tokens == 4
    assert sessions.begin(sessions.open(SessionRules(sampling=sampling))).max_new_tokens == 5
    assert sessions.begin(sessions.open()).max_new_tokens is None


def test_seeds_follow_from_the_sessions_and_the_number_of_the_call() -> None:
    sessions = make_sessions()
    opened = sessions.open(SessionRules(seed=11))
    assert sessions.begin(opened, 2).seed == derive_seed(11, 0)
    assert sessions.begin(opened).seed == derive_seed(11, 2)
    assert sessions.begin(sessions.open()).seed is None


def test_calls_that_begin_at_once_on_many_threads_are_counted_one_by_one(
    quick_switches: None,
) -> None:
    sessions = make_sessions()
    opened = sessions.open(SessionRules(seed=1, max_calls=20_000))

    def begin(_: int) -> int | None:
        try:
            return sessions.begin(opened).seed
        except SessionLimitError:
            return None

    with ThreadPoolExecutor(8) as pool:
        seeds = [seed for seed in pool.map(begin, range(24_000)) if seed is not None]
    # Without the lock two calls that begin at once get the same number, and the same seed.
    assert len(set(seeds)) == len(seeds) == 20_000
