"""Endings of commands that fail: an exit code, and one line for people."""

from __future__ import annotations

import contextlib
import sys
from typing import NoReturn

import typer

from rolemesh.coordinator.commands.terminal.console import JsonConsole

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_NOT_WHOLE = 3
"""Nothing failed, but not everything was looked at."""
EXIT_INTERRUPTED = 130


def fail(
    text: str, code: int, *, as_json: bool = False, trace_of: Exception | None = None
) -> NoReturn:
    """Ends the command with a code, and says why."""
    with contextlib.suppress(OSError):
        # The output has no reader any more. The exit code still reports the end.
        if as_json:
            JsonConsole().write("error", {"text": text, "exit_code": code})
    with contextlib.suppress(OSError):
        if trace_of is not None:
            import traceback

            traceback.print_exception(trace_of)
        print(f"error: {text}", file=sys.stderr)
    raise typer.Exit(code)


def refuse(text: str) -> NoReturn:
    """Ends the command because of a wrong input of the user."""
    fail(text, EXIT_BAD_INPUT)
