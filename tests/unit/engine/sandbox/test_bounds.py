"""What worker processes print, as their service logs it."""

from __future__ import annotations

import logging

import pytest

from rolemesh.engine.sandbox.bounds import MAX_LOGGED_BYTES, Output


def logged(caplog: pytest.LogCaptureFixture, *parts: bytes) -> list[str]:
    output = Output("Talk", 1 << 20)
    output.begin_call()
    with caplog.at_level(logging.INFO):
        for part in parts:
            output.take(part)
        output.end()
    return [record.getMessage() for record in caplog.records]


def test_a_line_that_comes_word_by_word_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    parts = (b"turn", b" ", b"1", b"\nturn 2\nt\xc3", b"\xa4t", b"!")
    assert logged(caplog, *parts) == [
        f"Talk prints: {it}" for it in ("turn 1", "turn 2", "t\u00e4t!")
    ]


def test_a_line_without_end_is_logged_up_to_the_bound(caplog: pytest.LogCaptureFixture) -> None:
    first, *rest = logged(caplog, b"x" * MAX_LOGGED_BYTES, b"y", b"z\n" * 9)
    assert first == "Talk prints: " + "x" * MAX_LOGGED_BYTES
    assert rest == []


def test_calls_in_flight_share_one_bound_and_none_that_keeps_to_its_own_exceeds_it() -> None:
    output = Output("Talk", 100)
    output.begin_call(1)
    output.begin_call(2)
    output.take(b"a" * 200)
    # Both are at their bound. One ends, a third one begins.
    output.begin_call(2)
    output.take(b"c" * 100)
    assert not output.is_too_much
    output.take(b"c")
    assert output.is_too_much


def test_what_calls_left_over_does_not_add_up() -> None:
    output = Output("Talk", 100)
    for _ in range(50):
        output.begin_call(1)
        output.begin_call(2)
    output.take(b"a" * 200)
    assert not output.is_too_much
    output.take(b"a")
    assert output.is_too_much


def test_calls_in_flight_log_as_many_shares_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    output = Output("Talk", 1 << 20)
    output.begin_call(1)
    output.begin_call(2)
    with caplog.at_level(logging.INFO):
        output.take(b"x" * (2 * MAX_LOGGED_BYTES + 1))
    first, last = [record.getMessage() for record in caplog.records]
    assert first == "Talk prints: " + "x" * 2 * MAX_LOGGED_BYTES
    assert last == "Talk prints more in this call, which is not logged"


def test_last_words_begin_where_no_call_was_in_flight() -> None:
    output = Output("Talk", 1 << 20)
    output.begin_call(1)
    output.take(b"before")
    output.begin_call(1)
    output.take(b"first ")
    output.begin_call(2)
    output.take(b"second")
    assert output.last_words == "first second"
