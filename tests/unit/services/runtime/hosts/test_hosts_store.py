"""torch's store over the agent of the first host: what torch calls, and what a wait says."""

from __future__ import annotations

import asyncio
import datetime
import threading
import time
from collections.abc import Iterator

import pytest
from torch.distributed import PrefixStore

from rolemesh.rpc.errors import UnsupportedError
from rolemesh.rpc.loop_thread import LoopThread
from rolemesh.services.runtime.hosts.door import AgentDoor
from rolemesh.services.runtime.hosts.meeting import HostMeeting
from rolemesh.services.runtime.hosts.store import HostsStore
from rolemesh.services.runtime.server.config import ServiceConfig
from rolemesh.v1 import hosts_pb2


@pytest.fixture
def address() -> Iterator[str]:
    thread = LoopThread("agent", "test")
    config = ServiceConfig(role="actor", layout={"dp": 2}, hosts=2, meet="127.0.0.1:1")
    service = hosts_pb2.JoinHostsRequest(role="actor", num_hosts=2, layout="", versions={})
    door = AgentDoor(config, "agent", HostMeeting(service, 60.0))
    yield f"127.0.0.1:{thread.run(door.open('127.0.0.1', 0))}"
    thread.run(door.close())
    thread.close()


def test_stores_of_two_ranks_see_the_same_keys(address: str) -> None:
    one, other = HostsStore(address, None), HostsStore(address, None)
    one.set("text", "a")
    one.set("bytes", b"\x00\xff")
    assert (other.get("text"), other.get("bytes")) == (b"a", b"\x00\xff")
    assert other.check(["text", "bytes"])
    assert not other.check(["text", "none"])
    assert [one.add("n", 2), other.add("n", 3), one.add("n", -1)] == [2, 5, 4]
    # As torch's groups call it, through C++.
    within = PrefixStore("mesh", one)
    within.set("a", "1")
    assert within.clone().get("a") == other.get("mesh/a") == b"1"
    assert other.delete_key("text")
    assert not one.delete_key("text")
    one.close()
    other.close()


def test_a_wait_ends_with_the_value_or_in_time(address: str) -> None:
    one, other = HostsStore(address, None), HostsStore(address, None)
    started = time.monotonic()
    threading.Timer(0.5, one.set, ("late", b"1")).start()
    other.wait(["late"], datetime.timedelta(seconds=30))
    assert 0.4 < time.monotonic() - started < 10
    with pytest.raises(TimeoutError, match=f"no rank has set 'none' at {address} within 0 s"):
        other.wait(["late", "none"], datetime.timedelta(milliseconds=200))
    other.set_timeout(datetime.timedelta(seconds=0.2))
    assert other.timeout == datetime.timedelta(seconds=0.2)
    with pytest.raises(TimeoutError, match="'never'"):
        other.get("never")
    one.close()
    other.close()


async def test_other_hosts_keep_no_store() -> None:
    config = ServiceConfig(
        role="actor", layout={"dp": 2}, hosts=2, host_rank=1, meet="10.0.0.2:29400"
    )
    door = AgentDoor(config, "agent", None)
    port = await door.open("127.0.0.1", 0)
    store = HostsStore(f"127.0.0.1:{port}", None)
    with pytest.raises(
        UnsupportedError, match=r"the first one keeps the meeting: give --meet 10\.0\.0\.2"
    ):
        await asyncio.to_thread(store.set, "a", b"1")
    store.close()
    await door.close()
