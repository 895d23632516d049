"""Records of JSON lines files, which have one object in each line."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rolemesh.engine.data.rows import DataInvalidError


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Some lines of a file that follow each other."""

    start: int = 0
    """First byte, at which a line begins."""
    end: int = sys.maxsize
    """Byte behind the last line."""
    first: int = 1
    """Number of the first line."""


ALL = Lines()
_quick_value = msgspec.json.Decoder().decode


def records(path: Path, field: str, lines: Lines = ALL) -> Iterator[tuple[Any, str]]:
    """Yields the value of each line and its place; empty lines are skipped.

    Args:
        path: The file, UTF-8; a byte order mark in front is skipped.
        field: Field of the recipe that names the file, e.g. "data.path".
        lines: The lines to read.

    Raises:
        DataInvalidError: The file cannot be read, or a line is not JSON.
    """
    at = lines.start
    place = f"{field} {path}"
    try:
        with path.open("rb") as file:
            file.seek(at)
            # Lines end at this byte alone, not at separators that JSON strings may contain.
            for number, line in enumerate(file, start=lines.first):
                if at >= lines.end:
                    break
                where = f"{place}, line {number}"
                try:
                    value = _quick_value(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    # Python's own reader takes more (NaN, half of a surrogate pair), and its words
                    # name the place of a fault.
                    text = _text(line, at, place)
                    if text.strip():
                        yield _value(text, where), where
                else:
                    yield value, where
                at += len(line)
    except OSError as error:
        raise DataInvalidError(f"{place} cannot be read ({error.strerror}): check it") from error


def _text(line: bytes, at: int, where: str) -> str:
    """A line as text, which begins at byte `at` of its file."""
    try:
        # Excel and PowerShell write the mark.
        return line.decode("utf-8" if at else "utf-8-sig")
    except UnicodeDecodeError as error:
        is_utf_16 = not at and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        found = "UTF-16" if is_utf_16 else f"not UTF-8 ({error.reason} at byte {at + error.start})"
        raise DataInvalidError(f"{where} is {found}: save it as UTF-8") from error


def _value(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataInvalidError(
            f"{where}: not JSON ({error.msg} at column {error.colno})"
        ) from error
    except RecursionError as error:
        raise DataInvalidError(f"{where}: nests too deep to be read: nest less") from error
