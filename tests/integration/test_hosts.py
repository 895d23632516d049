"""A service of several ranks on two hosts: what it computes there, and how it ends."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support import hosts as host_support
from support.coordinator_doors import written
from support.hosts import HostNetwork
from support.service_calls import RecordingCall, initialize, last
from support.services import (
    assert_same,
    make_experience,
    operation_key,
    service_command,
    serving,
    wait_for_announcement,
)

from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import UnavailableError
from rolemesh.rpc.members.authority import Authority
from rolemesh.v1 import experience_pb2, value_pb2, value_pb2_grpc

AUTHORITY = Authority.make()
COORDINATOR = AUTHORITY.issue("coordinator")
MEET_PORT = 29400
END_S = 25.0
"""Within this a service ends on all hosts after one has vanished: 10 s of silence, and the ends."""

START_S = 180.0


class HostedService:
    """A toy service on two hosts."""

    def __init__(self, folder: Path, network: HostNetwork, layout: str, *flags: str) -> None:
        self.network = network
        self.layout = {"dp": 2} if layout == "dp=2" else {"tp": 2, "dp": 2}
        identity = written(AUTHORITY.issue("toy"), folder / "toy.pem")
        self._announce = folder / "announce.json"
        self._announce.unlink(missing_ok=True)
        self.agents = [
            network.start(
                number,
                service_command(
                    *("--layout", layout, "--hosts", "2", "--host-rank", str(number)),
                    *("--meet", f"{network.addresses[0]}:{MEET_PORT}"),
                    *("--host", network.addresses[number], "--identity", str(identity)),
                    *("--announce", str(self._announce), "--drain-timeout-s", "2", *flags),
                ),
                folder / f"host-{number}.log",
                OMP_NUM_THREADS="1",
            )
            for number in range(2)
        ]

    @property
    def logs(self) -> str:
        return "\n".join(f"--- host {i}\n{agent.text}" for i, agent in enumerate(self.agents))

    def address(self) -> str:
        try:
            announced = wait_for_announcement(self.agents[0].process, self._announce, START_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs}") from None
        return str(announced["address"])

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank; two hosts have two ranks, or four."""
        per_host = len(self._ranks(0))
        return self._ranks(number // per_host)[number % per_host]

    def _ranks(self, host: int) -> list[psutil.Process]:
        family = self.agents[host].family()
        ranks = [one for one in family if "--rank-store" in one.cmdline()]
        return sorted(ranks, key=lambda rank: int(rank.environ()["RANK"]))

    def wait(self, timeout_s: float = END_S) -> list[int]:
        """Exit codes, once both agents have ended."""
        deadline = time.monotonic() + timeout_s
        return [agent.wait(max(0.1, deadline - time.monotonic())) for agent in self.agents]


@pytest.fixture(scope="module")
def network() -> Iterator[HostNetwork]:
    with HostNetwork(2) as made:
        yield made


@pytest.fixture(scope="module")
def service(network: HostNetwork, tmp_path_factory: pytest.TempPathFactory) -> HostedService:
    return HostedService(tmp_path_factory.mktemp("hosts"), network, "tp=2,dp=2")


@pytest.fixture
def pair(network: HostNetwork, tmp_path: Path) -> Iterator[HostedService]:
    """A rank on each host, for a test that ends them."""
    made = HostedService(tmp_path, network, "dp=2", "--metrics-port", "0")
    yield made
    for agent in made.agents:
        agent.vanish()


def values(
    channel: MeshChannel, ref: experience_pb2.ExperienceRef | None = None, **key: Any
) -> Any:
    request = value_pb2.ComputeValuesRequest(key=operation_key(**key), experience=ref)
    return last(value_pb2_grpc.ValueServiceStub(channel).ComputeValues(request))


async def test_ranks_of_two_hosts_share_the_rows_of_a_call(
    service: HostedService, tmp_path: Path
) -> None:
    batch = make_experience(37, seed=2)
    own = written(COORDINATOR, tmp_path / "coordinator.pem")
    # As a role elsewhere on the network: an address that both hosts reach.
    place = {"host": service.network.own_address, "identity": own}
    address = service.address()
    async with (
        serving(**place) as producer,
        open_channel(address, identity=COORDINATOR) as channel,
    ):
        await initialize(channel, layout=service.layout, behaviour="meet")
        ref = producer.runtime.publish(operation_key(), batch)
        result = await values(channel, ref)
        call = RecordingCall()
        pulled = await producer.runtime.pull(
            result.experience,
            ["values"],
            call,  # type: ignore[arg-type]
        )
    assert torch.equal(pulled["values"].values, batch["tokens"].values.float() + 1)
    shards = result.experience.groups[0].shards
    assert [shard.rank for shard in shards] == [0, 2]
    hosts = [shard.address.rpartition(":")[0] for shard in shards]
    assert hosts == service.network.addresses
    if host_support.are_apart():
        assert set(result.report.fetched_bytes) == set(call.fetched) == {"grpc"}, "no shared memory"


async def test_what_ranks_of_two_hosts_make_is_one_batch(
    service: HostedService, tmp_path: Path
) -> None:
    own = written(COORDINATOR, tmp_path / "coordinator.pem")
    place = {"host": service.network.own_address, "identity": own}
    address = service.address()
    async with (
        serving(**place) as consumer,
        open_channel(address, identity=COORDINATOR) as channel,
    ):
        await initialize(channel, layout=service.layout, epoch=2, num_rows=10)
        result = await values(channel, epoch=2)
        pulled = await consumer.runtime.pull(
            result.experience,
            [column.name for column in result.experience.groups[0].columns],
            RecordingCall(),  # type: ignore[arg-type]
        )
    assert [shard.rank for shard in result.experience.groups[0].shards] == [0, 1, 2, 3]
    assert_same(pulled, make_experience(10, seed=5))


async def test_process_groups_are_made_anew_for_another_run(
    service: HostedService,
) -> None:
    """The first run's are gone; the store of the ranks holds keys of both."""
    async with open_channel(service.address(), identity=COORDINATOR) as channel:
        await initialize(channel, layout=service.layout, epoch=3, behaviour="meet", num_rows=4)
        assert (await values(channel, epoch=3)).report.num_tokens > 0


def test_a_service_that_is_told_to_end_on_any_host_ends_well_on_all(
    service: HostedService,
) -> None:
    # The last test of this service.
    service.address()
    service.agents[1].terminate()
    assert service.wait(40.0) == [0, 0], service.logs


@pytest.mark.slow
def test_who_is_told_to_end_while_ranks_start_takes_the_others_along(pair: HostedService) -> None:
    deadline = time.monotonic() + START_S
    while "starting 1 ranks of the toy on host 1 of 2" not in pair.agents[1].text:
        assert time.monotonic() < deadline, pair.logs
        time.sleep(0.1)
    pair.agents[1].terminate()
    # Ranks that wait for others would do so for 300 s.
    assert pair.wait(60.0) == [0, 0], pair.logs


@pytest.mark.slow
async def test_an_engine_may_tell_every_process_to_end(pair: HostedService) -> None:
    """As Slurm does: ranks and agents of all hosts, and agents pass it on."""
    async with open_channel(pair.address(), identity=COORDINATOR) as channel:
        await initialize(channel, layout=pair.layout, behaviour="meet")
    for process in [one for agent in pair.agents for one in agent.family()]:
        process.terminate()
    assert pair.wait(40.0) == [0, 0], pair.logs


@pytest.mark.slow
async def test_a_killed_rank_ends_the_service_on_all_hosts_and_is_named(
    pair: HostedService,
) -> None:
    address = pair.address()
    async with open_channel(address, identity=COORDINATOR) as channel:
        await initialize(channel, layout=pair.layout, behaviour="meet")
        victim = pair.rank(1)
        victim.send_signal(signal.SIGKILL)
        assert pair.wait() == [1, 1], pair.logs
    for agent in pair.agents:
        assert "toy rank 1 (pid " in agent.text
        assert "was killed by signal 9 (SIGKILL)" in agent.text
    assert "host 1 (" in pair.agents[0].text


@pytest.mark.slow
async def test_a_call_that_waits_for_a_host_that_vanished_fails_by_name(
    pair: HostedService,
) -> None:
    address = pair.address()
    async with open_channel(address, identity=COORDINATOR) as channel:
        await initialize(channel, layout=pair.layout, behaviour="meet")
        pair.agents[1].vanish()
        started = time.monotonic()
        with pytest.raises(UnavailableError) as lost:
            await values(channel)
        assert time.monotonic() - started < END_S
        assert lost.value.reason in ("RANKS_DIVERGED", "PEER_UNREACHABLE")
        assert "rank 1" in lost.value.message
    assert pair.agents[0].wait(END_S) == 1


@pytest.mark.slow
async def test_a_short_cut_is_survived_and_a_long_one_ends_both_hosts(pair: HostedService) -> None:
    if not host_support.are_apart():
        pytest.skip("loopback has no cable to pull: needs network namespaces")
    async with open_channel(pair.address(), identity=COORDINATOR) as channel:
        await initialize(channel, layout=pair.layout, behaviour="meet")
        pair.network.cut(1)
        await asyncio.sleep(4.0)
        pair.network.mend(1)
        assert (await values(channel)).report.num_tokens > 0, "both meet at a barrier"
    pair.network.cut(1)
    try:
        assert pair.wait() == [1, 1], pair.logs
    finally:
        pair.network.mend(1)
    assert "has said nothing for 10 s" in pair.agents[0].text
    assert "has not answered for 10 s" in pair.agents[1].text
