"""Agents of a service's hosts, over real connections: who meets, who is refused, who is missed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from support.coordinator_doors import written

from rolemesh.rpc.members.authority import Authority
from rolemesh.rpc.members.identity import Identity
from rolemesh.services.runtime.hosts import link as links
from rolemesh.services.runtime.hosts import meeting
from rolemesh.services.runtime.hosts.door import AgentDoor
from rolemesh.services.runtime.hosts.interfaces import of_this_host
from rolemesh.services.runtime.hosts.link import HostLink, HostsError
from rolemesh.services.runtime.server.config import load_config

AUTHORITY = Authority.make()
BOUND_S = 30.0
LOST_S = 2.0


class Agent:
    """A link of a host, and what it was told."""

    def __init__(self, number: int, meet: str, identity: Path | None, *flags: str) -> None:
        arguments = [
            *("--layout", "tp=2,dp=2", "--hosts", "2", "--host-rank", str(number)),
            *("--host", f"127.0.0.{2 + number}", "--meet", meet, "--meet-timeout-s", str(BOUND_S)),
            *(("--identity", str(identity)) if identity is not None else ()),
            *flags,
        ]
        config = of_this_host(load_config("actor", arguments, {}))
        self.failure = ""
        self.failed = threading.Event()
        self.drained = threading.Event()
        self.link = HostLink(config, on_failure=self._fail, on_wants_end=self.drained.set)

    def _fail(self, why: str) -> None:
        self.failure = why
        self.failed.set()

    def vanish(self) -> None:
        """Leaves without a word."""

        async def leave() -> None:
            assert self.link._following is not None
            self.link._following.cancel()
            await self.link._door.close()

        self.link._thread.run(leave())
        self.link._heard_at = 0.0


class Hosts:
    """Agents on addresses of loopback; all that were made are closed."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.2", 0))
            self.meet = f"127.0.0.2:{free.getsockname()[1]}"
        self.folder = folder
        self.identity = self.issued("actor")
        self._pool = ThreadPoolExecutor(8)
        self._agents: list[Agent] = []

    def issued(self, member: str, authority: Authority = AUTHORITY) -> Path:
        return self.written(member, authority.issue(member))

    def written(self, name: str, identity: Identity) -> Path:
        return written(identity, self.folder / f"{name}-{len(list(self.folder.iterdir()))}.pem")

    def agent(self, number: int, *flags: str, identity: Path | None = None) -> Agent:
        self._agents.append(Agent(number, self.meet, identity or self.identity, *flags))
        return self._agents[-1]

    def opened(self, agent: Agent) -> Future[None]:
        return self._pool.submit(agent.link.open)

    def met(self) -> tuple[Agent, Agent]:
        both = self.agent(0), self.agent(1)
        for opening in [self.opened(agent) for agent in both]:
            opening.result(BOUND_S)
        return both

    def close(self) -> None:
        # At once: the first host waits for the others' ends.
        list(self._pool.map(lambda agent: agent.link.close(), self._agents))
        self._pool.shutdown()


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setattr(meeting, "LOST_S", LOST_S)
    monkeypatch.setattr(links, "LOST_S", LOST_S)
    monkeypatch.setattr(links, "REPORT_S", 0.2)
    monkeypatch.setattr(links, "JOIN_S", 0.1)
    made = Hosts(tmp_path)
    yield made
    made.close()


def refusal(opening: Future[None], within_s: float = BOUND_S) -> str:
    with pytest.raises(HostsError) as refused:
        opening.result(within_s)
    return str(refused.value)


def test_two_hosts_meet_and_end_together(hosts: Hosts) -> None:
    first, second = hosts.met()
    second.link.ask_end()
    assert first.drained.wait(BOUND_S)
    assert not second.drained.is_set(), "rank 0 is on the first host"
    assert (first.failure, second.failure) == ("", "")


def test_a_late_host_is_waited_for(hosts: Hosts) -> None:
    first = hosts.opened(hosts.agent(0))
    time.sleep(2.0)
    assert not first.done()
    hosts.opened(hosts.agent(1)).result(BOUND_S)
    first.result(BOUND_S)


def test_a_host_that_comes_before_the_first_waits_for_it(hosts: Hosts) -> None:
    second = hosts.opened(hosts.agent(1))
    time.sleep(1.0)
    hosts.opened(hosts.agent(0)).result(BOUND_S)
    second.result(BOUND_S)


def test_a_host_that_does_not_come_is_named_within_the_bound(hosts: Hosts) -> None:
    started = time.monotonic()
    first = hosts.opened(hosts.agent(0, "--meet-timeout-s", "2"))
    told = refusal(first)
    assert "of 2 hosts, 1 did not come within 2 s (meet_timeout_s)" in told
    assert time.monotonic() - started < 8.0


def test_where_the_first_host_does_not_come_the_others_say_so(hosts: Hosts) -> None:
    told = refusal(hosts.opened(hosts.agent(1, "--meet-timeout-s", "1")))
    assert f"host 1 has not met the others at {hosts.meet} within 1 s" in told
    assert "does not answer" in told


