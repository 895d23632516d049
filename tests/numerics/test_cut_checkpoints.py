"""Checkpoints from cuts: the bytes of those from live weights, while the weights move on."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cut_ranks import silent, slots_of, train, write_beside_training
from support.parallel_training import Job, near_policy
from support.rank_processes import RankPool
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch

from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec, PpoValueLossSpec
from rolemesh.engine.train.cuts.slots import CutNotFoundError
from rolemesh.engine.train.trainer import Trainer
from rolemesh.engine.transport.slots.slot_files import SlotHeldError
from rolemesh.engine.transport.slots.slot_readers import SlotGivenUpError
from rolemesh.engine.transport.slots.slots import Slot
from rolemesh.engine.weights.checkpoints import writing as checkpoint_writing
from rolemesh.engine.weights.checkpoints.writing import CheckpointRoomError

LAYOUTS = {"tp": TrainLayout(tp=2), "fsdp": TrainLayout(dp=2, fsdp=2), "dp": TrainLayout(dp=2)}
OPTIMIZER = OptimizerSpec(learning_rate=1e-3, warmup_steps=4)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    batch, folders = token_batch(), tmp_path_factory.mktemp("models")
    tied = write_tiny_llama(folders / "tied", seed=4)
    untied = write_tiny_llama(folders / "untied", seed=5, tied=False)
    scored = near_policy(
        batch, new_trainer("policy", tied).compute_logprobs(batch, temperature=1.0)["logprobs"]
    )
    return {
        "policy": Job(tied, scored, PpoPolicyLossSpec()),
        "critic": Job(untied, batch, PpoValueLossSpec(), kind="critic"),
    }


@pytest.fixture
def directory() -> Iterator[Path]:
    """A folder in shared memory, as that of services, but of this test alone."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="cuts-") as folder:
        yield Path(folder)


def new_trainer(kind: str, folder: Path) -> Trainer:
    make = Trainer.policy if kind == "policy" else Trainer.critic
    return make(ModelSpec(path=folder, compute_dtype="float32"), OPTIMIZER)


def files_of(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.iterdir()}


class HeldWriter:
    """Progress that stops at its first sign until it may go on."""

    def __init__(self) -> None:
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.has_begun.set()
        assert self.may_go_on.wait(60)


# --- the same bytes -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["policy", "critic"])
@pytest.mark.parametrize("has_stepped", [True, False])
def test_a_cut_is_written_as_what_was_live_when_it_was_saved(
    jobs: dict[str, Job], directory: Path, tmp_path: Path, kind: str, has_stepped: bool
) -> None:
    job = jobs[kind]
    trainer = new_trainer(kind, job.folder)
    slots = slots_of(trainer, directory)
    if has_stepped:
        train(trainer, job, 1)
    torch.rand(3)
    extra = {"kl_coefficient": 0.1 + 0.2, "nested": {"b": 1, "a": [1.5, None]}}
    trainer.save_cut(slots, 7, extra, silent)
    trainer.save(tmp_path / "live", extra)
    # All that a checkpoint says changes before a byte is written.
    cut = trainer.hold_cut(slots, 7)
    train(trainer, job, 2)
    trainer.save_cut(slots, 8, {}, silent)
    cut.write(tmp_path / "cut", None, silent)
    slots.close()
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "live")
    other = new_trainer(kind, job.folder)
    assert other.load(tmp_path / "cut") == extra


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_write_a_cut_while_they_train_on_with_collective_operations(
    rank_pool: RankPool, jobs: dict[str, Job], directory: Path, tmp_path: Path, layout: str
) -> None:
    job = replace(jobs["policy"], layout=LAYOUTS[layout])
    rank_pool.run(write_beside_training, 2, job, directory, tmp_path)
    cut, live = files_of(tmp_path / "cut"), files_of(tmp_path / "live")
    assert cut == live
    assert {f"random-rank{rank:05}.json" for rank in range(2)} <= cut.keys()


# --- a slot that is read ------------------------------------------------------------------


def test_a_slot_that_is_read_is_not_written_and_the_other_one_is(
    jobs: dict[str, Job], directory: Path, tmp_path: Path
) -> None:
    trainer, writer = new_trainer("policy", jobs["policy"].folder), HeldWriter()
    slots = slots_of(trainer, directory)
    trainer.save_cut(slots, 7, {}, silent)
    trainer.save(tmp_path / "live")
    with ThreadPoolExecutor(1) as thread:
        written = thread.submit(trainer.hold_cut(slots, 7).write, tmp_path / "cut", None, writer)
        assert writer.has_begun.wait(60)
        trainer.save_cut(slots, 8, {}, silent)
        with pytest.raises(SlotHeldError, match="once SaveCheckpoint has answered"):
            trainer.save_cut(slots, 9, {}, silent)
        # Going back beside it changes nothing that it reads.
        trainer.restore_cut(slots, 7)
        writer.may_go_on.set()
        written.result(60)
    trainer.save_cut(slots, 9, {}, silent)
    slots.close()
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "live")


