"""Every method of a live service with mutual TLS is for the members that its proto names alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from google.protobuf.descriptor import MethodDescriptor
from support.coordinator_doors import written
from support.services import serving

from rolemesh.coordinator.api.doors.coordinator_service import serve_coordinator
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import (
    ForbiddenError,
    InvalidRequestError,
    RolemeshError,
    UnsupportedError,
)
from rolemesh.rpc.members.authority import Authority
from rolemesh.rpc.members.identity import Identity
from rolemesh.rpc.policy import rolemesh_methods
from rolemesh.services.actor.servicers import ActorRole
from rolemesh.services.cost.servicers import CostRole
from rolemesh.services.critic.servicers import CriticRole
from rolemesh.services.reference.servicers import ReferenceRole
from rolemesh.services.reward.servicers import RewardRole
from rolemesh.services.rollout.servicers import RolloutRole
from rolemesh.services.runtime.calls.role import Role
from rolemesh.services.runtime.hosts.door import AgentDoor
from rolemesh.services.runtime.hosts.meeting import HostMeeting
from rolemesh.services.runtime.server.config import ServiceConfig
from rolemesh.services.teacher.servicers import TeacherRole
from rolemesh.v1 import hosts_pb2, operation_pb2

AUTHORITY = Authority.make()
ROLES: dict[str, type[Role]] = {
    kind.name: kind
    for kind in (
        ActorRole,
        CriticRole,
        ReferenceRole,
        TeacherRole,
        RewardRole,
        CostRole,
        RolloutRole,
    )
}
COORDINATOR = "coordinator"
AGENT = "agent of an actor on two hosts"
CLIENTS = ("client/read", "client/drive", "client/admin")
UNREADABLE = b"\xff\xff\xff"
"""Bytes that are no message."""

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def identities() -> dict[str, Identity]:
    return {member: AUTHORITY.issue(member) for member in (COORDINATOR, *ROLES, *CLIENTS)}


@asynccontextmanager
async def served(kind: str, place: Path) -> AsyncIterator[tuple[str, Sequence[str]]]:
    """A server with an identity: its address, and the full names of its services."""
    if kind == COORDINATOR:
        server, port = await serve_coordinator(
            StoreOperations(MemoryStateStore()), certificate=place, members_only=True
        )
        yield (
            f"127.0.0.1:{port}",
            [
                "rolemesh.v1.CoordinatorService",
                "rolemesh.v1.RegistryService",
            ],
        )
        await server.stop(None)
        return
    if kind == AGENT:
        config = ServiceConfig(
            role="actor", layout={"dp": 2}, hosts=2, meet="127.0.0.1:1", identity=place
        )
        service = hosts_pb2.JoinHostsRequest(role="actor", num_hosts=2, layout="", versions={})
        door = AgentDoor(config, "agent", HostMeeting(service, DEADLINE_S))
        yield f"127.0.0.1:{await door.open('127.0.0.1', 0)}", ["rolemesh.v1.HostsService"]
        await door.close()
        return
    async with serving(ROLES[kind](), identity=place) as service:
        yield service.runtime.address, service.runtime.process.services


def is_admitted(method: MethodDescriptor, member: str, kind: str) -> bool:
    """What the proto says, read a second time: `Policy.allows` is a part of what is tested."""
    named = {
        operation_pb2.Caller.Name(caller).removeprefix("CALLER_")
        for caller in method.GetOptions().Extensions[operation_pb2.policy].callers
    }
    if member in CLIENTS:
        # A scope has the rights of those before it.
        below = CLIENTS[: CLIENTS.index(member) + 1]
        return bool(named & {one.replace("/", "_").upper() for one in below})
    if member == COORDINATOR:
        return "COORDINATOR" in named
    return ("RANK" if member == kind else "ROLE") in named


async def answer_to(channel: MeshChannel, method: str, sent: bytes | None) -> RolemeshError:
    """How a call is refused. None sends nothing, and leaves open whether something comes."""
    call = channel.stream_stream(method)(timeout=DEADLINE_S)
    if sent is not None:
        await call.write(sent)
        await call.done_writing()
    with pytest.raises(RolemeshError) as refused:
        async for _ in call:
            pass
    return refused.value


@pytest.mark.parametrize("kind", [*ROLES, COORDINATOR, AGENT])
async def test_a_method_is_for_the_members_that_its_proto_names(
    kind: str, identities: dict[str, Identity], tmp_path: Path
) -> None:
    role = "actor" if kind == AGENT else kind
    place = written(identities[role], tmp_path / "own.pem")
    found = {True: 0, False: 0}
    async with served(kind, place) as (address, services):
        methods = {
            name: method
            for name, method in rolemesh_methods().items()
            if method.containing_service.full_name in services
        }
        assert {method.containing_service.full_name for method in methods.values()} == {*services}
        for member, identity in identities.items():
            async with open_channel(address, identity=identity) as channel:
                for name, method in methods.items():
                    is_let_in = is_admitted(method, member, role)
                    found[is_let_in] += 1
                    if is_let_in:
                        # Past the door: what is wrong now is the request.
                        error = await answer_to(channel, name, UNREADABLE)
                        assert isinstance(error, InvalidRequestError), (member, name, error)
                        assert error.reason in ("MESSAGE_MALFORMED", "PAYLOAD_MALFORMED"), name
                    else:
                        # Nothing is read of it, nor waited for.
                        error = await answer_to(channel, name, None)
                        assert isinstance(error, ForbiddenError), (member, name, error)
                        assert error.reason == "CALLER_DENIED", name
                        assert error.metadata["caller"] == member
    assert all(found.values()), found


@pytest.mark.parametrize(
    ("kind", "method", "told"),
    [
        ("rollout", "ExchangeService/SendWeights", "only takes weights: the actor sends them"),
        ("rollout", "WeightsService/Export", "weights are exported by the actor"),
        ("actor", "RolloutService/UpdateWeights", "only a rollout service takes published ones"),
    ],
)
async def test_a_method_that_one_role_of_its_service_lacks_says_who_has_it(
    kind: str, method: str, told: str, identities: dict[str, Identity], tmp_path: Path
) -> None:
    place = written(identities[kind], tmp_path / "own.pem")
    async with (
        served(kind, place) as (address, _),
        open_channel(address, identity=identities[COORDINATOR]) as channel,
    ):
        error = await answer_to(channel, f"/rolemesh.v1.{method}", b"")
    assert isinstance(error, UnsupportedError)
    assert (error.reason, told in error.message) == ("UNIMPLEMENTED", True)
