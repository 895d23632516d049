"""Results of a run, without what depends on the clock: for runs that must end alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from rolemesh.coordinator.explained.metrics import explanation

_TRAFFIC = "_bytes"
"""Ends the names of what a process that was started again has to get once more."""
_TIMED = ("time/", "coordinator/", "dataflow/", "memory/", "tokens_per_second")


def learnt_of(record: Mapping[str, float]) -> dict[str, float]:
    """What the record of a step says of learning: all but times, memory and traffic."""
    return {
        name: value
        for name, value in record.items()
        if not name.startswith(_TIMED) and not name.endswith(_TRAFFIC)
    }


def learnt(directory: Path) -> list[dict[str, float]]:
    """What metrics.jsonl says of learning."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [learnt_of(json.loads(line)) for line in lines]


def unexplained(records: Iterable[Mapping[str, float]]) -> list[str]:
    """Names of metrics that the reference does not explain."""
    names = dict.fromkeys(name for record in records for name in record)
    return [name for name in names if explanation(name) is None]


def written(directory: Path) -> dict[str, str]:
    """Hashes of checkpoints and model by file: weights, optimizer state, random state."""
    files = sorted(directory.glob("checkpoints/*/*/*")) + sorted(directory.glob("model/*"))
    return {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }
