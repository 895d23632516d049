"""Folders of data sets as `save_to_disk` of Hugging Face's library writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc


def write_saved(folder: Path, *parts: list[dict[str, Any]]) -> Path:
    """As `Dataset.save_to_disk` lays a data set out."""
    folder.mkdir(parents=True)
    names = []
    for number, records in enumerate(parts):
        table = pyarrow.Table.from_pylist(records)
        names.append(f"data-{number:05}-of-{len(parts):05}.arrow")
        with pyarrow.ipc.new_stream(folder / names[-1], table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names], "_split": None})
    )
    (folder / "dataset_info.json").write_text("{}")
    return folder


def write_saved_splits(folder: Path, **splits: list[dict[str, Any]]) -> Path:
    for name, records in splits.items():
        write_saved(folder / name, records)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return folder
