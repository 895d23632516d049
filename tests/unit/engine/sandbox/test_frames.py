"""A frame from a process that runs foreign code is bounded, and holds a JSON object."""

from __future__ import annotations

import socket
import time

import pytest

from rolemesh.engine.sandbox import frames


def test_a_message_comes_back_as_it_was() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        message = {"text": "half a character \ud83d, \u00e4", "numbers": [1, 2.5, None]}
        ours.sendall(frames.encode(message, 1000))
        ours.close()
        assert frames.read(theirs, 1000) == message
        assert frames.read(theirs, 1000) is None


def test_a_message_that_ends_or_stays_away_is_told() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"\x00")
        with pytest.raises(TimeoutError):
            frames.read(theirs, 1000, deadline=time.monotonic() + 0.05)
        ours.sendall(b"\x00")
        ours.close()
        with pytest.raises(ValueError, match="ends within its header"):
            frames.read(theirs, 1000)


def test_a_large_message_is_refused_at_both_ends() -> None:
    with pytest.raises(ValueError, match="more than 10"):
        frames.encode({"text": "x" * 20}, 10)
    with pytest.raises(ValueError, match="announces 4294967295 bytes"):
        frames.body_length(b"\xff\xff\xff\xff", 10)


@pytest.mark.parametrize(
    "body",
    [b"[1]", b"", b"{", b'{"a": NaN}', b'{"a": Infinity}', b"\xff", b"[" * 100_000],
    ids=["list", "empty", "cut", "nan", "infinity", "no text", "deep"],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="a message is"):
        frames.decode(body)


def test_nan_is_not_sent() -> None:
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        frames.encode({"a": float("nan")}, 1000)
