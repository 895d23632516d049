"""Sources of rows: each loaded into training and held-out rows that share no prompt."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence
from typing import Any

from rolemesh.engine.data import jsonl
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The rows of one source, in its own order."""

    spec: SourceSpec
    field: str
    """Its field in the recipe, e.g. "data" or "data.sources.0.data"."""
    train: Sequence[PromptRow]
    held_out: Sequence[PromptRow]
    weight: float = 1.0
    """Share in a mixture."""
    num_repeated: int = 0
    """Training rows left out because another source of the mixture holds the prompt out."""


def load_sources(spec: DataSpec, field: str) -> list[Source]:
    """Loads the rows of each source of a data section; one source unless it is a mixture.

    Args:
        spec: The section.
        field: Its field in the recipe, for messages, e.g. "data".

    Raises:
        DataInvalidError: A file cannot be read, or a row is invalid.
        ValueError: A reasoning-gym task cannot give the requested rows.
    """
    if not isinstance(spec, MixtureSpec):
        return [_load(spec, field)]
    sources = [
        _load(source.data, f"{field}.sources.{number}.data", source.weight)
        for number, source in enumerate(spec.sources)
    ]
    return _without_shared_prompts(sources)


def _without_shared_prompts(sources: Sequence[Source]) -> list[Source]:
    """Removes training rows whose prompt is held out by any source.

    A single source has none. Two sources may have equal prompts by chance (a task with two
    settings), and neither knows the prompts of the other.
    """
    held_out = {row.identity for source in sources for row in source.held_out}
    kept = []
    for source in sources:
        train = [row for row in source.train if row.identity not in held_out]
        num_repeated = len(source.train) - len(train)
        kept.append(dataclasses.replace(source, train=train, num_repeated=num_repeated))
    return kept


def _load(spec: Any, field: str, weight: float = 1.0) -> Source:
    if isinstance(spec, ReasoningGymSpec):
        from rolemesh.engine.data import reasoning_gym

        train, held_out = reasoning_gym.load(spec)
    else:
        train, held_out = _load_stored(spec, field)
    return Source(spec=spec, field=field, train=train, held_out=held_out, weight=weight)


def _load_stored(spec: StoredRowsSpec, field: str) -> tuple[list[PromptRow], list[PromptRow]]:
    reader = RowReader(spec, field)
    train = [reader.read(*record) for record in _records(spec, field, reader, held_out=False)]
    if spec.held_out_size:
        return draw_held_out(train, spec, field)
    held_out_field = spec.held_out_field()
    if held_out_field is None:
        return train, []
    held_out = [reader.read(*record) for record in _records(spec, field, reader, held_out=True)]
    seen = {row.identity for row in train}
    for number, row in enumerate(held_out, start=1):
        if row.identity in seen:
            raise DataInvalidError(
                f"{row.where}: prompt {number} is also a training prompt; a held-out score over it "
                f"would mean nothing: take it out of one of both, or replace "
                f"{field}.{held_out_field} by {field}.held_out_size"
            )
    return train, held_out


def _records(
    spec: StoredRowsSpec, field: str, reader: RowReader, *, held_out: bool
) -> Iterable[tuple[Any, str]]:
    # Held-out ones are asked for only where the spec names some.
    if isinstance(spec, HfDatasetSpec):
        from rolemesh.engine.data import tables

        split = spec.held_out_split if held_out else spec.split
        assert split is not None
        return tables.hf_records(spec, split, field, reader.wanted)
    assert isinstance(spec, JsonlSpec | ParquetSpec)
    path = spec.held_out_path if held_out else spec.path
    path_field = f"{field}.held_out_path" if held_out else f"{field}.path"
    assert path is not None
    if isinstance(spec, JsonlSpec):
        return jsonl.records(path, path_field)
    from rolemesh.engine.data import tables

    return tables.parquet_records(path, path_field, reader.wanted)


def draw_held_out(
    rows: Sequence[PromptRow], spec: StoredRowsSpec, field: str
) -> tuple[list[PromptRow], list[PromptRow]]:
    """Draws distinct prompts to hold out; no row with one of them is left for training.

    Of no rows it draws none: that they are missing is the fault to name.
    """
    if not rows:
        return [], []
    order = list(range(len(rows)))
    random.Random(f"{spec.seed}/held_out").shuffle(order)
    drawn: dict[str, int] = {}
    for at in order:
        if len(drawn) == spec.held_out_size:
            break
        drawn.setdefault(rows[at].identity, at)
    train = [row for row in rows if row.identity not in drawn]
    if len(drawn) < spec.held_out_size or not train:
        raise DataInvalidError(
            f"{field}.held_out_size is {spec.held_out_size}, but there are "
            f"{len({row.identity for row in rows})} distinct prompts in all: lower it"
        )
    return train, [rows[at] for at in sorted(drawn.values())]
