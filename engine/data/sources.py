"""Sources of rows: each loaded into training and held-out rows that share no prompt."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy

from rolemesh.engine.data.files import jsonl
from rolemesh.engine.data.files.jsonl import Lines
from rolemesh.engine.data.row_store import (
    ROWS_AT_ONCE,
    ROWS_WITH_IMAGES_AT_ONCE,
    Measure,
    Rows,
    RowStore,
)
from rolemesh.engine.data.rows import DataInvalidError, PromptRow, RowReader
from rolemesh.engine.specs import (
    DataSpec,
    HfDatasetSpec,
    JsonlSpec,
    MixtureSpec,
    ParquetSpec,
    ReasoningGymSpec,
    SourceSpec,
    StoredRowsSpec,
)

_HF_FILES = ("*.json", "*.arrow", "*.parquet")
_OBJECTS_BETWEEN_COLLECTIONS = 100_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The rows of one source, in its own order."""

    spec: SourceSpec
    field: str
    """Its field in the recipe, e.g. "data" or "data.sources.0.data"."""
    train: Rows
    held_out: Rows
    weight: float = 1.0
    """Share in a mixture."""
    num_repeated: int = 0
    """Training rows left out because another source of the mixture holds the prompt out."""
    sorting_values: Sequence[Any] | None = None
    """What a curriculum sorts the training rows by, where one does."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """Takes rows into a store as they are read."""

    store: RowStore
    with_identities: bool = True
    """Whether rows are compared by their prompts."""
    max_row_tokens: int | None = None
    """Where a bare text is cut."""
    measure: Measure | None = None
    """Finds the lengths of rows; None: any are short enough."""
    progress: Callable[[], None] | None = None
    """Called from time to time."""
    rows_at_once: int = ROWS_AT_ONCE
    """Rows that are in memory together, beside the store."""
    in_parts: Callable[[JsonlSpec, str, Path, str, Callable[[Lines], Rows]], Rows] | None = None
    """Takes the rows of a file with the help of other processes. It gets the source, its field, the
    file, the field that names that, and what takes the rows of some lines in this process."""

    def take(self, rows: Iterable[PromptRow]) -> Rows:
        """Adds rows to the store; raises what reading or measuring them raises."""
        start = len(self.store)
        source = iter(rows)
        with _few_collections():
            while some := list(itertools.islice(source, self.rows_at_once)):
                if self.max_row_tokens is not None:
                    some = [self._cut(row) for row in some]
                self.store.add(some, self.measure, with_identities=self.with_identities)
                if self.progress is not None:
                    self.progress()
        return Rows(self.store, numpy.arange(start, len(self.store), dtype=numpy.int32))

    def _cut(self, row: PromptRow) -> PromptRow:
        if row.text is None:
            return row
        return msgspec.structs.replace(row, max_text_tokens=self.max_row_tokens)


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Rows make no circles: the search for those takes a tenth of the time of reading them."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


IntakeOf = Callable[[SourceSpec], Intake]
"""The intake for the rows of a source; all sources of a section share one store."""


def load_sources(spec: DataSpec, field: str, intake_of: IntakeOf | None = None) -> list[Source]:
    """Loads the rows of each source of a data section; one source unless it is a mixture.

    Args:
        spec: The section.
        field: Its field in the recipe, for messages, e.g. "data".
        intake_of: Where the rows go; None keeps them in memory, and measures none.

    Raises:
        DataInvalidError: A file cannot be read, or a row is invalid.
        ValueError: A reasoning-gym task cannot give the requested rows.
    """
    if intake_of is None:
        intake = Intake(store=RowStore())
        return load_sources(spec, field, lambda _: intake)
    sources = [
        _load(one, one_field, intake_of(one), weight)
        for one, one_field, weight in sources_of(spec, field)
    ]
    return _without_shared_prompts(sources) if isinstance(spec, MixtureSpec) else sources


def sources_of(spec: DataSpec, field: str) -> list[tuple[SourceSpec, str, float]]:
    """The sources of a section: each with its field in the recipe, and its weight."""
    if not isinstance(spec, MixtureSpec):
        return [(spec, field, 1.0)]
    return [
        (source.data, f"{field}.sources.{number}.data", source.weight)
        for number, source in enumerate(spec.sources)
    ]


def files_of(spec: DataSpec) -> list[Path]:
    """The files that a section is read from; raises OSError if a folder cannot be listed."""
    files: list[Path] = []
    for source, _, _ in sources_of(spec, ""):
        if isinstance(source, HfDatasetSpec):
            files += [file for kind in _HF_FILES for file in sorted(source.path.rglob(kind))]
        elif isinstance(source, JsonlSpec | ParquetSpec):
            for path in (source.path, source.held_out_path):
                if path is not None:
                    files += sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    return files


def compares_prompts(spec: DataSpec) -> bool:
    """Whether rows are held out, so that training rows are compared with them."""
    for source, _, _ in sources_of(spec, ""):
        assert isinstance(source, StoredRowsSpec | ReasoningGymSpec)
        if source.held_out_size:
            return True
        if isinstance(source, StoredRowsSpec) and source.held_out_field() is not None:
            return True
    return False


def _without_shared_prompts(sources: Sequence[Source]) -> list[Source]:
    """Removes training rows whose prompt is held out by any source.

    A single source has none. Two sources may have equal prompts by chance (a task with two
    settings), and neither knows the prompts of the other.
    """
    if not any(source.held_out for source in sources):
        return list(sources)
    held_out = {identity for source in sources for identity in source.held_out.identities()}
    kept = []
    for source in sources:
        is_kept = [identity not in held_out for identity in source.train.identities()]
        train = source.train.where(numpy.array(is_kept, dtype=bool))
        num_repeated = len(source.train) - len(train)
        kept.append(dataclasses.replace(source, train=train, num_repeated=num_repeated))
    return kept


def _load(spec: SourceSpec, field: str, intake: Intake, weight: float) -> Source:
    if isinstance(spec, ReasoningGymSpec):
        from rolemesh.engine.data import reasoning_gym

        train, held_out = (intake.take(rows) for rows in reasoning_gym.load(spec))
    else:
        assert isinstance(spec, StoredRowsSpec)
        train, held_out = _load_stored(spec, field, intake)
    return Source(spec=spec, field=field, train=train, held_out=held_out, weight=weight)


def _load_stored(spec: StoredRowsSpec, field: str, intake: Intake) -> tuple[Rows, Rows]:
    reader = RowReader(spec, field)
    train = _taken(spec, field, reader, intake, held_out=False)
    if spec.held_out_size:
        return draw_held_out(train, spec, field)
    held_out_field = spec.held_out_field()
    if held_out_field is None:
        return train, train.where([])
    held_out = _taken(spec, field, reader, intake, held_out=True)
    identities = held_out.identities()
    shared = set(identities).intersection(train.identities())
    for number, identity in enumerate(identities, start=1):
        if identity in shared:
            raise DataInvalidError(
                f"{held_out[number - 1].where}: prompt {number} is also a training prompt; a "
                "held-out score over it would mean nothing: take it out of one of both, or replace "
                f"{field}.{held_out_field} by {field}.held_out_size"
            )
    return train, held_out


def _taken(
    spec: StoredRowsSpec, field: str, reader: RowReader, intake: Intake, *, held_out: bool
) -> Rows:
    if isinstance(spec, JsonlSpec):
        path, path_field = _file(spec, field, held_out=held_out)

        def take(lines: Lines) -> Rows:
            records = jsonl.records(path, path_field, lines)
            return intake.take(reader.read(record, where) for record, where in records)

        if intake.in_parts is None:
            return take(jsonl.ALL)
        return intake.in_parts(spec, field, path, path_field, take)
    records = _records(spec, field, reader, held_out=held_out)
    return intake.take(reader.read(record, where) for record, where in records)


def _file(spec: JsonlSpec | ParquetSpec, field: str, *, held_out: bool) -> tuple[Path, str]:
    """The file or folder of training or held-out rows, and the field that names it."""
    path = spec.held_out_path if held_out else spec.path
    assert path is not None
    return path, f"{field}.held_out_path" if held_out else f"{field}.path"


def _records(
    spec: StoredRowsSpec, field: str, reader: RowReader, *, held_out: bool
) -> Iterable[tuple[Any, str]]:
    from rolemesh.engine.data.files import tables

    rows_at_once = tables.ROWS_AT_ONCE if spec.images is None else ROWS_WITH_IMAGES_AT_ONCE
    # Held-out ones are asked for only where the spec names some.
    if isinstance(spec, HfDatasetSpec):
        split = spec.held_out_split if held_out else spec.split
        assert split is not None
        return tables.hf_records(spec, split, field, reader.wanted, rows_at_once)
    assert isinstance(spec, ParquetSpec)
    path, path_field = _file(spec, field, held_out=held_out)
    return tables.parquet_records(path, path_field, reader.wanted, rows_at_once)


def draw_held_out(rows: Rows, spec: StoredRowsSpec, field: str) -> tuple[Rows, Rows]:
    """Draws distinct prompts to hold out; no row with one of them is left for training.

    Of no rows it draws none: that they are missing is the fault to name.
    """
    if not rows:
        return rows, rows
    identities = rows.identities()
    order = list(range(len(rows)))
    random.Random(f"{spec.seed}/held_out").shuffle(order)
    drawn: dict[bytes, int] = {}
    for at in order:
        if len(drawn) == spec.held_out_size:
            break
        drawn.setdefault(identities[at], at)
    is_left = numpy.array([identity not in drawn for identity in identities])
    if len(drawn) < spec.held_out_size or not is_left.any():
        raise DataInvalidError(
            f"{field}.held_out_size is {spec.held_out_size}, but there are "
            f"{len(set(identities))} distinct prompts in all: lower it"
        )
    return rows.where(is_left), rows.where(sorted(drawn.values()))
