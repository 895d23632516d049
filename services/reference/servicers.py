"""A frozen policy that scores tokens; the reference is one."""

from __future__ import annotations

import grpc
import torch

from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.sleep_memory import SleepMemory, move_module
from rolemesh.engine.specs import ReferenceSpec, TeacherSpec
from rolemesh.services.runtime.calls.role import (
    InitializeResult,
    ProgressCallback,
    Role,
    add_servicers,
)
from rolemesh.services.runtime.calls.runtime import Runtime
from rolemesh.services.runtime.ranks.device import rank_device
from rolemesh.services.runtime.servicers.logprobs import LogprobServicer
from rolemesh.services.runtime.servicers.model_role import num_parameters


class FrozenPolicyRole(Role):
    """Holds a policy that is never trained."""

    def __init__(self) -> None:
        self._policy: RankModel | None = None
        self._sleep_memory = SleepMemory()

    @property
    def policy(self) -> RankModel:
        """The policy; raises NOT_INITIALIZED before Initialize."""
        return self.initialized(self._policy)

    def initialize(
        self,
        spec: ReferenceSpec | TeacherSpec,
        run_seed: int,
        progress: ProgressCallback,
        mesh: RankMesh,
    ) -> InitializeResult:
        """Loads the policy; raises ValueError where the spec names none."""
        if spec.model is None:
            raise ValueError(
                f"model is missing: give the {self.name} a model; a reference without one is "
                "served by the actor"
            )
        progress("load policy", 0, 1)
        model = CausalLm(
            spec.model,
            device=rank_device(),
            trainable=False,
            mesh=mesh,
            numerics=spec.chosen_numerics,
        )
        self._policy = RankModel(model)
        return InitializeResult(num_parameters=num_parameters(model))

    def register(self, server: grpc.aio.Server, runtime: Runtime) -> list[str]:
        """Serves log-probs."""
        return add_servicers(server, LogprobServicer(self, runtime))

    def policy_version(self) -> int:
        """It is not trained."""
        return 0

    def sleep(self) -> int:
        """Moves the weights to host memory."""
        return move_module(self.policy, torch.device("cpu"), self._sleep_memory)

    def wake(self) -> int:
        """Brings the weights back."""
        return move_module(self.policy, rank_device(), self._sleep_memory)

    def close(self) -> None:
        """Drops the weights."""
        self._policy = None
        self._sleep_memory = SleepMemory()


class ReferenceRole(FrozenPolicyRole):
    """Holds the policy that the trained one is kept near."""

    name = "reference"
    spec_class = ReferenceSpec
