"""Tests of the coordinator with services that are not ours."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from support.scripted_outsider import outsider

from rolemesh.coordinator.dataflow.calls.connection import RoleConnection
from rolemesh.coordinator.dataflow.errors import RunError, ServiceLostError
from rolemesh.coordinator.recipe.roles.placement import ServiceSpec
from rolemesh.rpc.channel import ChannelTraffic
from rolemesh.rpc.errors import UnsupportedError

HEALTHY_S = 60.0
"""Longer than a test may take: whoever waits for it fails."""


@pytest.mark.parametrize("address", ["h.example:50051", "10.0.0.1:1", "[::1]:50051"])
def test_an_address_may_be_written_with_its_scheme(address: str) -> None:
    spec = ServiceSpec.model_validate({"address": f"grpc://{address}"})
    assert spec == ServiceSpec.model_validate({"address": address})
    assert spec.address == address
    several = ServiceSpec.model_validate({"addresses": [f"grpc://{address}/", address]})
    assert several.addresses == (address, address)


@pytest.mark.parametrize("address", ["http://h:1", "grpc://h", "grpc://", "h", 5, "a b:1"])
def test_what_is_no_address_is_refused(address: object) -> None:
    with pytest.raises(ValidationError, match="address"):
        ServiceSpec.model_validate({"address": address})


async def meet(connection: RoleConnection) -> None:
    await connection.wait_healthy(HEALTHY_S)
    await connection.learn_capabilities()


async def refusal(role: str, *faults: str, server_role: str = "", inline: bool = False) -> str:
    async with outsider(server_role or role, *faults, inline=inline) as server:
        connection = RoleConnection(role, server.address, ChannelTraffic())
        try:
            with pytest.raises(RunError) as raised:
                await meet(connection)
        finally:
            await connection.close()
        return str(raised.value).replace(server.address, "HOST:1")


async def test_a_server_that_stops_while_it_is_met_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolemesh.coordinator.dataflow.calls.connection._HEALTH_TIMEOUT_S", 0.5)
    async with outsider("reward") as server:
        connection = RoleConnection("reward", server.address, ChannelTraffic())
        await connection.wait_healthy(HEALTHY_S)

    async def stopping() -> None:
        # As a gRPC server answers while it stops.
        raise UnsupportedError("Method not found!")

    monkeypatch.setattr(connection.client, "get_capabilities", stopping)
    try:
        with pytest.raises(ServiceLostError, match="did not become healthy"):
            await connection.learn_capabilities()
    finally:
        await connection.close()


async def test_a_reward_that_takes_trajectories_is_told_its_place_in_the_recipe() -> None:
    place = "leave services.reward out and write `reward: grpc://HOST:1`"
    assert place in await refusal("reward", inline=True)
    assert place in await refusal("reward", "pulls_nothing")


async def test_a_model_that_pulls_nothing_is_told_how_to_find_out_what_is_missing() -> None:
    told = await refusal("reference", "pulls_nothing")
    assert "accepts_references is false" in told
    assert "`rolemesh compliance HOST:1 --role reference`" in told


async def test_a_server_without_health_is_not_waited_for() -> None:
    assert "has no standard gRPC health" in await refusal("reference", "no_health")
    told = await refusal("reward", "no_health", inline=True)
    assert "write `reward: grpc://HOST:1`" in told


async def test_another_role_and_missing_families_are_named() -> None:
    assert "is a 'critic', not a 'reference'" in await refusal("reference", server_role="critic")
    assert "lacks rolemesh.v1.ExperienceService" in await refusal("critic", "claims_less")
