from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from support.services import ToyRole
from torch.distributed import FileStore

from rolemesh.services.runtime.ranks import meeting
from rolemesh.services.runtime.ranks.meeting import Meeting
from rolemesh.services.runtime.server.config import ServiceConfig
from rolemesh.services.runtime.service_server import ServiceServer


def never() -> bool:
    return False


def meeting_file(folder: Path, world_size: int) -> FileStore:
    return FileStore(str(folder / "meeting"), world_size)


async def test_each_rank_hears_the_addresses_of_all(tmp_path: Path) -> None:
    meetings = [Meeting(meeting_file(tmp_path, 3), rank, 3) for rank in range(3)]
    addresses = [f"127.0.0.1:{5000 + rank}" for rank in range(3)]
    found = await asyncio.gather(
        *(one.exchange(address, never) for one, address in zip(meetings, addresses, strict=True))
    )
    assert found == [addresses] * 3


async def test_the_rank_that_does_not_come_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "MEET_TIMEOUT_S", 0.1)
    with pytest.raises(RuntimeError, match=r"rank 0: the ranks \[1\] did not come within"):
        await Meeting(meeting_file(tmp_path, 2), 0, 2).exchange("127.0.0.1:5000", never)


async def test_a_rank_that_waits_for_others_ends_when_it_is_told_to(tmp_path: Path) -> None:
    config = ServiceConfig(role="toy", layout={"dp": 2}, rank_store=tmp_path / "meeting")
    server = ServiceServer(ToyRole(), config)
    start = asyncio.create_task(server.start())
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(start), 0.5)
    assert not start.done()
    server.runtime.process.exit_requested.set()
    # Much less than the agent's patience, which is 30 s.
    async with asyncio.timeout(5):
        await start
        assert await server.stop()
