"""The meeting of a service's hosts as the first host keeps it: who is there, and who has to end.

No host starts ranks before all have come and reach each other. From then on all of them live and
end together: ranks that lost others are of no use.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rolemesh.rpc.errors import PreconditionError
from rolemesh.v1 import hosts_pb2

logger = logging.getLogger(__name__)

LOST_S = 10.0
"""A host that says nothing for so long is lost. It speaks once a second."""

_WAITING, _LOOKING, _READY, _ENDED = (
    hosts_pb2.HOST_STATE_UNSPECIFIED,
    hosts_pb2.HOST_STATE_LOOKING,
    hosts_pb2.HOST_STATE_READY,
    hosts_pb2.HOST_STATE_ENDED,
)


@dataclass(slots=True)
class _Member:
    host: hosts_pb2.ServiceHost
    heard_at: float
    state: hosts_pb2.HostState.ValueType = _WAITING


class HostMeeting:
    """Hosts of one service, by number. Owner: the loop of the first host's agent.

    Invariant: once all have met, the members stay the same. The first failure is the one that all
    hosts are told.
    """

    def __init__(
        self,
        service: hosts_pb2.JoinHostsRequest,
        timeout_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins to wait.

        Args:
            service: What the hosts have to agree on: all but the host of what each asks with.
            timeout_s: Longest wait for all of them.
            clock: Seconds that never go back.
        """
        self.failure = ""
        """Why all ranks have to end; empty while they need not."""
        self.ended = asyncio.Event()
        """Set once the ranks of all hosts have ended, or their host is lost."""
        self._service = service
        self._timeout_s = timeout_s
        self._clock = clock
        self._began_at = clock()
        self._members: dict[int, _Member] = {}
        self._has_met = False
        self._wants_end = False

    def join(self, request: hosts_pb2.JoinHostsRequest) -> Sequence[hosts_pb2.ServiceHost]:
        """Brings a host in; returns all hosts by number, none while one is missing.

        Raises:
            PreconditionError: MEETING_REFUSED: it does not fit, or its number is taken.
        """
        self.look()
        self._check_fit(request)
        host = request.host
        member = self._members.get(host.host_rank)
        if member is not None and member.host.incarnation != host.incarnation:
            self._refuse_second(member, host)
        if self.failure:
            # Who comes now may wait for the next meeting; who was here has to hear why it failed.
            raise _refused(f"the service ends: {self.failure}", is_retryable=member is None)
        if member is None:
            member = self._members[host.host_rank] = _Member(host, self._clock())
            logger.info(
                "host %d of %d is here: %s (%s)",
                *(host.host_rank, self._service.num_hosts, host.address, host.interface),
            )
        member.heard_at = self._clock()
        self._has_met = len(self._members) == self._service.num_hosts
        return [self._members[rank].host for rank in sorted(self._members)] if self._has_met else []

    def report(self, request: hosts_pb2.ReportHostRequest) -> hosts_pb2.ReportHostResponse:
        """Notes how far a host is; returns what it shall do.

        Raises:
            PreconditionError: MEETING_REFUSED: this process is not in the meeting.
        """
        member = self._members.get(request.host_rank)
        if not self._has_met or member is None or member.host.incarnation != request.incarnation:
            raise _refused(
                f"host_rank is {request.host_rank} with the incarnation "
                f"{request.incarnation[:32]!r}, which the meeting does not know: start the service "
                "on all hosts again"
            )
        member.heard_at = self._clock()
        # Reports may overtake each other; the end is the end.
        member.state = max(member.state, request.state)
        if request.failure:
            self._fail(f"{_name(member.host)}: {request.failure}")
        self._wants_end = self._wants_end or request.wants_end
        self.look()
        is_ready = all(one.state >= _READY for one in self._members.values())
        return hosts_pb2.ReportHostResponse(
            may_start=is_ready and not self.failure,
            failure=self.failure,
            wants_end=self._wants_end and request.host_rank == 0,
        )

    def look(self) -> None:
        """Notices who is lost and who has not come; to be called each second."""
        now = self._clock()
        living = [rank for rank, member in self._members.items() if member.state != _ENDED]
        silent = [rank for rank in living if now - self._members[rank].heard_at > LOST_S]
        if self._members and living == silent:
            self.ended.set()
        if self._has_met:
            for rank in silent:
                self._fail(
                    f"{_name(self._members[rank].host)} has said nothing for {LOST_S:.0f} s: it "
                    "vanished, was stopped or was cut off; see its log"
                )
            return
        for rank in silent:
            # It may come back as another process.
            logger.warning("%s has left before all were here", _name(self._members[rank].host))
            del self._members[rank]
        if now - self._began_at > self._timeout_s:
            number = self._service.num_hosts
            missing = [str(rank) for rank in range(number) if rank not in self._members]
            self._fail(
                f"of {number} hosts, {', '.join(missing)} did not come within "
                f"{self._timeout_s:g} s (meet_timeout_s): start the service there, with "
                f"--host-rank {missing[0]} and the same --meet, or see its log"
            )

    def _check_fit(self, request: hosts_pb2.JoinHostsRequest) -> None:
        service = self._service
        told = (
            ("role", request.role, service.role),
            ("hosts", request.num_hosts, service.num_hosts),
            ("layout", request.layout, service.layout),
            *(
                (f"version of {name}", request.versions.get(name, "none"), version)
                for name, version in service.versions.items()
            ),
        )
        for name, theirs, ours in told:
            if theirs != ours:
                raise _refused(
                    f"{name} is {theirs!r} on host {request.host.host_rank} "
                    f"({request.host.address}), but {ours!r} on host 0: give all hosts of the "
                    "service the same, or another --meet to another service"
                )
        if not 0 <= request.host.host_rank < service.num_hosts:
            raise _refused(
                f"host_rank is {request.host.host_rank}, but hosts is {service.num_hosts}: give 0 "
                f"to {service.num_hosts - 1}"
            )

    def _refuse_second(self, member: _Member, host: hosts_pb2.ServiceHost) -> None:
        heard_s = self._clock() - member.heard_at
        is_same_place = member.host.host_id == host.host_id and _place(member.host) == _place(host)
        if is_same_place:
            remedy = "this one waits for the end of that one, which may be its predecessor"
        else:
            remedy = f"give each host a --host-rank of its own, 0 to {self._service.num_hosts - 1}"
        raise _refused(
            f"host_rank is {host.host_rank}, which another process at {member.host.address} "
            f"({member.host.interface}) has, heard {heard_s:.1f} s ago: {remedy}",
            is_same_place,
        )

    def _fail(self, failure: str) -> None:
        if not self.failure:
            self.failure = failure
            logger.error("the service ends on all hosts: %s", failure)


def _refused(message: str, is_retryable: bool = False) -> PreconditionError:
    return PreconditionError(message, reason="MEETING_REFUSED", retryable=is_retryable)


def _place(host: hosts_pb2.ServiceHost) -> str:
    return host.address.rpartition(":")[0]


def _name(host: hosts_pb2.ServiceHost) -> str:
    return f"host {host.host_rank} ({_place(host)}, {host.interface})"
