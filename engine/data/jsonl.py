"""Records of JSON lines files, which have one object in each line."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rolemesh.engine.data.rows import DataInvalidError


def records(path: Path, field: str) -> Iterator[tuple[Any, str]]:
    """Yields the value of each line and its place; empty lines are skipped.

    Args:
        path: The file, UTF-8; a byte order mark in front is skipped.
        field: Field of the recipe that names the file, e.g. "data.path".

    Raises:
        DataInvalidError: The file cannot be read, or a line is not JSON.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataInvalidError(
            f"{field} {path} cannot be read ({error.strerror}): check it"
        ) from error
    try:
        # Excel and PowerShell write the mark. Not splitlines, which also cuts at separators that
        # JSON strings may contain.
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        is_utf_16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        found = "UTF-16" if is_utf_16 else f"not UTF-8 ({error.reason} at byte {error.start})"
        raise DataInvalidError(f"{field} {path} is {found}: save it as UTF-8") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{field} {path}, line {number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataInvalidError(
                f"{where}: not JSON ({error.msg} at column {error.colno})"
            ) from error
        except RecursionError as error:
            raise DataInvalidError(f"{where}: nests too deep to be read: nest less") from error
        yield value, where
