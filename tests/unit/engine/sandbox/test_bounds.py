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
