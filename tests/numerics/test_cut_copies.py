"""Cuts of a GPU: copied behind what the rank does next, and whole before their state changes."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cut_ranks import RUN, held, silent, train
from support.parallel_training import Job
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import forward_backward
from torch.overrides import TorchFunctionMode

from rolemesh.engine.specs import ModelSpec, OptimizerSpec, SftLossSpec
from rolemesh.engine.train.cuts import copies as cut_copies
from rolemesh.engine.train.cuts import slots as cut_slots
from rolemesh.engine.train.cuts.copies import CutCopyError
from rolemesh.engine.train.cuts.slots import CutSlots, whole_cuts
from rolemesh.engine.train.trainer import Trainer
from rolemesh.engine.transport.slots.slot_files import SlotOwner

LATE_S = 0.5


class LateStream(TorchFunctionMode):
    """A stream that copies nothing until it may, and then all that was queued."""

    may_copy = threading.Event()

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._queued: list[Callable[[], object]] = []

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        with self:
            yield

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.Tensor.copy_:
            return func(*args, **(kwargs or {}))
        assert kwargs == {"non_blocking": True}
        place, tensor = args
        self._queued.append(lambda: place.copy_(tensor.detach()))
        return place

    def mark(self) -> LateStream:
        return self

    def synchronize(self) -> None:
        assert self.may_copy.wait(60)
        with torch.no_grad():
            for copy in self._queued:
                copy()


class Locks:
    """Locked memory, by address."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.num_locks = 0

    def pin(self, memory: torch.Tensor, device: torch.device) -> Callable[[], None]:
        address = memory.data_ptr()
        assert address not in self.held, "locked twice"
        self.held.add(address)
        self.num_locks += 1
        return lambda: self.held.remove(address)


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Locks]:
    """A GPU whose copies come as late as a test says, as which the CPU stands in."""
    LateStream.may_copy = threading.Event()
    found = Locks()
    monkeypatch.setattr(cut_slots, "pin", found.pin)
    monkeypatch.setattr(cut_copies, "CopyStream", LateStream)
    yield found
    LateStream.may_copy.set()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = write_tiny_llama(tmp_path_factory.mktemp("models") / "tied", seed=4)
    return Job(folder, token_batch(), SftLossSpec())


@pytest.fixture
def slots() -> Iterator[CutSlots]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="cuts-") as folder:
        made = CutSlots(SlotOwner(RUN, "actor", 0, 1, Path(folder)), "one rank")
        made.copies_behind = True
        yield made
        LateStream.may_copy.set()
        made.close()


def new_trainer(job: Job) -> Trainer:
    spec = ModelSpec(path=job.folder, compute_dtype="float32")
    return Trainer.policy(spec, OptimizerSpec(learning_rate=1e-3))


def steps_of(slots: CutSlots) -> list[int]:
    return [cut.step for cut in whole_cuts(slots.owner, slots.layout)]


def optimizer_step(trainer: Trainer, job: Job, slots: CutSlots, folder: Path) -> None:
    forward_backward(trainer, job.batch, SftLossSpec())
    # Gradients change nothing that is copied.
    assert steps_of(slots) == [1]
    trainer.optim_step()


def a_checkpoint_that_comes_back(trainer: Trainer, job: Job, slots: CutSlots, folder: Path) -> None:
    trainer.load(folder)


def an_older_cut(trainer: Trainer, job: Job, slots: CutSlots, folder: Path) -> None:
    trainer.restore_cut(slots, 1, keeps_later=True)


def sleep(trainer: Trainer, job: Job, slots: CutSlots, folder: Path) -> None:
    trainer.move_to(torch.device("cpu"))


def a_checkpoint_of_the_cut(trainer: Trainer, job: Job, slots: CutSlots, folder: Path) -> None:
    trainer.hold_cut(slots, 2).write(folder.parent / "from-cut", None, silent)


def the_end(trainer: Trainer, job: Job, slots: CutSlots, folder: Path) -> None:
    slots.close()


@pytest.mark.parametrize(
    "change",
    [
        optimizer_step,
        a_checkpoint_that_comes_back,
        an_older_cut,
        sleep,
        a_checkpoint_of_the_cut,
        the_end,
    ],
)
def test_a_cut_is_whole_before_its_state_changes(
    job: Job, slots: CutSlots, locks: Locks, tmp_path: Path, change: Any
) -> None:
    trainer = new_trainer(job)
    trainer.save(tmp_path / "checkpoint")
    LateStream.may_copy.set()
    trainer.save_cut(slots, 1, {}, silent)
    train(trainer, job, 1)
    slots.settle()
    LateStream.may_copy.clear()
    saved = held(trainer, slots, {})
    trainer.save_cut(slots, 2, {"kl": 0.25}, silent)
    # Of a process that ends now this is what the next one finds.
    assert steps_of(slots) == [1]
    threading.Timer(LATE_S, LateStream.may_copy.set).start()

    change(trainer, job, slots, tmp_path / "checkpoint")
    assert steps_of(slots) == [1, 2]
    # A part of it may pass before: a busy machine takes long for a pass.
    assert slots.waited_s > 0
    restored = trainer.restore_cut(slots, 2)
    assert restored.extra == {"kl": 0.25}
    assert held(trainer, slots, {}) == held_again(saved, [1, 2])


def held_again(saved: Any, cuts: list[int]) -> Any:
    saved.cuts = cuts
    return saved


def test_memory_of_slots_is_locked_once_and_as_long_as_they_are_held(
    job: Job, slots: CutSlots, locks: Locks
) -> None:
    LateStream.may_copy.set()
    trainer = new_trainer(job)
    for step in range(5):
        trainer.save_cut(slots, step, {}, silent)
    assert locks.num_locks == len(locks.held) == 2
    slots.close()
    assert not locks.held


def test_copies_that_fail_leave_the_older_cut_and_are_told_of(
    job: Job, slots: CutSlots, locks: Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    LateStream.may_copy.set()
    trainer = new_trainer(job)
    trainer.save_cut(slots, 1, {}, silent)
    slots.settle()

    def broken(self: LateStream) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(LateStream, "synchronize", broken)
    trainer.save_cut(slots, 2, {}, silent)
    forward_backward(trainer, job.batch, SftLossSpec())
    with pytest.raises(CutCopyError, match=r"state after step 2 .* illegal memory access"):
        trainer.optim_step()
    assert steps_of(slots) == [1]


def test_each_cut_takes_the_place_of_the_older_one_whatever_their_steps(
    job: Job, slots: CutSlots, locks: Locks
) -> None:
    trainer = new_trainer(job)
    for step, kept in [(0, [0]), (2, [0, 2]), (4, [2, 4]), (5, [4, 5]), (11, [5, 11])]:
        LateStream.may_copy.clear()
        trainer.save_cut(slots, step, {}, silent)
        # While it is copied, the newest one before it stays whole.
        assert steps_of(slots) == kept[:-1]
        LateStream.may_copy.set()
        slots.settle()
        assert steps_of(slots) == kept
    # One that is saved again takes its own.
    trainer.save_cut(slots, 5, {}, silent)
    slots.settle()
    assert steps_of(slots) == [5, 11]
