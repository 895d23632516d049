"""The meeting of a service's hosts: who gets in, who is refused by name, and when all end."""

from __future__ import annotations

import pytest

from rolemesh.rpc.errors import PreconditionError
from rolemesh.services.runtime.hosts.meeting import LOST_S, HostMeeting
from rolemesh.v1 import hosts_pb2

TIMEOUT_S = 60.0
LOOKING, READY, ENDED = (
    hosts_pb2.HOST_STATE_LOOKING,
    hosts_pb2.HOST_STATE_READY,
    hosts_pb2.HOST_STATE_ENDED,
)
SERVICE = hosts_pb2.JoinHostsRequest(
    role="actor", num_hosts=2, layout="tp=2,dp=2", versions={"torch": "2.13.0"}
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meeting(clock: Clock) -> HostMeeting:
    return HostMeeting(SERVICE, TIMEOUT_S, clock=clock)


def request(
    host_rank: int, *, process: str = "", place: str = "", host_id: str = "", **changes: object
) -> hosts_pb2.JoinHostsRequest:
    """Of host 0 at 10.0.0.2, and so on; each with one process unless another one is named."""
    host = hosts_pb2.ServiceHost(
        host_rank=host_rank,
        address=f"{place or f'10.0.0.{2 + host_rank}'}:5000",
        interface="eth0",
        host_id=host_id or f"boot{host_rank}",
        incarnation=process or f"process{host_rank}",
    )
    fields = {
        "role": SERVICE.role,
        "num_hosts": SERVICE.num_hosts,
        "layout": SERVICE.layout,
        "versions": SERVICE.versions,
    }
    return hosts_pb2.JoinHostsRequest(host=host, **(fields | changes))  # type: ignore[arg-type]


def report(
    host_rank: int, state: hosts_pb2.HostState.ValueType = READY, **changes: object
) -> hosts_pb2.ReportHostRequest:
    return hosts_pb2.ReportHostRequest(
        host_rank=host_rank,
        incarnation=f"process{host_rank}",
        state=state,
        **changes,  # type: ignore[arg-type]
    )


def met(meeting: HostMeeting) -> HostMeeting:
    for rank in (1, 0, 1):
        meeting.join(request(rank))
    return meeting


def test_hosts_hear_of_each_other_once_all_are_here(meeting: HostMeeting) -> None:
    assert meeting.join(request(1)) == []
    assert [host.address for host in meeting.join(request(0))] == ["10.0.0.2:5000", "10.0.0.3:5000"]
    assert [host.host_rank for host in meeting.join(request(1))] == [0, 1]


def test_ranks_start_once_all_hosts_reach_each_other(meeting: HostMeeting) -> None:
    met(meeting)
    assert not meeting.report(report(0)).may_start
    assert not meeting.report(report(1, LOOKING)).may_start
    assert meeting.report(report(1)).may_start
    assert meeting.report(report(0)).may_start


def test_a_host_that_cannot_reach_another_ends_all_by_name(meeting: HostMeeting) -> None:
    met(meeting)
    answer = meeting.report(report(1, LOOKING, failure="cannot reach host 0 at 172.17.0.1:5000"))
    assert not answer.may_start
    told = "host 1 (10.0.0.3, eth0): cannot reach host 0 at 172.17.0.1:5000"
    assert meeting.report(report(0)).failure == answer.failure == told
    # The first one counts.
    assert meeting.report(report(0, failure="later")).failure == told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"role": "critic"}, "role is 'critic' on host 1 .*but 'actor' on host 0"),
        ({"num_hosts": 3}, "hosts is 3 on host 1 .*but 2 on host 0"),
        ({"layout": "tp=4,dp=1"}, "layout is 'tp=4,dp=1' on host 1 .*but 'tp=2,dp=2' on host 0"),
        ({"versions": {"torch": "2.12.0"}}, "version of torch is '2.12.0' on host 1"),
        ({"versions": {}}, "version of torch is 'none' on host 1"),
    ],
)
def test_a_host_of_another_service_is_refused_by_field_and_value(
    meeting: HostMeeting, changes: dict[str, object], told: str
) -> None:
    with pytest.raises(PreconditionError, match=told) as refused:
        meeting.join(request(1, **changes))
    assert (refused.value.reason, refused.value.retryable) == ("MEETING_REFUSED", False)
    assert len(met(meeting).join(request(0))) == 2


