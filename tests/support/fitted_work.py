"""Work whose memory is estimated, and what it really takes on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.allocations import allocator_peak
from support.rank_processes import RankContext
from torch.utils._pytree import tree_leaves

from rolemesh.engine.fit.rank_memory import RankWork, work_rows
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.models.scoring_model import VALUE_HEAD, ScoringModel
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec
from rolemesh.engine.train.trainer import Trainer

TOLERANCE = 0.1
"""What was promised. Found is less: what kernels take for themselves, and the batch."""

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "reduce_scatter_tensor",
)
"""All that our layers and FSDP call, but for messages from stage to stage."""

RELEASE_S = 60.0
"""For a thread of gloo to run, while other tests load the machine."""

UNSEEN_S = 0.01
"""For the same, where nothing that Python sees tells when it is done."""


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
    """The least peak of a rank of several: what gloo keeps out of sight may still be in one."""
    with at.connect(work.layout) as mesh, messages_released():
        return min(really(work, mesh) for _ in range(2))


@contextmanager
def messages_released() -> Iterator[None]:
    """Collectives return once gloo's thread has let go of their tensors.

    That thread lives on after the result is there, and on a machine that has other work it may
    keep a message, which is much of a toy's peak, for a whole layer.
    """
    with ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(patch.object(dist, name, _releasing(getattr(dist, name))))
        yield


def _releasing(collective: Callable[..., Any]) -> Callable[..., Any]:
    hidden = collective is dist.reduce_scatter_tensor

    def released(*args: Any, **kwargs: Any) -> Any:
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        before = _holders(tensors)
        work = collective(*args, **kwargs)
        if work is not None:
            work.wait()
        if work is not None or hidden:
            # The first holds its tensors itself; gloo makes the second of a copy and a sum.
            time.sleep(UNSEEN_S)
            return work
        deadline = time.monotonic() + RELEASE_S
        while _holders(tensors) > before:
            assert time.monotonic() < deadline, "gloo still holds a message that has been sent"
            time.sleep(0)
        return None

    return released


def _holders(tensors: list[torch.Tensor]) -> int:
    """How many hold tensors, beside Python."""
    return sum(tensor._use_count() for tensor in tensors)
