"""Results of a run, without what depends on the clock: for runs that must end alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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


def learnt(directory: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl and experts.jsonl say of learning; each has a step once at most."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return with_loads([learnt_of(json.loads(line)) for line in lines], directory)


def with_loads(records: Iterable[Mapping[str, float]], directory: Path) -> list[dict[str, Any]]:
    """Records with the loads of experts of their steps; those of a run without a mixture as is."""
    path = directory / "experts.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps)), "a step has two lines, or steps are out of order"
    loads = {line["step"]: {"expert_loads": line["roles"]} for line in lines}
    whole = [{**record, **loads.pop(int(record["step"]), {})} for record in records]
    assert not loads, "steps that do not count have lines"
    return whole


def unexplained(records: Iterable[Mapping[str, float]]) -> list[str]:
    """Names of metrics that the reference does not explain."""
    names = dict.fromkeys(name for record in records for name in record)
    return [name for name in names if explanation(name) is None]


def curve(directory: Path, name: str) -> list[float]:
    """A metric, step by step."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)[name] for line in lines]


def written(directory: Path) -> dict[str, str]:
    """Hashes of checkpoints and model by file: weights, optimizer state, random state."""
    files = sorted(directory.glob("checkpoints/*/*/*")) + sorted(directory.glob("model/*"))
    return {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }
