"""Records of Arrow tables: Parquet files, and folders as the Hugging Face library writes them.

Only pyarrow reads them: a folder holds tables and JSON, and no code of a data set is run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from rolemesh.engine.data.rows import DataInvalidError
from rolemesh.engine.specs import HfDatasetSpec, folder_of_split

ROWS_AT_ONCE = 4096
"""Rows that are in memory together."""

Columns = Callable[[Sequence[str]], list[str]]
"""Returns those columns of a table that are read."""


def parquet_records(
    path: Path, field: str, columns: Columns, rows_at_once: int = ROWS_AT_ONCE
) -> Iterator[tuple[Any, str]]:
    """Yields each record of a Parquet file, or of all files of a folder in order of their names.

    Raises:
        DataInvalidError: There is no such file, or it cannot be read.
    """
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise DataInvalidError(f"{field} {path} holds no .parquet file: check it")
    for file in files:
        yield from _parquet_file(file, field, columns, rows_at_once)


def hf_records(
    spec: HfDatasetSpec,
    split: str,
    field: str,
    columns: Columns,
    rows_at_once: int = ROWS_AT_ONCE,
) -> Iterator[tuple[Any, str]]:
    """Yields each record of one split of a folder.

    Args:
        spec: The source, which names the folder.
        split: Name of the split.
        field: Field of the source in the recipe, e.g. "data".
        columns: Chooses the columns to read.
        rows_at_once: Rows that are in memory together.

    Raises:
        DataInvalidError: The folder is not a data set, or has no such split.
    """
    folder = spec.path if spec.name is None else spec.path / spec.name
    where = f"{field}.path {folder}"
    if not folder.is_dir():
        raise DataInvalidError(
            f"{where} is no folder: give a local one (services fetch nothing, `rolemesh fetch` "
            "does)"
        )
    if (folder / "state.json").is_file():
        if split != "train":
            raise DataInvalidError(
                f"{where} holds a single split, but {split!r} is asked for: take the split out, "
                f"or set {field}.held_out_size"
            )
        yield from _saved(folder, where, columns, rows_at_once)
    elif (folder / "dataset_dict.json").is_file():
        splits = _json_file(folder / "dataset_dict.json", "splits", where)
        if split not in splits:
            raise DataInvalidError(f"{where} has no split {split!r}; it has {', '.join(splits)}")
        yield from _saved(folder / split, where, columns, rows_at_once)
    else:
        for file in _split_files(folder, split, where, field):
            yield from _parquet_file(file, f"{field}.path", columns, rows_at_once)


def _saved(
    folder: Path, where: str, columns: Columns, rows_at_once: int
) -> Iterator[tuple[Any, str]]:
    files = _json_file(folder / "state.json", "_data_files", where)
    for entry in files:
        name = entry.get("filename") if isinstance(entry, dict) else None
        # This also refuses a file name that leads out of the folder.
        if not isinstance(name, str) or Path(name).name != name:
            raise DataInvalidError(f"{where}: state.json names no file of the folder: {entry!r}")
        yield from _arrow_file(folder / name, where, columns, rows_at_once)


def _json_file(path: Path, key: str, where: str) -> list[Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataInvalidError(
            f"{where}: {path.name} of {path.parent} cannot be read ({error!r}): save the data set "
            "again"
        ) from error
    if not isinstance(value, list):
        raise DataInvalidError(f"{where}: {path.name} has no list {key!r}: save the data set again")
    return value


def _split_files(folder: Path, split: str, where: str, field: str) -> list[Path]:
    """Parquet files of a split, as they are named."""
    every = sorted(folder.rglob("*.parquet"))
    files = [file for file in every if folder_of_split(file, split) is not None]
    if not files:
        found = ", ".join(str(file.relative_to(folder)) for file in every[:5])
        raise DataInvalidError(
            f"{where} holds neither a saved data set nor Parquet files of split {split!r}; "
            f"Parquet files there: {found or 'none'}"
        )
    folders = sorted({file.parent for file in files})
    if len(folders) > 1:
        names = ", ".join(str(place.relative_to(folder)) for place in folders)
        raise DataInvalidError(
            f"{where} has split {split!r} in several folders ({names}): choose one by {field}.name"
        )
    return files


def _parquet_file(
    file: Path, field: str, columns: Columns, rows_at_once: int
) -> Iterator[tuple[Any, str]]:
    try:
        # No memory map: a file on a network disk that becomes shorter would crash the process.
        with pyarrow.parquet.ParquetFile(file, memory_map=False) as parquet:
            chosen = columns(parquet.schema_arrow.names)
            batches = parquet.iter_batches(batch_size=rows_at_once, columns=chosen)
            yield from _records(batches, f"{field} {file}", rows_at_once)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataInvalidError(f"{field} {file} cannot be read as Parquet ({error})") from error


def _arrow_file(
    file: Path, where: str, columns: Columns, rows_at_once: int
) -> Iterator[tuple[Any, str]]:
    try:
        with pyarrow.OSFile(str(file)) as source, pyarrow.ipc.open_stream(source) as stream:
            chosen = columns(stream.schema.names)
            batches = (batch.select(chosen) for batch in stream)
            yield from _records(batches, f"{where}, {file.name}", rows_at_once)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataInvalidError(f"{where}: {file.name} cannot be read as Arrow ({error})") from error


def _records(
    batches: Iterable[pyarrow.RecordBatch], where: str, rows_at_once: int
) -> Iterator[tuple[Any, str]]:
    index = 0
    for batch in batches:
        for first in range(0, batch.num_rows, rows_at_once):
            for record in batch.slice(first, rows_at_once).to_pylist():
                yield record, f"{where}, row {index} (counted from 0)"
                index += 1
