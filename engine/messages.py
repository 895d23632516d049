"""Messages of other libraries on one line: whole, within bounds, and not their first line alone."""

from __future__ import annotations

from itertools import dropwhile

MOST_CHARACTERS = 1000
"""Of a message that is passed on. Longer ones list things, e.g. all families of a library."""

_TRACEBACK = "Traceback (most recent call last):"

_CPP_FRAMES = "\nException raised from "
"""Begins what torch adds to a message: the frames of its C++ code, which tell a user nothing."""


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
