"""Files of JSON lines that a run has of its steps."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rolemesh.coordinator.state.files import write_atomically

METRICS_FILE = "metrics.jsonl"
"""In a run's folder: the record of each step, one a line."""


class LinesOfSteps:
    """A file of JSON lines, each of one step.

    Invariant: a line is whole once `append` returns. A last line that is torn, as a process that
    was killed leaves it, is cut off when the file is opened again.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file; what it holds stays."""
        self._path = path
        if path.is_file():
            whole, newline, torn = path.read_bytes().rpartition(b"\n")
            if torn:
                os.truncate(path, len(whole) + len(newline))
        self._file: TextIO = path.open("a", encoding="utf-8")

    def append(self, line: Mapping[str, Any]) -> str:
        """Appends a line, and returns it without its end."""
        text = json.dumps(dict(line))
        self._file.write(text + "\n")
        self._file.flush()
        return text

    def keep(self, is_wanted: Callable[[Mapping[str, Any]], bool]) -> None:
        """Leaves out the lines that are not wanted any more."""
        lines = [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]
        self.replace([line for line in lines if is_wanted(line)])

    def replace(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Makes these the lines of the file, all at once."""
        text = "".join(json.dumps(dict(line)) + "\n" for line in lines)
        if text != self._path.read_text(encoding="utf-8"):
            self._file.close()
            write_atomically(self._path, text)
            self._file = self._path.open("a", encoding="utf-8")

    def bound(self, max_bytes: int) -> None:
        """Leaves out the older half of a file that has grown beyond so many bytes."""
        if self._path.stat().st_size > max_bytes:
            self._keep_newest(max_bytes // 2)

    def _keep_newest(self, num_bytes: int) -> None:
        whole = self._path.read_bytes()
        # A line that the cut would go through is left out.
        start = whole.find(b"\n", max(0, len(whole) - num_bytes - 1)) + 1
        self._file.close()
        write_atomically(self._path, whole[start:].decode())
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def whole_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and their numbers; the newest one may be half written. None where there is no file."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith("\n"):
                yield number, line
