"""Sleep of a trainer whose parameters FSDP2 cuts over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.fake_streams import FakeStreams
from support.parallel_training import Job, make_trainer, near_policy
from support.rank_processes import RankContext, RankPool
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import update_whole

from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.parallel.data_parallel import local_part
from rolemesh.engine.sleep_memory import SleepMemory, replace_tensors
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec
from rolemesh.engine.train.trainer import Trainer


def update(at: RankContext, job: Job, sleeps: bool) -> dict[str, torch.Tensor]:
    """Two updates, between which the weights go to host memory and come back, twice."""
    with at.connect(HybridLayout(job.layout)) as mesh, pytest.MonkeyPatch.context() as patch:
        trainer = make_trainer(job, at, mesh)
        memory, here = SleepMemory(), torch.device("cpu")
        for seed in (1, 2):
            update_whole(trainer, job.batch, job.loss, epochs=1, mini_batch_rows=4, seed=seed)
            for turn in ("to_host", "to_device") * (2 * sleeps):
                # What `move_module` does, which on a CPU has nothing to move.
                tensors = list(trainer.rank_model.parameters())
                parts = [local_part(one.detach()) for one in tensors]
                with FakeStreams(patch):
                    if turn == "to_host":
                        moved = memory.to_host(parts)
                    else:
                        moved = memory.to_device(parts, here)
                    by_id = dict(zip(map(id, tensors), moved, strict=True))
                    replace_tensors(trainer.rank_model, by_id, here)
                for part in parts:
                    part.fill_(torch.nan)  # nothing may use it any more
        return {name: weight.clone() for name, weight in trainer.named_weights()}


def test_cut_parameters_sleep_and_train_on_bit_for_bit(rank_pool: RankPool, tmp_path: Path) -> None:
    # 3 ranks cut no dimension evenly: FSDP2 then puts padded copies in the place of what it gets.
    folder = write_tiny_llama(tmp_path / "llama", seed=4)
    batch = token_batch()
    trainer = Trainer.policy(ModelSpec(path=folder, compute_dtype="float32"), OptimizerSpec())
    scored = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
    layout = TrainLayout(dp=3, fsdp=3)
    job = Job(folder, near_policy(batch, scored), PpoPolicyLossSpec(), layout=layout)
    slept, awake = (rank_pool.run(update, 3, job, sleeps) for sleeps in (True, False))
    for ours, theirs in zip(slept, awake, strict=True):
        assert ours.keys() == theirs.keys()
        for name, weight in ours.items():
            assert torch.equal(weight, theirs[name]), name
