"""Ranks that save and restore cuts of one trainer."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.parallel_training import Job, make_trainer
from support.rank_processes import RankContext
from support.updates import update_whole

from rolemesh.engine.layout.ranks import HybridLayout
from rolemesh.engine.train.cuts.slots import CutSlots, whole_cuts
from rolemesh.engine.train.optimizers.host_moments import STATE_NAMES
from rolemesh.engine.train.trainer import Trainer
from rolemesh.engine.transport.slots.slot_files import SlotOwner
from rolemesh.engine.transport.slots.slots import Slot

RUN = "cut-ranks"


@dataclass
class Held:
    """What a rank's trainer holds, bit by bit."""

    weights: dict[str, bytes]
    optimizer: dict[str, dict[str, bytes]]
    policy_version: int
    metrics: dict[str, float]
    """Of the update before."""
    extra: dict[str, Any]
    cuts: list[int]
    """Steps of the whole cuts of this rank."""
    average: dict[str, bytes]
    """Of the weights; empty where none is kept."""
    num_bytes: int = 0
    """That the last save or restore told."""


def silent(stage: str, done: int, total: int) -> None:
    """Progress that goes nowhere."""


def slots_of(trainer: Trainer, directory: Path, role: str = "actor") -> CutSlots:
    """The slots of a trainer's rank, in another place than those of services."""
    world = trainer.mesh.world
    owner = SlotOwner(RUN, role, trainer.mesh.rank, world.size, directory)
    return CutSlots(owner, trainer.mesh.layout.train.flag())


def train(trainer: Trainer, job: Job, seed: int) -> dict[str, float]:
    """One update."""
    return update_whole(trainer, job.batch, job.loss, epochs=1, mini_batch_rows=3, seed=seed)


def held(trainer: Trainer, slots: CutSlots, metrics: dict[str, float], **told: Any) -> Held:
    """What there is now."""
    return Held(
        weights={name: raw(weight) for name, weight in trainer.named_weights()},
        optimizer={
            name: {key: raw(state) for key, state in trainer.optimizer_state(name).items()}
            for name in STATE_NAMES
        },
        policy_version=trainer.policy_version,
        metrics=metrics,
        extra=told.get("extra", {}),
        cuts=[cut.step for cut in whole_cuts(slots.owner, slots.layout)],
        average={name: raw(one) for name, one in trainer.averaged_weights().items()},
        num_bytes=told.get("num_bytes", 0),
    )


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    return tensor.detach().cpu().contiguous().numpy().tobytes()


def save_and_go_on(at: RankContext, job: Job, directory: Path) -> tuple[Held, Held]:
    """Trains, saves the cuts of steps 4 and 5, and trains on; what there was at 5 and after 6."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        slots = slots_of(trainer, directory)
        train(trainer, job, 4)
        trainer.save_cut(slots, 4, {"rank": at.rank}, silent)
        metrics = train(trainer, job, 5)
        num_bytes = trainer.save_cut(slots, 5, {"rank": at.rank, "kl": 0.1 + 0.2}, silent)
        saved = held(trainer, slots, metrics, num_bytes=num_bytes)
        after = held(trainer, slots, train(trainer, job, 6))
        slots.close()
        return saved, after


def restore_and_go_on(at: RankContext, job: Job, directory: Path) -> tuple[Held, Held]:
    """A new trainer: what it has after it restored the cut of step 5, and after step 6."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        slots = slots_of(trainer, directory)
        found = trainer.restore_cut(slots, 5)
        restored = held(trainer, slots, {}, extra=found.extra, num_bytes=found.num_bytes)
        after = held(trainer, slots, train(trainer, job, 6))
        slots.close()
        return restored, after


def refused_restore(at: RankContext, job: Job, directory: Path) -> tuple[str, str, bool]:
    """Class and message of what a restoration of step 5 raises, and whether nothing changed."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        slots = slots_of(trainer, directory)
        before = held(trainer, slots, {})
        try:
            trainer.restore_cut(slots, 5)
        except Exception as error:
            return type(error).__name__, str(error), held(trainer, slots, {}) == before
        finally:
            slots.close()
        raise AssertionError("the restoration was not refused")


def refused_save(at: RankContext, job: Job, directory: Path, poor: int) -> tuple[str, str, Held]:
    """Class and message of a save of step 6 for which one rank has no room; what there is then."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        slots = slots_of(trainer, directory)
        if at.rank == poor:
            # As if the second slot had been removed, and the room were taken.
            slots.owner.path(0).unlink()
            slots = CutSlots(
                SlotOwner(RUN, "actor", at.rank, at.world_size, directory), slots.layout
            )
            reserve = Slot.create

            def poorer(owner: SlotOwner, index: int, num_bytes: int) -> Slot:
                return reserve(owner, index, 1 << 50)

            Slot.create = staticmethod(poorer)  # type: ignore[method-assign, assignment]
        try:
            trainer.save_cut(slots, 6, {}, silent)
        except Exception as error:
            return type(error).__name__, str(error), held(trainer, slots, {})
        finally:
            if at.rank == poor:
                Slot.create = staticmethod(reserve)  # type: ignore[method-assign]
            slots.close()
        raise AssertionError("the save was not refused")


def write_beside_training(at: RankContext, job: Job, slots_in: Path, folder: Path) -> Held:
    """Writes the checkpoint of a step twice: at once, and from its cut while the ranks train on.

    The ranks' writers meet in the file system alone, since their trainers use all groups meanwhile.

    Args:
        at: The rank.
        job: What to train.
        slots_in: Folder of the slots.
        folder: Gets the checkpoints "live" and "cut".

    Returns:
        What the trainer holds after the step that it made meanwhile.
    """
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        slots = slots_of(trainer, slots_in)
        train(trainer, job, 4)
        extra = {"rank": at.rank, "kl": 0.1 + 0.2}
        trainer.save_cut(slots, 4, extra, silent)
        trainer.save(folder / "live", extra)
        cut = trainer.hold_cut(slots, 4)
        told = folder / "told"
        others = [folder / f"done-{rank}" for rank in range(1, at.world_size)]
        may_end = threading.Event()

        def progress(stage: str, done: int, total: int) -> None:
            # The step is made while the first file is about to be written.
            assert may_end.wait(60)

        def ask_others(temporary: Path) -> Future[None]:
            answered: Future[None] = Future()
            told.with_suffix(".new").write_text(str(temporary))
            told.with_suffix(".new").rename(told)

            def wait() -> None:
                _until_there(others)
                answered.set_result(None)

            threading.Thread(target=wait).start()
            return answered

        def write() -> None:
            if at.rank == 0:
                cut.write(folder / "cut", ask_others, progress)
            else:
                _until_there([told])
                cut.write_part(Path(told.read_text()), progress)
                others[at.rank - 1].touch()

        writer = threading.Thread(target=write)
        writer.start()
        after = held(trainer, slots, train(trainer, job, 5))
        trainer.save_cut(slots, 5, extra, silent)
        may_end.set()
        writer.join()
        slots.close()
        return after


def _until_there(paths: list[Path]) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"one of {paths} did not come"
        time.sleep(0.01)
