"""A frozen policy that scores tokens; the reference is one."""

from __future__ import annotations

import grpc
import torch

from rolemesh.engine.data.teachers.prompts import TeacherPrompts
from rolemesh.engine.model_folders.pretrained import load_tokenizer
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.sleep_memory import SleepMemory, move_module
from rolemesh.engine.specs import ReferenceSpec, TeacherSpec
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.services.runtime.calls.role import (
    InitializeResult,
    ProgressCallback,
    Role,
    add_servicers,
)
from rolemesh.services.runtime.calls.runtime import Runtime
from rolemesh.services.runtime.ranks.device import rank_device
from rolemesh.services.runtime.servicers.logprobs import (
    LogprobServicer,
    Teaching,
    load_teacher_prompts,
)
from rolemesh.services.runtime.servicers.model_role import num_parameters


class FrozenPolicyRole(Role):
    """Holds a policy that is never trained."""

    replays_routes = False

    def __init__(self) -> None:
        self._policy: RankModel | None = None
        self._prompts: TeacherPrompts | None = None
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
        prompt = getattr(spec, "prompt", None)
        self._prompts = None
        if prompt is not None:
            tokenizer = load_tokenizer(spec.model.path)
            self._prompts = load_teacher_prompts(prompt, tokenizer, model)
        return InitializeResult(num_parameters=num_parameters(model))

    def teaching(self, as_teacher: bool) -> Teaching:
        """Behind the prompts that its spec asks for; see `PolicyHolder`."""
        if as_teacher:
            raise InvalidRequestError(
                f"as_teacher is true, which asks a policy to teach itself, and this {self.name} is "
                "none that learns: leave it out",
                reason="SPEC_INVALID",
            )
        return Teaching(prompts=self._prompts)

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
        self._policy = self._prompts = None
        self._sleep_memory = SleepMemory()


class ReferenceRole(FrozenPolicyRole):
    """Holds the policy that the trained one is kept near."""

    name = "reference"
    spec_class = ReferenceSpec
