"""A role's service as the coordinator sees it: stubs, version, and calls that report progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf import json_format, struct_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.recipe.schema import role_of
from rolemesh.engine.specs import Spec
from rolemesh.rpc.channel import ChannelTraffic, MeshCall, open_channel
from rolemesh.rpc.errors import (
    DeadlineError,
    InternalError,
    RolemeshError,
    UnavailableError,
    UnsupportedError,
)
from rolemesh.v1 import (
    data_pb2_grpc,
    experience_pb2,
    experience_pb2_grpc,
    logprob_pb2_grpc,
    operation_pb2,
    reward_pb2_grpc,
    rollout_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    value_pb2_grpc,
    weights_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

REQUIRED_SERVICES: Mapping[str, tuple[str, ...]] = {
    "actor": (
        "rolemesh.v1.ExperienceService",
        "rolemesh.v1.RolloutService",
        "rolemesh.v1.TrainerService",
        "rolemesh.v1.WeightsService",
    ),
    "critic": (
        "rolemesh.v1.ExperienceService",
        "rolemesh.v1.TrainerService",
        "rolemesh.v1.ValueService",
        "rolemesh.v1.WeightsService",
    ),
    "reference": ("rolemesh.v1.ExperienceService", "rolemesh.v1.LogprobService"),
    "reward": ("rolemesh.v1.RewardService",),
    "cost": ("rolemesh.v1.RewardService",),
    "rollout": ("rolemesh.v1.ExperienceService", "rolemesh.v1.RolloutService"),
}
"""What a service has to serve to stand in for a role."""

_HEALTH_TIMEOUT_S = 5.0
_HEALTH_PAUSE_S = 0.2

ProgressCallback = Callable[[operation_pb2.Progress], None]


class RoleConnection:
    """One service: its channel and stubs, and the version of its weights.

    Owner: the coordinator's loop.
    """

    def __init__(self, service: str, address: str, traffic: ChannelTraffic) -> None:
        self.service = service
        """Its name: that of the role, with a number where the role has several services."""
        self.role = role_of(service)
        self.address = address
        self.policy_version = 0
        self.capabilities = worker_pb2.GetCapabilitiesResponse()
        self._channel = open_channel(address, traffic=traffic)
        self.worker = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self.experience = experience_pb2_grpc.ExperienceServiceStub(self._channel)
        self.rollout = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        self.trainer = trainer_pb2_grpc.TrainerServiceStub(self._channel)
        self.logprob = logprob_pb2_grpc.LogprobServiceStub(self._channel)
        self.value = value_pb2_grpc.ValueServiceStub(self._channel)
        self.reward = reward_pb2_grpc.RewardServiceStub(self._channel)
        self.data = data_pb2_grpc.DataServiceStub(self._channel)
        self.weights = weights_pb2_grpc.WeightsServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def close(self) -> None:
        """Lets the channel go."""
        await self._channel.close()

    def facts(self) -> dict[str, Any]:
        """What the run's record says of it."""
        return {"role": self.role, "address": self.address, "policy_version": self.policy_version}

    def serves(self, service: str) -> bool:
        """Whether the service has this family of calls, by full name."""
        return service in self.capabilities.services

    async def wait_healthy(self, deadline_s: float) -> None:
        """Returns when the service says that it serves.

        Raises:
            RunError: It does not within deadline_s seconds, or cannot.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        last = "it never answered"
        while loop.time() < deadline:
            try:
                answer = await self._health.Check(
                    health_pb2.HealthCheckRequest(), timeout=_HEALTH_TIMEOUT_S
                )
            except (UnavailableError, DeadlineError) as error:
                last = error.message
            except UnsupportedError as error:
                raise RunError(
                    f"services.{self.role}: the service at {self.address} has no standard gRPC "
                    f"health, for which a run waits: {self._as_outsider()}"
                ) from error
            else:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
                last = f"its health is {status}"
            await asyncio.sleep(_HEALTH_PAUSE_S)
        raise RunError(
            f"{self.role} at {self.address} did not become healthy within {deadline_s:.0f} s "
            f"({last}): see its log, or correct services.{self.role}.address"
        )

    async def learn_capabilities(self) -> None:
        """Asks what the service can do, and refuses one that cannot stand in for the role.

        Raises:
            RunError: It is another role, lacks a family of calls, or pulls no experience.
        """
        where = f"services.{self.role}: the service at {self.address}"
        try:
            self.capabilities = await self.worker.GetCapabilities(
                worker_pb2.GetCapabilitiesRequest()
            )
        except UnsupportedError as error:
            raise RunError(
                f"{where} has no WorkerService, which every role serves: {self._as_outsider()}"
            ) from error
        if self.capabilities.role != self.role:
            raise RunError(
                f"{where} is a {self.capabilities.role!r}, not a {self.role!r}: correct the address"
            )
        missing = [name for name in REQUIRED_SERVICES[self.role] if not self.serves(name)]
        if missing:
            raise RunError(
                f"{where} lacks {', '.join(missing)}: serve them (`rolemesh compliance "
                f"{self.address} --role {self.role}` says more), or point the recipe at another "
                "service"
            )
        if not self.capabilities.accepts_references:
            raise RunError(
                f"{where} takes no references (accepts_references is false): {self._as_outsider()}"
            )

    def _as_outsider(self) -> str:
        """What to do about a service that does not pull experience by itself."""
        if self.role in ("reward", "cost"):
            return (
                f"leave services.{self.role} out and write `{self.role}: grpc://{self.address}`, "
                "and rolemesh's own reward service sends it the trajectories"
            )
        return (
            f"add what is missing (`rolemesh compliance {self.address} --role {self.role}` says "
            "what), or point the recipe at another service"
        )

    async def finish(
        self,
        call: Any,
        on_progress: ProgressCallback,
        on_block: Callable[[Any], None] | None = None,
    ) -> Any:
        """Follows a call that streams progress and returns its last message.

        Args:
            call: The stream.
            on_progress: Gets signs of life.
            on_block: Gets messages with a part of the result, where the call sends any.

        Raises:
            RolemeshError: The call failed, or ended without a result.
        """
        result = None
        stream: MeshCall = call
        try:
            async for message in stream:
                match message.WhichOneof("event"):
                    case "progress":
                        on_progress(message.progress)
                    case "block" if on_block is not None:
                        on_block(message)
                    case _:
                        result = message
            if result is None:
                raise InternalError(
                    f"{self.role} at {self.address} ended the call without a result"
                )
        except RolemeshError as error:
            # A broken connection says nothing of itself; a service's own words stay.
            error.metadata.setdefault("role", self.role)
            error.metadata.setdefault("rank", str(self.capabilities.rank))
            raise
        return result


def to_struct(spec: Spec) -> struct_pb2.Struct:
    """A spec as it travels."""
    return json_format.ParseDict(spec.model_dump(mode="json"), struct_pb2.Struct())


def to_algorithm_part(spec: Any) -> trainer_pb2.AlgorithmPart:
    """A loss or an estimator as it travels; its `type` is the name, the rest are parameters."""
    parameters = spec.model_dump(mode="json", exclude={"type"})
    return trainer_pb2.AlgorithmPart(
        type=spec.type, parameters=json_format.ParseDict(parameters, struct_pb2.Struct())
    )


def summarize_reference(reference: experience_pb2.ExperienceRef) -> dict[str, Any]:
    """What the journal keeps of a reference."""
    return {
        "num_rows": reference.num_rows,
        "experience_ids": [s.experience_id for group in reference.groups for s in group.shards],
    }
