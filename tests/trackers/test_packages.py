"""Tests of what the real packages keep, offline, read back with their own readers or formats."""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolemesh.coordinator.recipe.sections.trackers import (
    MlflowSpec,
    SwanlabSpec,
    TrackerSpec,
    TrackioSpec,
    WandbSpec,
)
from rolemesh.coordinator.run.results.metrics import MetricsWriter
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunRecord
from rolemesh.coordinator.trackers.outside import outside_trackers
from rolemesh.coordinator.trackers.registry import check_trackers
from rolemesh.coordinator.trackers.tracker import RunFacts

RUN_ID = "tiny-20261121-120000-abcdef"
CONFIG = {"run": {"seed": 3, "steps": 3}, "algorithm": {"type": "ppo"}}
BEFORE = {"held_out/score": 0.125, "held_out/pass@2": 0.5}
RECORDS = [
    {"step": step, "reward/mean": 0.1 * step, "kl/mean": -1e-7 * step, "tokens": 1000 * step}
    for step in range(1, 4)
]
LONG_S = 60.0
"""Nothing of a test may take that long: a hang."""

Series = dict[str, dict[int, float]]
"""Value by name and step."""


async def track(folder: Path, spec: TrackerSpec) -> Series:
    """Writes the steps as a run does; returns what the run's own files and calls say."""
    check_trackers([spec])
    events: list[str] = []
    facts = RunFacts(run_id=RUN_ID, name="tiny", directory=str(folder))
    (tracker,) = outside_trackers([spec], folder / "logs", events.append)
    await tracker.start(facts, CONFIG)
    store = MemoryStateStore()
    await store.create_run(
        RunRecord(
            run_id=RUN_ID, name="tiny", num_steps=3, directory="", created_at=0.0, updated_at=0.0
        )
    )
    writer = MetricsWriter(facts, store, [tracker])
    await writer.write_before(BEFORE)
    for record in RECORDS:
        await writer.write_step(record)
    await writer.finish_trackers("succeeded", LONG_S)
    writer.close()
    log = "\n".join(path.read_text() for path in (folder / "logs").iterdir())
    assert events == [], log
    expected: Series = {name: {0: value} for name, value in BEFORE.items()}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        scalars = json.loads(line)
        step = scalars.pop("step")
        for name, value in scalars.items():
            expected.setdefault(name, {})[step] = value
    return expected


def records_of(path: Path) -> Iterator[bytes]:
    """Records of a log of LevelDB's format (blocks of 32 KiB) after a header of 7 bytes."""
    data, block, head = path.read_bytes(), 32768, struct.Struct("<IHB")
    place, record = 7, b""
    while place + head.size <= len(data):
        if block - place % block < head.size:
            place += block - place % block
            continue
        _, length, kind = head.unpack_from(data, place)
        record += data[place + head.size : place + head.size + length]
        place += head.size + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


async def test_wandb_keeps_every_scalar_offline(tmp_path: Path) -> None:
    expected = await track(tmp_path, WandbSpec(project="p", group="g", mode="offline"))
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    (path,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    kept: Series = {}
    run: Any = None
    exit_codes = []
    for data in records_of(path):
        record = records.Record.FromString(data)
        if record.HasField("run"):
            run = record.run
        elif record.HasField("exit"):
            exit_codes.append(record.exit.exit_code)
        elif record.HasField("history"):
            for item in record.history.item:
                name = item.key or ".".join(item.nested_key)
                if not name.startswith("_"):
                    kept.setdefault(name, {})[record.history.step.num] = json.loads(item.value_json)
    assert kept == expected
    assert exit_codes == [0]
    assert (run.project, run.run_group, run.run_id) == ("p", "g", RUN_ID)
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["algorithm"] == {"type": "ppo"}


async def test_mlflow_keeps_every_scalar_in_a_database(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    expected = await track(tmp_path, MlflowSpec(tracking_uri=uri, experiment="e"))
    client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("e")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == run.data.tags["rolemesh.run_id"] == RUN_ID
    assert run.info.status == "FINISHED"
    assert run.data.params == {"run.seed": "3", "run.steps": "3", "algorithm.type": "ppo"}
    # MLflow allows no @ in a name.
    expected["held_out/pass_2"] = expected.pop("held_out/pass@2")
    kept = {
        name: {
            point.step: point.value for point in client.get_metric_history(run.info.run_id, name)
        }
        for name in run.data.metrics
    }
    assert kept == expected


async def test_trackio_keeps_every_scalar_locally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both the tracker's process and the reader here find the folder by it.
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    expected = await track(tmp_path, TrackioSpec(project="p"))
    (run,) = importlib.import_module("trackio.api").Api().runs("p")
    assert run.name == RUN_ID
    assert run.config["algorithm"] == {"type": "ppo"}
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    kept: Series = {}
    for entry in storage.get_logs("p", RUN_ID):
        for name in expected.keys() & entry.keys():
            kept.setdefault(name, {})[entry["step"]] = entry[name]
    assert kept == expected


async def test_swanlab_keeps_every_scalar_offline(tmp_path: Path) -> None:
    expected = await track(tmp_path, SwanlabSpec(project="p", mode="offline"))
    records = importlib.import_module("swanlab.proto.swanlab.record.v1.record_pb2")
    (path,) = (tmp_path / "swanlab").glob("run-*/*.swanlab")
    kept: Series = {}
    for data in records_of(path):
        record = records.Record.FromString(data)
        if record.HasField("scalar") and not record.scalar.key.startswith("__"):
            kept.setdefault(record.scalar.key, {})[record.scalar.step] = record.scalar.value.number
    assert kept == expected
    assert "ppo" in (path.parent / "files" / "config.yaml").read_text()


async def test_a_server_that_nobody_runs_costs_the_run_nothing_but_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    events: list[str] = []
    (tracker,) = outside_trackers([WandbSpec()], tmp_path / "logs", events.append)
    await tracker.start(RunFacts(run_id=RUN_ID, name="tiny", directory=str(tmp_path)), CONFIG)
    tracker.log(1, {"reward/mean": 0.5})
    await tracker.finish("succeeded", 3.0)
    assert "tracker wandb failed, and the run goes on" in events[0]
    assert events[1:] == ["tracker wandb lost 1 of 1 steps"]