def test_a_number_beyond_the_hosts_is_refused(meeting: HostMeeting) -> None:
    with pytest.raises(PreconditionError, match="host_rank is 2, but hosts is 2: give 0 to 1"):
        meeting.join(request(2))


def test_a_second_host_with_the_same_number_is_refused_by_name(meeting: HostMeeting) -> None:
    met(meeting)
    told = r"host_rank is 1, which another process at 10\.0\.0\.3:5000 \(eth0\) has"
    with pytest.raises(PreconditionError, match=told) as refused:
        meeting.join(request(1, process="other", place="10.0.0.9", host_id="boot9"))
    assert not refused.value.retryable
    assert meeting.report(report(1)).failure == "", "who was there is unharmed"


def test_a_host_that_starts_again_waits_for_the_end_of_its_former_process(
    meeting: HostMeeting, clock: Clock
) -> None:
    meeting.join(request(1, process="former"))
    clock.now += LOST_S / 2
    with pytest.raises(PreconditionError, match="waits for the end of that one") as refused:
        meeting.join(request(1))
    assert refused.value.retryable
    clock.now += LOST_S
    assert meeting.join(request(1)) == [], "it takes the place of one that is silent"
    assert len(meeting.join(request(0))) == 2


def test_who_comes_after_the_end_may_wait_for_the_next_meeting(meeting: HostMeeting) -> None:
    met(meeting)
    meeting.report(report(1, ENDED, failure="actor rank 3 was killed"))
    with pytest.raises(PreconditionError, match="rank 3 was killed") as refused:
        meeting.join(request(0))
    assert not refused.value.retryable
    with pytest.raises(PreconditionError) as refused:
        meeting.join(request(1, process="next"))
    assert refused.value.retryable


def test_hosts_that_do_not_come_in_time_are_named(meeting: HostMeeting, clock: Clock) -> None:
    for _ in range(int(TIMEOUT_S) + 1):
        meeting.join(request(0))
        clock.now += 1.0
    meeting.look()
    assert "of 2 hosts, 1 did not come within 60 s (meet_timeout_s)" in meeting.failure
    assert "--host-rank 1" in meeting.failure
    with pytest.raises(PreconditionError, match="1 did not come"):
        meeting.join(request(0))


def test_a_host_that_falls_silent_ends_all_by_name(meeting: HostMeeting, clock: Clock) -> None:
    met(meeting)
    for _ in range(int(LOST_S)):
        clock.now += 1.0
        assert meeting.report(report(0)).failure == ""
    clock.now += 1.0
    failure = meeting.report(report(0)).failure
    assert failure.startswith("host 1 (10.0.0.3, eth0) has said nothing for 10 s")


def test_a_host_whose_ranks_have_ended_may_be_silent(meeting: HostMeeting, clock: Clock) -> None:
    met(meeting)
    meeting.report(report(1, ENDED))
    # A report that was sent before, and comes after.
    meeting.report(report(1))
    clock.now += LOST_S + 1
    assert meeting.report(report(0)).failure == ""
    assert not meeting.ended.is_set()
    meeting.report(report(0, ENDED))
    assert meeting.ended.is_set()


def test_the_wish_of_one_host_to_end_reaches_the_first(meeting: HostMeeting) -> None:
    met(meeting)
    assert not meeting.report(report(0)).wants_end
    assert not meeting.report(report(1, wants_end=True)).wants_end, "rank 0 is on host 0"
    assert meeting.report(report(0)).wants_end


def test_a_stranger_s_report_is_refused(meeting: HostMeeting) -> None:
    met(meeting)
    stranger = report(1, failure="the end")
    stranger.incarnation = "stranger"
    with pytest.raises(PreconditionError, match="which the meeting does not know"):
        meeting.report(stranger)
    assert meeting.failure == ""
