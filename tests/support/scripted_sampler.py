"""A sampler that follows a script, alone or behind RolloutService, in this process or in ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import grpc
import torch

from rolemesh.engine.data.prompts import PromptRow, PromptSet
from rolemesh.engine.layout.ranks import HybridLayout
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rollout.base import RolloutBackend
from rolemesh.engine.rollout.requests import LaterRequests, RolloutRequest, RolloutTrajectory
from rolemesh.engine.specs import GenerateSpec, LayoutSpec, RoleSpec, SamplingSpec
from rolemesh.services.runtime.calls.role import InitializeResult, ProgressCallback, Role
from rolemesh.services.runtime.calls.runtime import Runtime
from rolemesh.services.runtime.process import run_service
from rolemesh.services.runtime.servicers.rollout import RolloutServicer, SamplingRole
from rolemesh.v1 import rollout_pb2_grpc

SCRIPT = Path(__file__).resolve()
"""Run as a process, this file serves a SamplerRole."""

NUM_PROMPTS = 64


def tokens_of_seed(request: RolloutRequest) -> list[int]:
    """1 to 7 tokens that depend on the seed alone."""
    return [97 + (request.seed >> (4 * at)) % 26 for at in range(1 + request.seed % 7)]


Reason = Literal["stop", "length"]


def reason_of_seed(request: RolloutRequest, tokens: Sequence[int]) -> Reason:
    return "stop" if request.seed % 2 else "length"


class ScriptedBackend(RolloutBackend):
    """Gives each request what the script says, in whatever order; a token's log-prob is -id."""

    def __init__(
        self,
        script: Callable[[RolloutRequest], Sequence[int]] = tokens_of_seed,
        order: Callable[[Sequence[RolloutRequest]], Iterable[RolloutRequest]] = iter,
        reason: Callable[[RolloutRequest, Sequence[int]], Reason] = reason_of_seed,
    ) -> None:
        """`order` may wait, and may raise."""
        self.policy_version = 3
        self.calls: list[list[RolloutRequest]] = []
        self._script = script
        self._order = order
        self._reason = reason

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        sampling: SamplingSpec,
        later: LaterRequests | None = None,
    ) -> Iterator[RolloutTrajectory]:
        more: Sequence[RolloutRequest] | None = requests
        while more is not None:
            if more or later is None:
                self.calls.append(list(more))
            for request in self._order(more):
                tokens = self._script(request)
                yield RolloutTrajectory(
                    row=request.row,
                    completion_tokens=tokens,
                    logprobs=[-float(token) for token in tokens],
                    finish_reason=self._reason(request, tokens),
                    policy_versions=[self.policy_version] * len(tokens),
                )
            more = None if later is None else later.take(is_idle=True)

    def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> None:
        self.policy_version = policy_version

    def weight_checksums(self) -> Mapping[str, str]:
        return {}

    def sleep(self) -> int:
        return 0

    def wake(self) -> int:
        return 0

    def close(self) -> None:
        pass


class AsciiTokenizer:
    """One token a character."""

    def apply_chat_template(self, conversation: Any, **_: Any) -> str:
        return "".join(turn["content"] for turn in conversation)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(token) for token in token_ids)


def number_prompts(count: int = NUM_PROMPTS) -> PromptSet:
    """Prompts "p0" to the last; nothing is held out."""
    rows = [
        PromptRow(messages=[{"role": "user", "content": f"p{number}"}], answer=str(number))
        for number in range(count)
    ]
    return PromptSet(rows, [], tokenizer=AsciiTokenizer(), seed=1)


class SamplerSpec(RoleSpec):
    """Spec of the sampler role."""

    layout: LayoutSpec = LayoutSpec()
    generate: GenerateSpec = GenerateSpec()
    failing_rank: int = -1
    """Gives up after its third completion."""

    def rank_layout(self) -> HybridLayout:
        return HybridLayout(self.layout.layout(), self.generate.layout())


class SamplerRole(SamplingRole, Role):
    """Serves RolloutService with a script; finishes odd rows first, then even ones."""

    name: ClassVar[str] = "toy"
    spec_class = SamplerSpec

    def __init__(self, backend: ScriptedBackend | None = None) -> None:
        self._backend = backend

    def initialize(
        self, spec: SamplerSpec, run_seed: int, progress: ProgressCallback, mesh: RankMesh
    ) -> InitializeResult:
        def odd_first(requests: Sequence[RolloutRequest]) -> Iterator[RolloutRequest]:
            for number, request in enumerate([*requests[1::2], *requests[::2]]):
                if spec.failing_rank == mesh.rank and number == 3:
                    raise ValueError("the script ends here")
                yield request

        self._backend = self._backend or ScriptedBackend(order=odd_first)
        self._source: Any = SimpleNamespace(
            prompts=number_prompts(),
            tokenizer=AsciiTokenizer(),
            run_seed=run_seed,
            episodes=None,
            agents=None,
        )
        return InitializeResult()

    def register(self, server: grpc.aio.Server, runtime: Runtime) -> list[str]:
        servicer = RolloutServicer(self, runtime)
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server)
        return ["rolemesh.v1.RolloutService"]

    @property
    def backend(self) -> RolloutBackend:
        assert self._backend is not None
        return self._backend

    @property
    def source(self) -> Any:
        return self._source

    def bring_weights(self) -> int:
        return 0

    def policy_version(self) -> int:
        return 3

    def sleep(self) -> int:
        return 0

    def wake(self) -> int:
        return 0

    def close(self) -> None:
        self._backend = None


if __name__ == "__main__":
    raise SystemExit(run_service(SamplerRole.name, SamplerRole, sys.argv[1:]))
