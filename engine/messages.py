"""Messages of others for people: whole, within bounds, and as text that does nothing."""

from __future__ import annotations

import re
from itertools import dropwhile

MOST_CHARACTERS = 1000
"""Of a message that is passed on. Longer ones list things, e.g. all families of a library."""

_TRACEBACK = "Traceback (most recent call last):"

_CPP_FRAMES = "\nException raised from "
"""Begins what torch adds to a message: the frames of its C++ code, which tell a user nothing."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""What a terminal is told of colours: dropped, since a page or a file does nothing with it."""

_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
"""What would move a terminal's cursor, is no character, or turns the direction of text around."""


def on_one_line(text: str, most: int = MOST_CHARACTERS) -> str:
    """The lines of a message, joined by blanks; longer than `most` characters it ends in "...".

    Example: the lines "one of:" and "(1) a file" become "one of: (1) a file".
    """
    joined = " ".join(text.partition(_CPP_FRAMES)[0].split())
    return joined if len(joined) <= most else f"{joined[: most - 3]}..."


def said_last(stderr: str) -> str:
    """What a process that failed wrote last, on one line.

    The exception below its last traceback, all lines of it, or else what begins with "error: ", or
    else its last line. Empty where it said nothing.
    """
    lines = stderr.strip().splitlines()
    if _TRACEBACK in lines:
        below = lines[len(lines) - lines[::-1].index(_TRACEBACK) :]
        exception = list(dropwhile(lambda line: line.startswith("  "), below))
        return on_one_line("\n".join(exception or lines[-1:]))
    told = [at for at, line in enumerate(lines) if line.startswith("error: ")]
    return on_one_line("\n".join(lines[told[-1] :] if told else lines[-1:]))


def harmless(text: str) -> str:
    """The text for a terminal or a page: ends of lines, tabs and visible characters.

    Example: "red" in red, an end of line of DOS and a bell become "red", a plain end of line and
    U+FFFD.
    """
    lines = _COLOURS.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _HARMFUL.sub("\ufffd", lines)
