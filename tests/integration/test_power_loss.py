"""Power that is lost at any write of a checkpoint: the newest whole one loads, and none lies."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_roles import until
from support.power_loss import Disk, Image, write_image

from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.run.saving.checkpoints import COMMITTED, Checkpoints, committed_steps
from rolemesh.coordinator.run.saving.kept_checkpoints import kept_checkpoints, prune
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.engine.weights.checkpoints.checkpoint import open_checkpoint
from rolemesh.engine.weights.checkpoints.writing import write_checkpoint
from rolemesh.engine.weights.sharded_tensors import ShardedTensors
from rolemesh.v1 import weights_pb2

ROLES = ("actor", "critic")
KEEP = 2


class Role:
    """A trained role: writes real checkpoints of a tensor that says the step."""

    capabilities = None

    def __init__(self, role: str) -> None:
        self.role = self.service = role
        self.client = self

    def save_checkpoint(self, key: Any, directory: str, *, from_cut: bool) -> Role:
        tensors = {"weight": torch.full((3,), float(key.step)), "bias": torch.ones(2)}
        groups = {"weights": ShardedTensors.whole(tensors)}
        write_checkpoint(Path(directory), groups, {"step": key.step})
        self._directory = Path(directory)
        return self

    async def result(self, on_progress: Any) -> weights_pb2.CheckpointResult:
        manifest = (self._directory / "manifest.json").read_bytes()
        return weights_pb2.CheckpointResult(manifest_sha256=hashlib.sha256(manifest).hexdigest())

    async def make(self, key: Any, stage: str, call: Any, note: Any, **others: Any) -> Any:
        return await call(lambda progress: None)


class Pools:
    @asynccontextmanager
    async def awake(self, service: str, step: int) -> AsyncIterator[None]:
        yield


@pytest.fixture
def images(tmp_path: Path) -> Any:
    """Writes trees down, each in a folder of its own."""
    numbers = iter(range(10**6))

    def write(image: Image) -> Path:
        folder = tmp_path / "images" / str(next(numbers))
        folder.mkdir(parents=True)
        write_image(image, folder)
        return folder

    return write


def checkpoints(directory: Path) -> Checkpoints:
    roles: Any = [Role(role) for role in ROLES]
    journal = Journal(MemoryStateStore(), "run-1", epoch=1)
    pools: Any = Pools()
    return Checkpoints(
        directory,
        lambda: roles,
        journal,
        pools,
        keep=KEEP,
        best=lambda steps: None,
        on_phase=lambda *told: None,
    )


def newest_of(directory: Path) -> int:
    """Step of the newest checkpoint; every one that counts as complete is read to the last byte."""
    for kept in kept_checkpoints(directory, verify=True):
        assert kept.damage == "", kept
        assert kept.roles == ROLES
    steps = committed_steps(directory)
    if not steps:
        return 0
    for role in ROLES:
        reader = open_checkpoint(directory / f"step-{steps[-1]:08}" / role)
        assert reader.state["step"] == steps[-1]
        whole = dict(reader.whole("weights", ["weight"]))
        assert whole["weight"].tolist() == [float(steps[-1])] * 3
    return steps[-1]


async def test_power_lost_while_checkpoints_are_saved(tmp_path: Path, images: Any) -> None:
    run = tmp_path / "disk" / "run"
    run.parent.mkdir()
    saved = 0

    def check(image: Image) -> None:
        newest = newest_of(images(image) / "run" / "checkpoints")
        assert saved <= newest <= saved + 1, (saved, sorted(image))

    disk = Disk(run.parent, check)
    with disk.watched():
        kept = checkpoints(run / "checkpoints")
        for step in (1, 2, 3):
            await kept.save(step, {"next_prompt": step})
            # It was promised: from here on it is there.
            saved = step
            disk.promised()
    assert committed_steps(run / "checkpoints") == [2, 3]
    assert disk.num_images > 100


async def test_power_lost_while_a_failed_attempt_is_replaced(tmp_path: Path, images: Any) -> None:
    run = tmp_path / "disk" / "run"
    kept = checkpoints(run / "checkpoints")
    await kept.save(1, {})
    await kept.save(2, {})
    (kept.folder(2) / COMMITTED).unlink()
    os.sync()

    def check(image: Image) -> None:
        assert newest_of(images(image) / "run" / "checkpoints") in (1, 2)

    disk = Disk(run.parent, check)
    with disk.watched():
        await kept.save(2, {})
    assert newest_of(run / "checkpoints") == 2


async def test_power_lost_while_checkpoints_are_pruned(tmp_path: Path, images: Any) -> None:
    directory = tmp_path / "disk" / "checkpoints"
    kept = checkpoints(directory)
    await kept.save(1, {})
    await kept.save(2, {})

    def check(image: Image) -> None:
        assert newest_of(images(image) / "checkpoints") == 2

    with Disk(directory.parent, check).watched():
        assert prune(directory, 1, kept_checkpoints(directory, verify=True))[0] == [1]


async def test_what_an_interrupted_checkpoint_has_left_goes_with_a_newer_one(
    tmp_path: Path,
) -> None:
    kept = checkpoints(tmp_path)
    for step in (1, 5):
        kept.folder(step).mkdir(parents=True)
        (kept.folder(step) / "weights").write_bytes(bytes(8))
    await kept.save(2, {})
    assert not kept.folder(1).exists()
    # That may be the next one to be written.
    assert kept.folder(5).exists()
    kept.folder(1).mkdir()
    assert prune(tmp_path, 1, kept_checkpoints(tmp_path, verify=True))[0] == [1]
    assert not kept.folder(1).exists()


async def test_a_marker_that_cannot_be_read_does_not_count_and_is_not_removed(
    tmp_path: Path,
) -> None:
    kept = checkpoints(tmp_path)
    for step in (1, 2):
        await kept.save(step, {})
    (kept.folder(2) / COMMITTED).write_text("{")
    await kept.save(3, {})
    assert kept.committed() == [1, 3]
    assert committed_steps(tmp_path) == [1, 2, 3]
    # Its step comes again.
    await kept.save(2, {})
    assert kept.committed() == [2, 3]
    assert (tmp_path / "step-00000002.damaged" / COMMITTED).read_text() == "{"


async def test_a_checkpoint_that_is_being_written_is_not_taken_for_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = asyncio.Event()
    answer = Role.result

    async def result(role: Role, on_progress: Any) -> weights_pb2.CheckpointResult:
        if role._directory.parent.name.endswith("1"):
            await may_go_on.wait()
        return await answer(role, on_progress)

    monkeypatch.setattr(Role, "result", result)
    kept = checkpoints(tmp_path)
    older = asyncio.create_task(kept.save(1, {}))
    await until(kept.folder(1).exists)
    # The roles are others: these here remember one folder.
    kept._trained = lambda: [Role(role) for role in ROLES]  # type: ignore[misc, list-item]
    await kept.save(2, {})
    may_go_on.set()
    await older
    assert committed_steps(tmp_path) == [1, 2]