def test_slots_that_are_closed_end_their_reader_first_and_let_the_lock_go(
    jobs: dict[str, Job], directory: Path, tmp_path: Path
) -> None:
    trainer, writer = new_trainer("policy", jobs["policy"].folder), HeldWriter()
    slots = slots_of(trainer, directory)
    trainer.save_cut(slots, 7, {}, silent)
    with ThreadPoolExecutor(2) as threads:
        cut = trainer.hold_cut(slots, 7)
        written = threads.submit(cut.write, tmp_path / "cut", None, writer)
        assert writer.has_begun.wait(60)
        closed = threads.submit(slots.close)
        assert cut._reading._is_given_up.wait(60)
        # The lock stays as long as the reader does.
        assert not closed.done()
        writer.may_go_on.set()
        with pytest.raises(SlotGivenUpError):
            written.result(60)
        closed.result(60)
    assert list(tmp_path.iterdir()) == []
    # The lock is free for the process that comes after.
    slot = Slot.open(slots.owner, 7 % 2)
    assert slot is not None
    slot.close()


def test_a_cut_that_is_not_there_is_not_held(jobs: dict[str, Job], directory: Path) -> None:
    trainer = new_trainer("policy", jobs["policy"].folder)
    slots = slots_of(trainer, directory)
    trainer.save_cut(slots, 7, {}, silent)
    with pytest.raises(CutNotFoundError, match=r"it has those of steps \[7\]"):
        trainer.hold_cut(slots, 5)
    trainer.save_cut(slots, 9, {}, silent)
    slots.close()


# --- room ---------------------------------------------------------------------------------


def from_cut(trainer: Trainer, directory: Path, target: Path) -> None:
    slots = slots_of(trainer, directory)
    try:
        trainer.save_cut(slots, 7, {}, silent)
        trainer.hold_cut(slots, 7).write(target, None, silent)
    finally:
        slots.close()


def live(trainer: Trainer, directory: Path, target: Path) -> None:
    trainer.save(target)


@pytest.mark.parametrize("save", [from_cut, live])
def test_a_disk_without_room_is_refused_before_a_byte_is_written(
    jobs: dict[str, Job],
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    save: Callable[[Trainer, Path, Path], None],
) -> None:
    trainer = new_trainer("policy", jobs["policy"].folder)
    train(trainer, jobs["policy"], 1)
    save(trainer, directory, tmp_path / "first")
    taken = sum(len(content) for content in files_of(tmp_path / "first").values())
    statvfs, asked = os.statvfs, []

    def poor(path: Any) -> Any:
        status = statvfs(path)
        if not Path(path).is_relative_to(tmp_path):
            return status
        asked.append(Path(path))
        fields = list(status)
        fields[0] = fields[1] = 1
        fields[4] = taken  # f_bavail: the bytes of the files alone
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", poor)
    target = tmp_path / "new" / "checkpoint"
    with pytest.raises(CheckpointRoomError) as refused:
        save(trainer, directory, target)
    for word in (str(target), f"{taken} free", "run.checkpoint.keep"):
        assert word in str(refused.value)
    assert int(str(refused.value).partition(" takes ")[2].split()[0]) > taken
    assert asked == [tmp_path]
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


@pytest.mark.parametrize("save", [from_cut, live])
def test_a_disk_that_fills_up_while_it_is_written_leaves_nothing(
    jobs: dict[str, Job],
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    save: Callable[[Trainer, Path, Path], None],
) -> None:
    trainer = new_trainer("policy", jobs["policy"].folder)
    train(trainer, jobs["policy"], 1)
    save_file, written = checkpoint_writing.save_file, []

    def full(tensors: Any, path: Path) -> None:
        if written:
            raise OSError(28, "No space left on device", str(path))
        save_file(tensors, path)
        written.append(path)

    monkeypatch.setattr(checkpoint_writing, "save_file", full)
    with pytest.raises(CheckpointRoomError, match="No space left on device"):
        save(trainer, directory, tmp_path / "checkpoint")
    assert written
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_does_not_see_the_folder_of_rank_0_says_so(tmp_path: Path) -> None:
    """As on another host, whose disk it is not."""
    with pytest.raises(ValueError, match=r"rank 2 does not see .*on a disk that all of them share"):
        checkpoint_writing.write_part(tmp_path / "absent", {}, rank=2)
