"""The reward service as the gateway to rewards from outside: inline calls, metrics, draining."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.learning_runs import service_processes
from support.reward_calls import RewardClient, result_of
from support.reward_servers import RewardServer, reward_server
from support.services import operation_key, serving

from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.errors import PreconditionError, RolemeshError
from rolemesh.services.cost.servicers import CostRole
from rolemesh.services.reward.servicers import RewardRole
from rolemesh.v1 import reward_pb2, reward_pb2_grpc

TRAJECTORIES = reward_pb2.TrajectoryBatch(
    trajectories=[
        reward_pb2.Trajectory(prompt="1+1=", completion="2", answer="2", prompt_tokens=[1]),
        reward_pb2.Trajectory(prompt="1+2=", completion="33", answer="3", prompt_tokens=[1]),
    ]
)


@pytest.fixture
def server() -> Iterator[RewardServer]:
    with reward_server() as served:
        yield served


async def judge(address: str, reward: Any, sequence: int = 1) -> Any:
    async with open_channel(address) as channel:
        await RewardClient(channel).initialize(reward)
        return await ask(channel, sequence)


async def ask(channel: Any, sequence: int) -> Any:
    request = reward_pb2.ComputeRewardRequest(
        key=operation_key("judge", sequence=sequence), trajectories=TRAJECTORIES
    )
    return await result_of(reward_pb2_grpc.RewardServiceStub(channel).ComputeReward(request))


async def test_inline_trajectories_are_judged_and_requests_are_on_the_metrics_page(
    server: RewardServer,
) -> None:
    sources = [
        {"source": server.url + "/get_reward", "name": "distinct"},
        {"source": {"type": "arithmetic"}, "weight": 10.0},
    ]
    reward = {"source": {"type": "weighted_sum", "rewards": sources}}
    async with serving(RewardRole(), metrics_port=0) as service:
        rewards = await judge(service.runtime.address, reward)
        assert list(rewards.rewards) == pytest.approx([11.0, 1.0 + 10 * 0.1])
        assert service.metrics_page is not None
        async with httpx.AsyncClient(trust_env=False) as client:
            url = f"http://127.0.0.1:{service.metrics_page.port}/metrics/"
            page = (await client.get(url)).text
    line = next(
        line
        for line in page.splitlines()
        if line.startswith("rolemesh_reward_request_seconds_count")
    )
    assert 'reward="distinct"' in line
    assert 'outcome="ok"' in line
    assert line.endswith(" 1.0")


async def test_a_cost_is_asked_for_alike(server: RewardServer) -> None:
    async with serving(CostRole()) as service:
        costs = await judge(service.runtime.address, {"source": server.url + "/get_reward"})
        assert list(costs.rewards) == [1.0, 1.0]


async def test_groups_of_inline_trajectories_are_not_known_so_that_a_failure_is_told(
    server: RewardServer,
) -> None:
    server.always = 404
    source = {
        "type": "openrlhf",
        "urls": [server.url + "/get_reward"],
        "on_failure": {"type": "drop_group"},
    }
    async with serving(RewardRole()) as service:
        with pytest.raises(PreconditionError) as error:
            await judge(service.runtime.address, {"source": source})
    assert error.value.reason == "REWARD_REFUSED"
    assert "404" in error.value.message


async def test_a_service_that_stops_ends_the_requests_that_it_has_made(
    server: RewardServer,
) -> None:
    server.always = "hang"
    me = psutil.Process()
    async with serving(RewardRole()) as service:
        address = service.runtime.address
        async with open_channel(address) as channel:
            await RewardClient(channel).initialize({"source": server.url + "/get_reward"})
            asking = asyncio.create_task(ask(channel, 1))
            async with asyncio.timeout(30):
                while not server.requests:  # noqa: ASYNC110 - told by no event
                    await asyncio.sleep(0.01)
            await service.stop(work_timeout_s=1.0)
            with pytest.raises(RolemeshError):
                await asking
    port = int(server.url.rpartition(":")[2])

    def to_server() -> list[Any]:
        return [one for one in me.net_connections("tcp") if one.raddr and one.raddr.port == port]

    # A transport closes its socket in a later turn of the loop than the one that aborts it.
    async with asyncio.timeout(30):
        while to_server():  # noqa: ASYNC110 - told by no event
            await asyncio.sleep(0.01)


async def test_a_failure_of_the_rank_that_asks_is_told_by_all_and_the_service_stays_fit(
    server: RewardServer, tmp_path: Path
) -> None:
    server.always = 404
    source = {"type": "openrlhf", "urls": [server.url + "/get_reward"]}
    with service_processes(tmp_path, ("reward",), "--layout", "dp=2") as addresses:
        async with open_channel(addresses["reward"]) as channel:
            await RewardClient(channel).initialize({"source": source, "layout": {"dp": 2}})
            with pytest.raises(PreconditionError, match="404"):
                await ask(channel, 1)
            server.always = None
            assert len((await ask(channel, 2)).rewards) == 2
