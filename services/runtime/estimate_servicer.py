"""RPCs of a trainer that no model takes part in: estimates from numbers of a whole batch.

They live with the trainer because their controllers are part of its state. One rank computes
them, since group statistics and whitening take the whole batch, which is numbers only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message
from pydantic import TypeAdapter

from rolemesh.engine.algorithms.advantages import estimate_advantages
from rolemesh.engine.algorithms.kl import KlController
from rolemesh.engine.specs import EstimatorSpec, KlControllerSpec
from rolemesh.services.runtime.model_role import ModelRole
from rolemesh.services.runtime.runtime import Call, Context, Runtime
from rolemesh.v1 import experience_pb2, trainer_pb2, trainer_pb2_grpc

KL_CONTROLLER = "kl_controller"
"""Key of the KL controller's state in a role's extra state."""


class EstimateServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """The part of TrainerService that changes no weights; `TrainerServicer` adds the rest.

    Invariant: the KL controller moves once per ComputeAdvantages, and is part of the trainer's
    checkpoint.
    """

    def __init__(self, role: ModelRole, runtime: Runtime) -> None:
        self._role = role
        self._runtime = runtime

    async def ComputeAdvantages(
        self, request: trainer_pb2.ComputeAdvantagesRequest, context: Context
    ) -> AsyncIterator[trainer_pb2.ComputeAdvantagesResponse]:
        """See trainer.proto."""

        async def work(call: Call) -> Message:
            spec = algorithm_part(EstimatorSpec, request.estimator)
            columns = [
                name
                for name in ("rewards", "logprobs", "loss_mask", "values", "reference_logprobs")
                if _has_column(request.experience, name)
            ]
            batch = await self._runtime.pull(request.experience, columns, call)
            controller = self._controller(spec.kl_in_reward)
            estimated, metrics = await call.compute(estimate_advantages, batch, spec, controller)
            result = experience_pb2.ExperienceResult(
                report=call.report(metrics, batch["loss_mask"].values.numel()),
                experience=self._runtime.publish(request.key, estimated),
            )
            # Last: a call that fails before is repeated, and must find the controller unmoved.
            if controller is not None:
                self._role.extra_state[KL_CONTROLLER] = controller.state_dict()
            return result

        # Whitening takes the whole batch, which is numbers only: one rank computes it.
        async for response in self._runtime.keyed(
            request, context, trainer_pb2.ComputeAdvantagesResponse, work, on_all_ranks=False
        ):
            yield response

    def _controller(self, spec: KlControllerSpec | None) -> KlController | None:
        if spec is None:
            return None
        controller = KlController.from_spec(spec)
        if KL_CONTROLLER in self._role.extra_state:
            controller.load_state_dict(self._role.extra_state[KL_CONTROLLER])
        return controller


def algorithm_part(spec: Any, part: trainer_pb2.AlgorithmPart) -> Any:
    """The validated spec of an algorithm part; pydantic's ValidationError names the field."""
    parameters = json_format.MessageToDict(part.parameters)
    return TypeAdapter(spec).validate_python({**parameters, "type": part.type})


def _has_column(ref: experience_pb2.ExperienceRef, name: str) -> bool:
    return any(column.name == name for group in ref.groups for column in group.columns)
