"""Tests that a client with an address and no proto can use a server: it describes itself."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.services import serving

from rolemesh.coordinator.api.doors.coordinator_service import serve_coordinator
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.dataflow.calls.connection import REQUIRED_SERVICES
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.rpc.policy import rolemesh_methods
from rolemesh.services.actor.servicers import ActorRole
from rolemesh.services.cost.servicers import CostRole
from rolemesh.services.critic.servicers import CriticRole
from rolemesh.services.reference.servicers import ReferenceRole
from rolemesh.services.reward.servicers import RewardRole
from rolemesh.services.rollout.servicers import RolloutRole
from rolemesh.services.runtime.calls.role import Role

CLIENT = Path(__file__).parents[1] / "support" / "reflecting_client.py"
STANDARD = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
WORKER = "rolemesh.v1.WorkerService"
REWARD = "rolemesh.v1.RewardService"


async def reflected(address: str, *calls: tuple[str, str, Any]) -> Any:
    """What a process without rolemesh learns of a server, and gets from it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(CLIENT), address, json.dumps(calls)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, problems = await process.communicate()
    assert process.returncode == 0, problems.decode()
    return json.loads(out)


def methods_of(service: str) -> list[str]:
    found = [name.split("/") for name in rolemesh_methods()]
    return [method for _, owner, method in found if owner == service]


@pytest.mark.parametrize(
    "role_class", [ActorRole, CostRole, CriticRole, ReferenceRole, RewardRole, RolloutRole]
)
async def test_a_service_of_each_role_describes_itself(role_class: type[Role]) -> None:
    async with serving(role_class()) as server:
        told = await reflected(server.runtime.address, (WORKER, "GetCapabilities", {}))
    ours = {name: methods for name, methods in told["services"].items() if name not in STANDARD}
    assert set(told["services"]) == STANDARD | set(ours)
    assert set(ours) >= {WORKER, *REQUIRED_SERVICES[role_class.name]}
    assert {name: sorted(methods) for name, methods in ours.items()} == {
        name: sorted(methods_of(name)) for name in ours
    }
    ((capabilities,),) = told["answers"]
    assert capabilities["role"] == role_class.name
    assert set(capabilities["services"]) == set(ours)


async def test_a_reward_is_computed_by_reflection_alone() -> None:
    def key(operation: str) -> dict[str, Any]:
        return {"run_id": "grpcurl", "fencing_epoch": 1, "operation": operation}

    rows = [{"completion": text, "answer": "12"} for text in ("12", "no idea", "12")]
    async with serving(RewardRole()) as server:
        told = await reflected(
            server.runtime.address,
            (
                WORKER,
                "Initialize",
                {"key": key("initialize"), "spec": {"source": {"type": "arithmetic"}}},
            ),
            (
                REWARD,
                "ComputeReward",
                {"key": key("reward"), "trajectories": {"trajectories": rows}},
            ),
        )
    rewards = told["answers"][1][-1]["rewards"]["rewards"]
    assert len(rewards) == 3
    assert rewards[0] == rewards[2] > rewards[1]


async def test_the_coordinator_describes_itself() -> None:
    server, port = await serve_coordinator(StoreOperations(MemoryStateStore()))
    try:
        service = "rolemesh.v1.CoordinatorService"
        told = await reflected(f"127.0.0.1:{port}", (service, "ListRuns", {}))
    finally:
        await server.stop(None)
    assert set(told["services"]) == STANDARD | {service}
    assert sorted(told["services"][service]) == sorted(methods_of(service))
    assert told["answers"] == [[{}]]
