"""A host's agent in the meeting of its service: it joins, looks at others, and stays in touch."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import socket
import time
import uuid
from collections.abc import Callable, Sequence

from rolemesh.engine.transport.slots.shm import host_identity
from rolemesh.rpc.address import host_and_port, host_of
from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import DeadlineError, RolemeshError, UnavailableError
from rolemesh.rpc.loop_thread import LoopThread
from rolemesh.rpc.members.identity import CLOSED, NOT_TRUSTED, Identity, IdentityError
from rolemesh.services.runtime.hosts.door import AgentDoor
from rolemesh.services.runtime.hosts.meeting import LOST_S, HostMeeting
from rolemesh.services.runtime.server.config import ServiceConfig
from rolemesh.v1 import hosts_pb2, hosts_pb2_grpc

logger = logging.getLogger(__name__)

REPORT_S = 1.0
"""Pause between two signs of life."""

CALL_S = 3.0
"""Deadline of one sign of life."""

JOIN_S = 0.5
"""Pause between two tries to join, and of the hosts' looks at each other."""

REACH_S = 15.0
"""Longest time to reach another host, whose agent answers already."""

FAREWELL_S = 5.0
"""How long the first host stays so that the others hear why all end, and others to say it."""

MAX_FAILURE_CHARACTERS = 1000

_COMPONENTS = ("rolemesh", "torch")
"""Whose versions have to be equal on all hosts."""


class HostsError(RuntimeError):
    """The hosts of a service do not come together, or no longer are; names host and remedy."""


