"""Work whose memory is estimated, and what it really takes on a CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.allocations import allocator_peak
from support.rank_processes import RankContext

from rolemesh.engine.fit.rank_memory import RankWork, work_rows
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.models.scoring_model import VALUE_HEAD, ScoringModel
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec
from rolemesh.engine.train.trainer import Trainer

TOLERANCE = 0.1
"""What was promised. Found is less: what kernels take for themselves, and the batch."""

RELEASE_S = 60.0
"""For a thread of gloo to run, while other tests load the machine."""


def work_of(folder: Path, **changes: Any) -> RankWork:
    """An update of a policy on one rank, but for what changes."""
    model = {"path": folder, "micro_batch_tokens": 512, "logprob_chunk_tokens": 128}
    model |= changes.pop("model", {})
    return RankWork(
        **{
            "kind": "policy",
            "model": ModelSpec.model_validate(model),
            "layout": HybridLayout(TrainLayout()),
            "optimizer": OptimizerSpec(),
            "loss": PpoPolicyLossSpec(),
            "row_tokens": 128,
            "prompt_tokens": 32,
            **changes,
        }
    )


def really(work: RankWork, mesh: RankMesh) -> int:
    """The allocator's peak while a trainer is made and makes two updates."""
    batch, plan = work_rows(work)
    assert work.optimizer is not None
    optimizer = work.optimizer

    def train() -> None:
        model = None if work.kind == "policy" else ScoringModel(work.model, VALUE_HEAD, mesh=mesh)
        trainer = (
            Trainer.policy(work.model, optimizer, mesh=mesh)
            if model is None
            else Trainer(model, optimizer)
        )
        assert work.loss is not None
        for _ in range(2):
            trainer.update(batch, work.loss, plan)

    return allocator_peak(train)


def measure(at: RankContext, work: RankWork) -> int:
    """The least peak of a rank of several."""
    with at.connect(work.layout) as mesh:
        # Gloo keeps a message until a thread of its own lets go of it: now and then into the peak.
        return min(really(work, mesh) for _ in range(4))


@contextmanager
def exchanges_released() -> Iterator[None]:
    """Exchanges return once gloo's thread has let go of the messages, which are much of a peak."""
    exchange = dist.all_to_all_single

    def released(into: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        before = _holders(into, given)
        exchange(into, given, *args, **kwargs)
        deadline = time.monotonic() + RELEASE_S
        while _holders(into, given) > before:
            assert time.monotonic() < deadline, "gloo still holds a message that has been sent"
            time.sleep(0)

    with patch.object(dist, "all_to_all_single", released):
        yield


def _holders(*tensors: torch.Tensor) -> int:
    """How many hold the memory of tensors."""
    storages = [one.untyped_storage() for one in tensors]
    return sum(torch._C._storage_Use_Count(one._cdata) for one in storages)
