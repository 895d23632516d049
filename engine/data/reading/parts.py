"""Large files of JSON lines, read by several processes, a part each: one reads on one CPU alone.

The caller reads the first part. Whatever goes wrong in another process, the caller reads what is
left by itself, and finds out what it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy

from rolemesh.engine.data.files.jsonl import ALL, Lines
from rolemesh.engine.data.row_store import FACTS, Rows, RowStore
from rolemesh.engine.specs import JsonlSpec, Spec

logger = logging.getLogger(__name__)

PART_BYTES = 16 << 20
"""A smaller part is not worth the start of a process, which takes two seconds."""

_HEAD_START_BYTES = 20 << 20
"""What the caller reads until the other processes have started."""
_MOST_PARTS = 8
_LOOK_EVERY_S = 0.1
_PIECE = 1 << 20
FAULTY_DATA = 3
"""Exit code of a process that found a fault in the data."""


class PartSpec(Spec):
    """What one process reads; see `part.py`."""

    spec: JsonlSpec
    """The source."""
    field: str
    """Its field in the recipe."""
    path: Path
    """Its file of training or of held-out rows."""
    path_field: str
    """Field that names the file."""
    start: int
    end: int
    first_line: int
    model: Path
    """Folder of the tokenizer."""
    tokenizer: str
    """Hash of the tokenizer that it has to be."""
    max_prompt_tokens: int | None
    max_row_tokens: int | None
    measured_from: int | None
    with_identities: bool
    out: Path
    """Where the rows go; their facts go beside, see `fact_file`."""


def fact_file(out: Path, fact: str) -> Path:
    """Where the values of a fact of all rows go."""
    return out.with_suffix(f".{fact}")


def read_in_parts(
    store: RowStore,
    part: PartSpec,
    take: Callable[[Lines], Rows],
    progress: Callable[[], None] | None,
) -> Rows:
    """Adds the rows of a file to a store.

    Args:
        store: Where they go.
        part: The file and how it is read; of the whole file.
        take: Reads some lines of it in this process, and adds their rows to the store.
        progress: Called from time to time.

    Raises:
        OSError: There is no room beside the store.
        DataInvalidError: `take` found a fault.
    """
    cpus = len(os.sched_getaffinity(0))
    size = part.path.stat().st_size
    count = min(cpus, _MOST_PARTS, size // PART_BYTES)
    if count < 2:
        return take(ALL)
    first = len(store)
    variables = {"PYTHONSAFEPATH": "1", "RAYON_NUM_THREADS": str(max(1, cpus // count))}
    own, *others = _split(part.path, size, count)
    with tempfile.TemporaryDirectory(prefix="draft-", dir=part.out) as name:
        parts = [
            part.model_copy(
                update={
                    "start": lines.start,
                    "end": lines.end,
                    "first_line": lines.first,
                    "out": Path(name) / str(number),
                }
            )
            for number, lines in enumerate(others)
        ]
        with _started(parts, {**os.environ, **variables}) as processes:
            take(own)
            codes = _ended(processes, progress)
        if any(codes):
            if FAULTY_DATA not in codes:
                logger.warning(
                    "a process that read a part of %s failed (exit codes %s): see above; what is "
                    "left is read by one process now",
                    part.path,
                    codes,
                )
            take(Lines(start=own.end, first=others[0].first))
        else:
            for one in parts:
                facts = {name: fact_file(one.out, name).read_bytes() for name in FACTS}
                with one.out.open("rb") as file:
                    store.join(file, facts)
    return Rows(store, numpy.arange(first, len(store), dtype=numpy.int32))


def _ended(
    processes: list[subprocess.Popen[bytes]], progress: Callable[[], None] | None
) -> list[int | None]:
    """Exit codes, as soon as all processes ended or one failed."""
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            break
        if progress is not None:
            progress()
        time.sleep(_LOOK_EVERY_S)
    return [process.returncode for process in processes]


@contextlib.contextmanager
def _started(
    parts: list[PartSpec], environment: dict[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A process for each part; none is left behind."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for part in parts:
            process = subprocess.Popen(
                [sys.executable, "-m", "rolemesh.engine.data.reading.part"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=environment,
            )
            processes.append(process)
            assert process.stdin is not None
            # Its exit code tells that it is gone already.
            with contextlib.suppress(BrokenPipeError):
                # It stays open: its end tells the process that this one is gone.
                process.stdin.write(part.model_dump_json().encode() + b"\n")
                process.stdin.flush()
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def _split(path: Path, size: int, count: int) -> list[Lines]:
    """Cuts a file at ends of lines into parts of about the same size, but for a longer first."""
    head_start = min(_HEAD_START_BYTES, size // 3)
    found: list[Lines] = []
    start, line = 0, 1
    with path.open("rb") as file:
        for number in range(1, count + 1):
            end = head_start + (size - head_start) * number // count
            file.seek(max(start, end - 1))
            file.readline()
            end = file.tell()
            if end == start:
                continue
            found.append(Lines(start=start, end=end, first=line))
            file.seek(start)
            while (left := end - file.tell()) > 0:
                line += file.read(min(_PIECE, left)).count(b"\n")
            start = end
    return found
