"""Checksums are told with the version of the weights that were hashed, whatever comes meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rolemesh.services.actor.servicers import ActorWeightsServicer
from rolemesh.services.rollout.servicers import SamplerWeightsServicer
from rolemesh.v1 import weights_pb2

HASHED, NEXT = 4, 5


class Holder:
    """Has a version and weights, as trainer and sampler do."""

    policy_version = HASHED

    def weight_checksums(self) -> dict[str, str]:
        return {"weight": f"hash of {self.policy_version}"}

    def named_weights(self) -> list[tuple[str, torch.Tensor]]:
        return [("weight", torch.zeros(1))]


class BusyThread:
    """A compute thread that takes the next weights before the loop hears of the last result."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder

    async def run(self, function: Callable[..., Any]) -> Any:
        result = function()
        self._holder.policy_version = NEXT
        return result


@pytest.mark.parametrize(
    ("servicer", "asked"),
    [
        (SamplerWeightsServicer, weights_pb2.WEIGHTS_HOLDER_SAMPLER),
        (ActorWeightsServicer, weights_pb2.WEIGHTS_HOLDER_SAMPLER),
        (ActorWeightsServicer, weights_pb2.WEIGHTS_HOLDER_TRAINER),
    ],
)
async def test_the_version_is_that_of_the_hashed_weights(servicer: Any, asked: int) -> None:
    holder = Holder()
    role = SimpleNamespace(name="role", backend=holder, trainer=holder)

    async def no_others(request: object) -> list[Any]:
        return []

    runtime = SimpleNamespace(tell_others=no_others, compute=BusyThread(holder))
    request = weights_pb2.GetChecksumsRequest(holder=asked)
    answer = await servicer(role, runtime).GetChecksums(request, None)
    assert answer.policy_version == HASHED
