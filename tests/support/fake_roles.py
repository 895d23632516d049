"""The roles of a run as real gRPC servers on loopback, with one-number models and no torch.

What they compute is in `fake_models`, how they sample in `fake_sampling`, how they judge and train
in `fake_training`. Rows lie in one dictionary that the roles of a mesh share: how rows travel is
the runtime's matter and is tested there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_status import rpc_status
from support.fake_core import FakeCore
from support.fake_exchanges import FakeExchange
from support.fake_models import completion, expected_weight, reward_of
from support.fake_recipes import fake_recipe
from support.fake_recovery import FakeRecovery
from support.fake_sampling import FakeSampling
from support.fake_training import FakeTraining

from rolemesh.coordinator.recipe.role_names import role_of, service_names
from rolemesh.rpc.channel import SERVER_OPTIONS
from rolemesh.rpc.errors import NotFoundError, to_status
from rolemesh.v1 import (
    cuts_pb2_grpc,
    data_pb2_grpc,
    exchange_pb2_grpc,
    experience_pb2,
    experience_pb2_grpc,
    logprob_pb2_grpc,
    reward_pb2_grpc,
    rollout_pb2_grpc,
    trainer_pb2_grpc,
    value_pb2_grpc,
    weights_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

__all__ = [
    "CallRecord",
    "FakeMesh",
    "FakeRole",
    "completion",
    "expected_weight",
    "fake_mesh",
    "fake_recipe",
    "reward_of",
    "until",
]

ROLES = ("actor", "critic", "reference", "reward")
"""Roles of a mesh that says nothing else."""
FAMILIES = (
    "Worker", "Experience", "Rollout", "Trainer", "Logprob", "Value", "Reward", "Data", "Weights",
)  # fmt: skip


@dataclass(eq=False)
class CallRecord:
    """One keyed call as a fake saw it."""

    service: str
    method: str
    key: tuple[str, int, int, str, int]
    """(run_id, fencing_epoch, step, operation, sequence)."""
    request: Message
    state: str = "running"
    """Then "done", "failed" or "cancelled"."""

    @property
    def role(self) -> str:
        """The role that the service is one of."""
        return role_of(self.service)

    @property
    def name(self) -> str:
        """e.g. "actor.Update"."""
        return f"{self.service}.{self.method}"

    @property
    def step(self) -> int:
        """Step of its key."""
        return self.key[2]


@dataclass(eq=False, repr=False)
class FakeRole(FakeSampling, FakeTraining, FakeRecovery, FakeCore):
    """One service. Faults are set from the test: `failures`, `gates`, `block_gates`."""

    _server: grpc.aio.Server | None = None

    async def start(self) -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        health = health_aio.HealthServicer()
        await health.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)
        experience_pb2_grpc.add_ExperienceServiceServicer_to_server(self, server)
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self, server)
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(self, server)
        logprob_pb2_grpc.add_LogprobServiceServicer_to_server(self, server)
        value_pb2_grpc.add_ValueServiceServicer_to_server(self, server)
        reward_pb2_grpc.add_RewardServiceServicer_to_server(self, server)
        data_pb2_grpc.add_DataServiceServicer_to_server(self, server)
        weights_pb2_grpc.add_WeightsServiceServicer_to_server(self, server)
        exchange_pb2_grpc.add_ExchangeServiceServicer_to_server(self, server)
        cuts_pb2_grpc.add_CutServiceServicer_to_server(self, server)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Ends at once: calls in flight break off, as when the process is killed."""
        for exchange in self.mesh.exchanges.values():
            if self.service in exchange.joined:
                await exchange.barrier.abort()
        if self._server is not None:
            await self._server.stop(None)
        for held in [one for one in self.mesh.columns if one[0] == self.address]:
            del self.mesh.columns[held]

    # --- WorkerService, ExperienceService ---

    async def GetCapabilities(self, request: Any, context: Any) -> Any:
        return worker_pb2.GetCapabilitiesResponse(
            role=self.role,
            services=[
                f"rolemesh.v1.{family}Service"
                for family in (
                    *FAMILIES,
                    *(["Cut"] if self.mesh.has_cuts else []),
                    *(["Exchange"] if self.mesh.has_exchanges else []),
                )
            ],
            world_size=1,
            accepts_references=True,
            versions={"fake": "1"},
            devices=self.sees,
        )

    async def GetStatus(self, request: Any, context: Any) -> Any:
        if "GetStatus" in self.gates:
            await self.gates["GetStatus"].wait()
        state = worker_pb2.WORKER_STATE_BUSY if self.operation else worker_pb2.WORKER_STATE_READY
        return worker_pb2.GetStatusResponse(
            state=state, operation=self.operation, devices=self.devices, run_id=self.run_id
        )

    async def Drain(self, request: Any, context: Any) -> Any:
        assert request.run_id == self.run_id
        assert request.fencing_epoch >= self.highest_epoch
        self.run_id = ""
        self.drained_epoch = request.fencing_epoch
        return worker_pb2.DrainResponse()

    async def Initialize(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def work() -> Message:
            self.run_id = request.key.run_id
            # A run begins with the model of its spec, whatever the one before made of it.
            self.policy_version, self.weight = 0, 0.0
            self.spec = json_format.MessageToDict(request.spec)
            self.device_type = request.device_type
            self.deterministic = request.deterministic
            facts = {"data.held_out_prompts": str(self.mesh.num_held_out)}
            if self.role == "actor" and self.mesh.endpoint:
                facts["endpoint"] = self.mesh.endpoint
            return worker_pb2.InitializeResult(num_parameters=1, facts=facts)

        async for response in self.keyed(
            "Initialize", request, context, worker_pb2.InitializeResponse, work
        ):
            yield response

    async def Release(self, request: Any, context: Any) -> Any:
        if "Release" in self.failures:
            status = to_status(self.failures["Release"], metadata={"role": self.role, "rank": "0"})
            await context.abort_with_status(rpc_status.to_status(status))
        assert request.fencing_epoch == self.highest_epoch
        self.released_through = request.through_step
        return experience_pb2.ReleaseResponse()

    async def Sleep(self, request: Any, context: Any) -> Any:
        await self._move("Sleep", is_asleep=True, context=context)
        return worker_pb2.SleepResponse()

    async def Wake(self, request: Any, context: Any) -> Any:
        await self._move("Wake", is_asleep=False, context=context)
        return worker_pb2.WakeResponse()

    async def _move(self, method: str, *, is_asleep: bool, context: Any) -> None:
        if method in self.failures:
            await self.refuse(context, self.failures[method])
        self.is_asleep = is_asleep
        self.mesh.log.append(f"{self.service}.{method}")


def fake_loads(role: str, policy_version: int) -> list[experience_pb2.LayerLoads]:
    """What an actor says of its two layers with four experts, other numbers in each version."""
    if role != "actor":
        return []
    return [
        experience_pb2.LayerLoads(
            layer=layer, choices=[policy_version * (layer + expert) for expert in range(4)]
        )
        for layer in (1, 3)
    ]


@dataclass
class FakeMesh:
    """The fakes, and what they saw."""

    tokens_per_completion: int = 8
    num_held_out: int = 16
    endpoint: str = ""
    """Where the actor says that it answers; empty: nowhere."""
    decode_turns: int = 1
    """Tokens of a completion between which new weights may come."""
    delay: Callable[[str, str], float] = lambda service, method: 0.0
    """Seconds that a call takes before it answers, or, of Generate, that a token takes."""
    is_wanted: Callable[[int], bool] = lambda prompt: True
    """Prompts whose groups SelectGroups keeps."""
    block_order: Callable[[int], list[int]] = lambda number: list(range(number))
    """In which order so many blocks finish."""
    reported: Callable[[str, Any], Mapping[str, float]] = lambda name, key: {}
    """Metrics that a call, e.g. "actor.Update", with this key reports besides or instead; what it
    raises the call fails with, before it has changed anything."""
    loads: Callable[[str, int], list[experience_pb2.LayerLoads]] = fake_loads
    """Loads of experts that an update of a role tells with the version that it came to."""
    withheld_blocks: frozenset[int] = frozenset()
    """Blocks that are never sent."""
    roles: dict[str, FakeRole] = field(default_factory=dict)
    """By the name of the service."""
    has_cuts: bool = False
    """Whether trained roles keep cuts."""
    cuts: dict[str, dict[int, tuple[float, int]]] = field(default_factory=dict)
    """What they keep, by service and step."""
    restarted: list[str] = field(default_factory=list)
    """Services that were started again, in order."""
    columns: dict[tuple[str, str], dict[str, list[Any]]] = field(default_factory=dict)
    """By address of the service, experience id and name of the column: one value a row."""
    published: tuple[int, float] | None = None
    """Version and weight that the actor has published last."""
    has_exchanges: bool = False
    """Whether services can be in exchanges."""
    exchanges: dict[str, FakeExchange] = field(default_factory=dict)
    """By name."""
    unable: frozenset[str] = frozenset()
    """Services that refuse to offer one."""
    breaking: set[str] = field(default_factory=set)
    """Names of exchanges whose transfers fail."""
    calls: list[CallRecord] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    """"actor.Generate begins", "actor.Generate sends block 0", "actor.Generate ends",
    "critic.Wake", ..., in the order of events."""
    running: set[str] = field(default_factory=set)
    """Calls in flight, as "service.Method"."""
    most_together: int = 0

    @property
    def addresses(self) -> dict[str, str]:
        return {service: fake.address for service, fake in self.roles.items()}

    def add(self, role: str, replicas: int = 1) -> None:
        """Makes the services of a role, not yet started."""
        for service in service_names(role, replicas):
            self.roles[service] = FakeRole(service=service, mesh=self)

    async def restart(self, service: str) -> str:
        """Ends a service as a kill does, and starts one that knows nothing of a run."""
        await self.roles[service].stop()
        self.restarted.append(service)
        self.roles[service] = FakeRole(service=service, mesh=self)
        await self.roles[service].start()
        return self.roles[service].address

    def methods(self, step: int) -> list[str]:
        """Calls of a step in the order in which they arrived, as "service.Method"."""
        return [call.name for call in self.calls if call.step == step]

    def of(self, name: str) -> list[CallRecord]:
        """Calls named so, e.g. "actor.Update", of training, in the order of arrival."""
        return [
            call
            for call in self.calls
            if f"{call.role}.{call.method}" == name and not call.key[3].startswith("evaluate.")
        ]

    def values(self, reference: experience_pb2.ExperienceRef, column: str) -> list[Any]:
        """A column of an experience in the order of rows."""
        for group in reference.groups:
            if any(schema.name == column for schema in group.columns):
                rows: dict[int, Any] = {}
                for shard in group.shards:
                    if (shard.address, shard.experience_id) not in self.columns:
                        # As the service that reads it would say.
                        raise NotFoundError(
                            f"{shard.address} holds no {shard.experience_id}",
                            reason="EXPERIENCE_NOT_FOUND",
                        )
                    held = self.columns[shard.address, shard.experience_id][column]
                    numbers = range(shard.row_start, shard.row_start + shard.num_rows)
                    rows |= zip(numbers, held, strict=True)
                assert sorted(rows) == list(range(reference.num_rows))
                return [rows[number] for number in range(reference.num_rows)]
        raise AssertionError(f"no column {column!r}")


@asynccontextmanager
async def fake_mesh(
    roles: tuple[str, ...] = ROLES, *, replicas: int = 1, of: str = "rollout", **settings: Any
) -> AsyncIterator[FakeMesh]:
    """Starts the fakes and stops them.

    Args:
        roles: Roles of the mesh.
        replicas: Services of one role.
        of: That role.
        **settings: Fields of FakeMesh.
    """
    mesh = FakeMesh(**settings)
    for role in roles:
        mesh.add(role, replicas if role == of else 1)
    for fake in mesh.roles.values():
        await fake.start()
    try:
        yield mesh
    finally:
        for fake in mesh.roles.values():
            await fake.stop()


async def until(claim: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
    """Returns once the claim holds; the test's own timeout bounds the wait."""
    while True:
        holds = claim()
        if isinstance(holds, Awaitable):
            holds = await holds
        if holds:
            return
        await asyncio.sleep(0.005)


async def hold_call(
    mesh: FakeMesh,
    service: str,
    method: str,
    step: int,
    is_over: Callable[[], bool] = lambda: False,
) -> asyncio.Event:
    """Holds a call of a service in a step, and lets those of earlier steps go on.

    Returns:
        What lets it go on when it is set.

    Raises:
        AssertionError: The call was made while the test looked away, or the run is over.
    """
    gate = mesh.roles[service].gates.setdefault(method, asyncio.Event())

    def is_there() -> bool:
        return any(
            call.name == f"{service}.{method}" and call.step == step and call.state == "running"
            for call in mesh.calls
        )

    while not is_there() and not is_over():
        gate.set()
        await asyncio.sleep(0)
        if not is_there():
            gate.clear()
            await asyncio.sleep(0.002)
    gate.clear()
    assert is_there(), "the call was made while the test looked away: nothing can be done within it"
    return gate
