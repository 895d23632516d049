"""What is kept of an agent's output: its end, within a bound, and as text that does nothing."""

from __future__ import annotations

import threading

import pytest

from rolemesh.engine.messages import harmless
from rolemesh.engine.sessions.logs import CUT, MAX_LOG_BYTES, AgentLog, last_of


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("a\r\nb\rc\td", "a\nb\nc\td"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07\x9b2J\x00", "\ufffd]0;title\ufffd\ufffd2J\ufffd"),
        ("\ud800 and \u202eback", "\ufffd and \ufffdback"),
        ("\u3000wide — «ok» 🙂", "\u3000wide — «ok» 🙂"),
    ],
    ids=["ends of lines", "colours", "control", "no characters", "letters stay"],
)
def test_text_of_others_moves_no_cursor(given: str, shown: str) -> None:
    assert harmless(given) == shown


@pytest.mark.parametrize("letter", ["x", "ä", "🙂", "\ufffd"])
@pytest.mark.parametrize("parts", [1, 7, 40_000])
def test_the_end_is_kept_within_the_bound(letter: str, parts: int) -> None:
    text = letter * 40_000
    log = AgentLog()
    size = -(-len(text) // parts)
    for start in range(0, len(text), size):
        log.take(text[start : start + size])
    log.take("the end")
    kept = log.text()
    assert kept.startswith(CUT)
    assert kept.endswith("the end")
    assert MAX_LOG_BYTES - 4 < len(kept.encode()) <= MAX_LOG_BYTES
    # No character is cut through.
    assert set(kept.removeprefix(CUT).removesuffix("the end")) == {letter}


def test_what_has_room_is_whole_and_bytes_that_are_no_text_stay_within_the_bound() -> None:
    log = AgentLog()
    assert log.text() == ""
    log.take(b"one \xff\n")
    log.take("two")
    assert log.text() == "one \ufffd\ntwo"
    log.take(b"\xff" * MAX_LOG_BYTES)
    assert len(log.text().encode()) <= MAX_LOG_BYTES
    assert last_of("abc", 3 + len(CUT), is_cut=True) == f"{CUT}abc"


def test_threads_may_write_at_once() -> None:
    log = AgentLog()

    def write() -> None:
        for _ in range(200):
            log.take("0123456789")

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.text() == "0123456789" * 800