@pytest.mark.parametrize("kind", ["another mesh", "forged", "no certificate"])
def test_a_host_with_a_wrong_certificate_is_refused_and_the_right_one_gets_in(
    kind: str, hosts: Hosts
) -> None:
    stranger = Authority.make().issue("actor")
    if kind == "forged":
        # It trusts the right authority, and shows a certificate of another one.
        stranger = Identity(stranger.key, stranger.certificate, AUTHORITY.issue("actor").authority)
    first = hosts.opened(hosts.agent(0))
    bad = hosts.agent(1, "--meet-timeout-s", "4", identity=hosts.written("bad", stranger))
    if kind == "no certificate":
        bad.link._config = bad.link._config.model_copy(update={"identity": None})
    told = refusal(hosts.opened(bad))
    if kind == "another mesh":
        assert f"host 1 and the agent at {hosts.meet} do not trust each other's" in told
    else:
        # It learns no more than that it is not let in.
        assert f"host 1 has not met the others at {hosts.meet} within 4 s" in told
        assert "may not trust this one's certificate" in told
    assert not first.done()
    hosts.opened(hosts.agent(1)).result(BOUND_S)
    first.result(BOUND_S)


def test_a_member_of_another_role_is_refused_by_name(hosts: Hosts) -> None:
    first = hosts.opened(hosts.agent(0))
    started = time.monotonic()
    told = refusal(hosts.opened(hosts.agent(1, identity=hosts.issued("critic"))))
    assert "JoinHosts of the actor is not for critic" in told
    assert time.monotonic() - started < 10.0, "at once, since waiting does not help"
    hosts.opened(hosts.agent(1)).result(BOUND_S)
    first.result(BOUND_S)


def test_a_second_host_with_the_same_number_is_refused_by_name(hosts: Hosts) -> None:
    first, second = hosts.met()
    told = refusal(hosts.opened(hosts.agent(1, "--host", "127.0.0.9")))
    assert "host_rank is 1, which another process at 127.0.0.3:" in told
    time.sleep(2 * LOST_S)
    assert (first.failure, second.failure) == ("", "")


def test_a_host_of_another_layout_is_refused_by_field_and_value(hosts: Hosts) -> None:
    first = hosts.opened(hosts.agent(0))
    told = refusal(hosts.opened(hosts.agent(1, "--layout", "tp=2,dp=4")))
    assert "layout is 'pp=1,tp=2,dp=4,fsdp=4,order=tp-pp-dp' on host 1" in told
    assert "but 'pp=1,tp=2,dp=2,fsdp=2,order=tp-pp-dp' on host 0" in told
    assert not first.done()


def test_an_address_that_others_do_not_reach_is_found_before_ranks_start(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "REACH_S", 1.0)
    opening = AgentDoor.open

    async def open_elsewhere(self: AgentDoor, host: str, port: int) -> int:
        bound = await opening(self, host, port)
        # Port 9 takes no connection.
        return bound if self._config.host_rank == 0 else 9

    monkeypatch.setattr(AgentDoor, "open", open_elsewhere)
    both = [hosts.opened(hosts.agent(number)) for number in (0, 1)]
    for opening_one in both:
        told = refusal(opening_one)
        assert "host 0 (127.0.0.2, lo): cannot reach host 1 at 127.0.0.3:9" in told
        assert "of its interface lo" in told
        assert "--interface" in told


def test_an_address_at_which_another_host_answers_is_found(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with 172.17.0.1, which each host with Docker has for itself."""
    monkeypatch.setattr(links, "REACH_S", 1.0)
    opening = AgentDoor.open
    ports: dict[int, int] = {}

    async def open_elsewhere(self: AgentDoor, host: str, port: int) -> int:
        rank = self._config.host_rank
        ports[rank] = await opening(self, "0.0.0.0", port)
        return ports[rank] if rank == 0 else int(hosts.meet.rpartition(":")[2])

    monkeypatch.setattr(AgentDoor, "open", open_elsewhere)
    both = [hosts.opened(hosts.agent(number)) for number in (0, 1)]
    assert "cannot reach host 1 at 127.0.0.3:" in (told := refusal(both[0]))
    assert "host 0 answers there" in told
    assert "host 0 answers there" in refusal(both[1])


def test_a_host_that_vanishes_is_noticed_by_name(hosts: Hosts) -> None:
    first, second = hosts.met()
    second.vanish()
    assert first.failed.wait(BOUND_S)
    assert "host 1 (127.0.0.3, lo) has said nothing for" in first.failure


def test_the_others_notice_that_the_first_host_has_vanished(hosts: Hosts) -> None:
    first, second = hosts.met()
    first.vanish()
    assert second.failed.wait(BOUND_S)
    assert f"the first host, at {hosts.meet}, has not answered" in second.failure


def test_why_the_ranks_of_a_host_ended_is_told_to_all(hosts: Hosts) -> None:
    first, second = hosts.met()
    second.link.close("actor rank 3 (pid 7) was killed by signal 9 (SIGKILL)")
    assert first.failed.wait(BOUND_S)
    assert first.failure == (
        "host 1 (127.0.0.3, lo): actor rank 3 (pid 7) was killed by signal 9 (SIGKILL)"
    )


def test_a_first_host_whose_name_leads_elsewhere_says_so(hosts: Hosts) -> None:
    hosts.meet = hosts.meet.replace("127.0.0.2", "127.0.0.1")
    told = refusal(hosts.opened(hosts.agent(0)))
    assert "leads to 127.0.0.1, but this host, the first, takes part at 127.0.0.2" in told


def test_a_port_that_is_taken_is_named(hosts: Hosts) -> None:
    with socket.socket() as other:
        host, _, port = hosts.meet.rpartition(":")
        other.bind((host, int(port)))
        other.listen()
        told = refusal(hosts.opened(hosts.agent(0)))
    assert f"host 0 cannot listen at {hosts.meet}" in told