class HostLink:
    """One host's part in the meeting. Owner: the main thread of its agent.

    Example::

        link = HostLink(config, on_failure=end_ranks, on_wants_end=drain)
        link.open()  # returns once all hosts reach each other
        ...  # the ranks of this host live
        link.close("rank 3 was killed by signal 9 (SIGKILL)")
    """

    def __init__(
        self,
        config: ServiceConfig,
        *,
        on_failure: Callable[[str], None],
        on_wants_end: Callable[[], None],
    ) -> None:
        """Prepares.

        Args:
            config: Of `of_this_host`, with several hosts.
            on_failure: Called, on another thread, with the reason why the ranks have to end.
            on_wants_end: Called, on another thread, on the first host, each second once a host was
                told to end: rank 0 shall drain and end the others.
        """
        self._config = config
        self._on_failure = on_failure
        self._on_wants_end = on_wants_end
        self._incarnation = uuid.uuid4().hex
        self._meeting: HostMeeting | None = None
        if config.host_rank == 0:
            self._meeting = HostMeeting(_service(config), config.meet_timeout_s)
        self._door = AgentDoor(config, self._incarnation, self._meeting)
        self._thread = LoopThread("hosts", "agent")
        self._channel: MeshChannel | None = None
        self._identity: Identity | None = None
        self._following: asyncio.Task[None] | None = None
        self._heard_at = 0.0
        """When the first host answered last, on the clock time.monotonic(); 0: never."""
        self._wants_end = False

    def open(self) -> None:
        """Returns once all hosts have come and reach each other.

        Raises:
            HostsError: This one was refused, one has not come, or two do not reach each other.
        """
        try:
            self._thread.run(self._open())
        except (RolemeshError, IdentityError, OSError) as error:
            raise HostsError(str(error)) from error

    def ask_end(self) -> None:
        """Has the whole service drain and end. Safe in a handler of signals."""
        self._wants_end = True

    def close(self, failure: str = "") -> None:
        """Says that this host's ranks have ended, and leaves.

        Args:
            failure: Why, where they did not end well.
        """
        try:
            self._thread.run(self._close(failure[:MAX_FAILURE_CHARACTERS]), 2 * FAREWELL_S)
        except (RolemeshError, TimeoutError) as error:
            logger.warning("the other hosts may not have heard of this one's end: %s", error)
        finally:
            self._thread.close(1.0)

    # --- on the loop --------------------------------------------------------------------------

    async def _open(self) -> None:
        config = self._config
        meet = config.meet or ""
        if config.identity is not None:
            self._identity = Identity.read(config.identity)
        port = 0
        if config.host_rank == 0:
            port = int(meet.rpartition(":")[2])
            await _check_leads_here(meet, config.host)
        try:
            port = await self._door.open(config.host, port)
        except RuntimeError as error:
            raise HostsError(
                f"host {config.host_rank} cannot listen at {config.host}:{port} ({error}): give "
                "--meet a free port of the first host"
            ) from error
        self._channel = open_channel(meet, retries=False, identity=self._identity)
        own = hosts_pb2.ServiceHost(
            host_rank=config.host_rank,
            address=host_and_port(config.host, port),
            interface=config.interface or "",
            host_id=host_identity(),
            incarnation=self._incarnation,
        )
        logger.info(
            "host %d of %d of the %s, at %s (%s), meets the others at %s",
            *(own.host_rank, config.hosts, config.role, own.address, own.interface, meet),
        )
        hosts = await self._join(own)
        failure = await self._failure_to_reach(hosts, own)
        state = hosts_pb2.HOST_STATE_LOOKING if failure else hosts_pb2.HOST_STATE_READY
        while not (answer := await self._report(state, failure)).may_start:
            if answer.failure:
                raise HostsError(answer.failure)
            await asyncio.sleep(JOIN_S)
        logger.info("all %d hosts of the %s reach each other", len(hosts), config.role)
        self._following = asyncio.create_task(self._follow())

    async def _join(self, own: hosts_pb2.ServiceHost) -> Sequence[hosts_pb2.ServiceHost]:
        config = self._config
        request = _service(config)
        request.host.CopyFrom(own)
        deadline = time.monotonic() + config.meet_timeout_s + (LOST_S if self._meeting else 0.0)
        why = "nothing answers there"
        while time.monotonic() < deadline:
            try:
                answer = await self._stub.JoinHosts(request, timeout=CALL_S)
                self._heard_at = time.monotonic()
                if answer.hosts:
                    return answer.hosts
                why = "not all have come"
            except RolemeshError as error:
                if self._meeting is not None and self._meeting.failure:
                    raise HostsError(self._meeting.failure) from error
                if NOT_TRUSTED in error.message:
                    raise HostsError(
                        f"host {config.host_rank} and the agent at {config.meet} do not trust each "
                        f"other's certificates ({error.message}): give both an identity of the "
                        "same authority (rolemesh certs issue), or neither"
                    ) from error
                if not error.retryable and not isinstance(error, DeadlineError):
                    raise HostsError(
                        f"host {config.host_rank} is refused at {config.meet}: {error.message}"
                    ) from error
                why = error.message
            await asyncio.sleep(JOIN_S)
        if CLOSED in why:
            why += ". An agent that closes connections may not trust this one's certificate"
        raise HostsError(
            f"host {config.host_rank} has not met the others at {config.meet} within "
            f"{config.meet_timeout_s:g} s (meet_timeout_s): {why}"
        )

    async def _failure_to_reach(
        self, hosts: Sequence[hosts_pb2.ServiceHost], own: hosts_pb2.ServiceHost
    ) -> str:
        """Which host this one cannot reach, and why; empty if it reaches all."""
        others = [host for host in hosts if host.host_rank != own.host_rank]
        whys = await asyncio.gather(*(self._why_not_reached(host) for host in others))
        failed = [(host, why) for host, why in zip(others, whys, strict=True) if why]
        if not failed:
            return ""
        host, why = failed[0]
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return (
            f"cannot reach host {host.host_rank}{more} at {host.address}, of its interface "
            f"{host.interface}: {why}. Give both hosts an --interface of a network that they "
            "share, and open all ports between them"
        )

    async def _why_not_reached(self, host: hosts_pb2.ServiceHost) -> str:
        request = hosts_pb2.LookAtHostRequest()
        async with open_channel(host.address, retries=False, identity=self._identity) as channel:
            stub = _stub(channel)
            deadline = time.monotonic() + REACH_S
            while True:
                try:
                    answer = await stub.LookAtHost(request, timeout=CALL_S)
                except RolemeshError as error:
                    why = error.message
                else:
                    if answer.incarnation == host.incarnation:
                        return ""
                    # An address such as 172.17.0.1, which each host has for itself.
                    why = f"host {answer.host_rank} answers there"
                if time.monotonic() > deadline:
                    return why
                await asyncio.sleep(JOIN_S)

    async def _follow(self) -> None:
        """Stays in touch until the ranks have ended, here or elsewhere."""
        while True:
            await asyncio.sleep(REPORT_S)
            try:
                answer = await self._report(hosts_pb2.HOST_STATE_READY)
            except (RolemeshError, HostsError) as error:
                self._on_failure(str(error))
                return
            if answer.failure:
                self._on_failure(answer.failure)
                return
            if answer.wants_end:
                self._on_wants_end()

    async def _report(
        self, state: hosts_pb2.HostState.ValueType, failure: str = ""
    ) -> hosts_pb2.ReportHostResponse:
        """Says how far this host is, again and again until the first host answers.

        Raises:
            RolemeshError: The first host refuses it.
            HostsError: The first host has been silent for LOST_S.
        """
        request = hosts_pb2.ReportHostRequest(
            host_rank=self._config.host_rank,
            incarnation=self._incarnation,
            state=state,
            failure=failure,
            wants_end=self._wants_end,
        )
        while True:
            try:
                answer = await self._stub.ReportHost(request, timeout=CALL_S)
            except (UnavailableError, DeadlineError) as error:
                if time.monotonic() - self._heard_at > LOST_S:
                    raise HostsError(
                        f"the first host, at {self._config.meet}, has not answered for "
                        f"{LOST_S:.0f} s: it ended, vanished or was cut off ({error.message})"
                    ) from error
                await asyncio.sleep(JOIN_S)
                continue
            self._heard_at = time.monotonic()
            return answer

    async def _close(self, failure: str) -> None:
        if self._following is not None:
            self._following.cancel()
        try:
            if self._heard_at > 0:
                async with asyncio.timeout(FAREWELL_S):
                    await self._report(hosts_pb2.HOST_STATE_ENDED, failure)
                    if self._meeting is not None:
                        await self._meeting.ended.wait()
        except (TimeoutError, HostsError) as error:
            logger.info("leaves without the others: %s", error or "they have not ended yet")
        finally:
            if self._channel is not None:
                await self._channel.close()
            await self._door.close()

    @property
    def _stub(self) -> hosts_pb2_grpc.HostsServiceAsyncStub:
        if self._channel is None:
            raise RuntimeError("the link is not open")
        return _stub(self._channel)


def _stub(channel: MeshChannel) -> hosts_pb2_grpc.HostsServiceAsyncStub:
    return hosts_pb2_grpc.HostsServiceStub(channel)


def _service(config: ServiceConfig) -> hosts_pb2.JoinHostsRequest:
    """What all hosts of the service have to agree on."""
    return hosts_pb2.JoinHostsRequest(
        role=config.role,
        num_hosts=config.hosts,
        layout=config.layout.layout().flag(),
        versions={name: importlib.metadata.version(name) for name in _COMPONENTS},
    )


async def _check_leads_here(meet: str, host: str) -> None:
    """Raises HostsError where the name of `meet` leads to another address than the first host's."""
    loop, name = asyncio.get_running_loop(), host_of(meet)
    try:
        found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        # The name may become known later; until then the meeting is waited for.
        return
    addresses = {str(one[4][0]) for one in found}
    if host not in addresses:
        raise HostsError(
            f"meet is {meet!r}, which leads to {', '.join(sorted(addresses))}, but this host, the "
            f"first, takes part at {host}: give --meet that address, or --interface the network of "
            "the other"
        )
