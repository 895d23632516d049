"""Records of JSON lines files, which have one object in each line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rolemesh.engine.data.rows import DataInvalidError


def records(path: Path, field: str) -> Iterator[tuple[Any, str]]:
    """Yields the value of each line and its place; empty lines are skipped.

    Args:
        path: The file, UTF-8.
        field: Field of the recipe that names the file, e.g. "data.path".

    Raises:
        DataInvalidError: The file cannot be read, or a line is not JSON.
    """
    try:
        # Not splitlines, which also cuts at separators that JSON strings may contain.
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DataInvalidError(
            f"{field} {path} cannot be read ({error.strerror}): check it"
        ) from error
    except UnicodeDecodeError as error:
        raise DataInvalidError(f"{field} {path} is not UTF-8 ({error.reason})") from error
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
        yield value, where
