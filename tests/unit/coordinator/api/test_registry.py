"""What services may say of themselves, and what is entered into the store."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from rolemesh.coordinator.api.registry import LEASE_S, register
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.rpc.errors import ForbiddenError, InvalidRequestError, PreconditionError
from rolemesh.v1 import registry_pb2

SERVING = registry_pb2.SERVICE_STATE_SERVING
LEAVING = registry_pb2.SERVICE_STATE_LEAVING
ENDED = registry_pb2.SERVICE_STATE_ENDED
VERSION = importlib.metadata.version("rolemesh")


def request(process: str = "a", **changes: Any) -> registry_pb2.RegisterServiceRequest:
    fields = {
        "role": "rollout",
        "number": 1,
        "address": f"host-{process}:50051",
        "incarnation": process * 32,
        "version": VERSION,
        "state": SERVING,
    }
    return registry_pb2.RegisterServiceRequest(**(fields | changes))


class Clocked:
    """A registry over a store whose clock stands still."""

    def __init__(self) -> None:
        self.now = 100.0
        self.store = MemoryStateStore(clock=lambda: self.now)

    async def register(
        self, request: registry_pb2.RegisterServiceRequest, caller: str
    ) -> registry_pb2.RegisterServiceResponse:
        return await register(self.store, "mesh", request, caller)

    async def known(self) -> list[tuple[str, str, bool]]:
        found = await self.store.registrations("mesh")
        return [(one.place, one.address, one.is_leaving) for one in found]


async def test_a_service_has_a_lease_until_it_says_that_it_has_ended() -> None:
    clocked = Clocked()
    answer = await clocked.register(request(), "rollout")
    assert answer.lease.ToTimedelta().total_seconds() == LEASE_S
    assert await clocked.known() == [("rollout/1", "host-a:50051", False)]
    clocked.now += LEASE_S - 1
    await clocked.register(request(state=LEAVING), "rollout")
    clocked.now += LEASE_S - 1
    assert await clocked.known() == [("rollout/1", "host-a:50051", True)]
    await clocked.register(request(state=ENDED), "rollout")
    assert await clocked.known() == []


async def test_a_number_that_is_taken_is_refused_with_who_has_it() -> None:
    clocked = Clocked()
    await clocked.register(request("a"), "rollout")
    with pytest.raises(
        PreconditionError, match=r"number is 1, but the rollout at host-a:50051.*\(--number\)"
    ) as refused:
        await clocked.register(request("b"), "rollout")
    assert (refused.value.reason, refused.value.retryable) == ("PLACE_TAKEN", True)
    # Its former process has died: the lease ends.
    clocked.now += LEASE_S + 1
    await clocked.register(request("b"), "rollout")
    assert await clocked.known() == [("rollout/1", "host-b:50051", False)]


@pytest.mark.parametrize("caller", ["critic", "client/admin", "coordinator", ""])
async def test_a_service_registers_as_what_its_certificate_says(caller: str) -> None:
    clocked = Clocked()
    with pytest.raises(ForbiddenError, match=r"role is 'rollout', but .* rollout\.pem") as refused:
        await clocked.register(request(), caller)
    assert refused.value.reason == "CALLER_DENIED"
    assert await clocked.known() == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"number": -1}, "number is -1: give 0 to 1023"),
        ({"number": 1024}, "number is 1024"),
        ({"address": "http://host"}, "address is 'http://host': give host:port"),
        ({"address": "host:0"}, "address is 'host:0'"),
        ({"incarnation": "a" * 31}, "incarnation is 'a+': give 32 hexadecimal"),
        ({"incarnation": "G" * 32}, "incarnation is 'G+'"),
        ({"version": "0.0.1"}, f"version is '0.0.1', but the coordinator has rolemesh {VERSION}"),
        ({"state": 0}, "state is 0: give serving"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    clocked = Clocked()
    with pytest.raises(InvalidRequestError, match=said) as refused:
        await clocked.register(request(**changes), "rollout")
    assert refused.value.reason == "REGISTRATION_REFUSED"
    assert await clocked.known() == []


async def test_a_role_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="role is 'judge': give actor"):
        await Clocked().register(request(role="judge"), "judge")


async def test_services_of_other_makes_need_no_version() -> None:
    clocked = Clocked()
    await clocked.register(request(version=""), "rollout")
    assert len(await clocked.known()) == 1
