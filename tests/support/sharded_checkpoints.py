"""Ranks that save, load and export one trainer's checkpoints."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support.parallel_training import Job, Trained, make_trainer, part_of
from support.rank_processes import RankContext
from support.updates import update_whole

from rolemesh.engine.layout.ranks import HybridLayout
from rolemesh.engine.specs import ComputeDtype
from rolemesh.engine.train.trainer import Trainer
from rolemesh.engine.weights.checkpoints import export as export_module
from rolemesh.engine.weights.checkpoints import writing as checkpoint_writing


@dataclass
class Loaded:
    """What a rank has after a load."""

    part: Trained
    steps: dict[str, float]
    """The optimizer's own count for each of its weights."""
    policy_version: int
    extra: dict[str, Any]
    draw: float
    """The next random number of torch."""
    later: dict[str, float] = field(default_factory=dict)
    """Metrics of an update after the load."""


def save(at: RankContext, job: Job, directory: Path) -> Loaded:
    """Trains and saves."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        _train(trainer, job)
        torch.manual_seed(100 + at.rank)
        trainer.save(directory, {"kl_coefficient": 0.25, "rank": at.rank})
        return _state(trainer, {})


def load(at: RankContext, job: Job, directory: Path) -> Loaded:
    """Loads."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        return _state(trainer, trainer.load(directory))


def load_and_train(at: RankContext, job: Job, directory: Path | None) -> Loaded:
    """Goes on from a checkpoint, or without one from where it would have been saved."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        if directory is None:
            _train(trainer, job)
            torch.manual_seed(100 + at.rank)
        else:
            trainer.load(directory)
        metrics = _train(trainer, job, seed=6)
        loaded = _state(trainer, {})
        loaded.later = metrics
        return loaded


def refused_load(at: RankContext, job: Job, *directories: Path) -> list[tuple[str, str, bool]]:
    """Class and message of what loads raise, and whether the trainer is as before each."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        _train(trainer, job)
        return [_refused(trainer, directory) for directory in directories]


def _refused(trainer: Trainer, directory: Path) -> tuple[str, str, bool]:
    torch.manual_seed(3)
    before = _state(trainer, {})
    torch.manual_seed(3)
    try:
        trainer.load(directory)
    except Exception as error:
        after = _state(trainer, {})
        is_same = (
            _equal(before.part.weights, after.part.weights)
            and all(
                _equal(before.part.moments[name], after.part.moments[name])
                for name in before.part.moments
            )
            and (before.steps, before.policy_version, before.draw)
            == (after.steps, after.policy_version, after.draw)
        )
        return type(error).__name__, str(error), is_same
    raise AssertionError("the load was not refused")


def killed_save(at: RankContext, job: Job, directory: Path, victim: int) -> str:
    """Saves; one rank is killed between its files. What the others raise."""
    if at.rank == victim:
        save_file = checkpoint_writing.save_file
        written: list[Path] = []

        def dying(tensors: Any, path: Path) -> None:
            if written:
                os.kill(os.getpid(), signal.SIGKILL)
            save_file(tensors, path)
            written.append(path)

        checkpoint_writing.save_file = dying
    with at.connect(HybridLayout(job.layout), timeout_s=30.0) as mesh:
        trainer = make_trainer(job, at, mesh)
        _train(trainer, job)
        try:
            trainer.save(directory)
        except Exception as error:
            return type(error).__name__
        return "saved"


def failed_save(at: RankContext, job: Job, directory: Path, victim: int) -> tuple[str, str]:
    """Saves while the disk of one rank is full; what each rank raises."""
    save_file = checkpoint_writing.save_file

    def full(tensors: Any, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        if at.rank == victim:
            checkpoint_writing.save_file = full
        try:
            trainer.save(directory)
        except Exception as error:
            return type(error).__name__, str(error)
        finally:
            checkpoint_writing.save_file = save_file
        raise AssertionError("the save did not fail")


def export(
    at: RankContext,
    job: Job,
    checkpoint: Path,
    directory: Path,
    dtype: ComputeDtype,
    file_bytes: int,
) -> None:
    """Loads a checkpoint and exports it in files and messages of few bytes."""
    before = export_module.FILE_BYTES, export_module.MESSAGE_BYTES
    export_module.FILE_BYTES, export_module.MESSAGE_BYTES = file_bytes, file_bytes // 7
    try:
        with at.connect(HybridLayout(job.layout)) as mesh:
            trainer = make_trainer(job, at, mesh)
            trainer.load(checkpoint)
            trainer.export(directory, dtype)
    finally:
        export_module.FILE_BYTES, export_module.MESSAGE_BYTES = before


def _train(trainer: Trainer, job: Job, seed: int = 5) -> dict[str, float]:
    """Two optimizer steps."""
    return update_whole(trainer, job.batch, job.loss, epochs=1, mini_batch_rows=4, seed=seed)


def _state(trainer: Trainer, extra: dict[str, Any]) -> Loaded:
    return Loaded(
        part=part_of(trainer, {}, []),
        steps={name: float(step) for name, step in trainer.optimizer_state("step").items()},
        policy_version=trainer.policy_version,
        extra=extra,
        draw=float(torch.rand(())),
    )


def _equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(tensor, right[name]) for name, tensor in left.items()
    )
