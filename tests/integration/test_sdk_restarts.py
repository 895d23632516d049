"""One watch of the SDK over a run whose coordinator is killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
from support import warm_processes
from support.fake_roles import fake_mesh, fake_recipe

from rolemesh.coordinator.sdk import AsyncClient, Event, RetryPolicy, RunState, StepMade
from rolemesh.coordinator.state.redis import RedisStateStore
from rolemesh.coordinator.state.server.embedded import EmbeddedValkey
from rolemesh.coordinator.state.store import RunStream

PATIENT = RetryPolicy(budget_s=60.0, first_s=0.05, longest_s=0.5)
NUM_KILLS = 2
EVENTS_BETWEEN = 25


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@asynccontextmanager
async def coordinator(folder: Path, port: int, store_url: str) -> AsyncIterator[None]:
    """`rolemesh coordinator` on a port; killed at the end of the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rolemesh.coordinator.commands.cli", "coordinator", "--json"),
        *("--data", "data", "--port", str(port), "--http-port", "0", "--store-url", store_url),
        *("--folder", "/", "--allow-host", "127.0.0.1"),
        cwd=folder,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("ROLEMESH_")},
            **warm_processes.commands(),
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline()
        fork = psutil.Process(warm_processes.forked(process.pid))
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await asyncio.to_thread(psutil.wait_procs, [fork])  # It has the port.


async def test_one_watch_through_killed_coordinators_misses_and_repeats_no_event(
    tmp_path: Path,
) -> None:
    seen: list[Event] = []

    async def watch(client: AsyncClient) -> None:
        async for event in client.watch_run("watched"):
            seen.append(event)

    async def more_events(watching: asyncio.Task[None]) -> None:
        number = len(seen) + EVENTS_BETWEEN
        while len(seen) < number:
            assert not watching.done()
            await asyncio.sleep(0.05)

    async with (
        fake_mesh(delay=lambda _, method: 0.03 if method == "Update" else 0.0) as mesh,
        EmbeddedValkey(tmp_path / "valkey") as server,
    ):
        services = {role: {"address": address} for role, address in mesh.addresses.items()}
        recipe = fake_recipe(services=services, evaluation={"num_prompts": 0}, steps=10_000)
        values = recipe.model_dump(mode="json", exclude={"store"})
        port = free_port()
        async with AsyncClient(f"127.0.0.1:{port}", retry=PATIENT) as client:
            async with coordinator(tmp_path, port, server.url):
                await client.create_run(values, run_id="watched")
                watching = asyncio.create_task(watch(client))
                await more_events(watching)
            for _ in range(NUM_KILLS):
                async with coordinator(tmp_path, port, server.url):
                    await more_events(watching)
            async with coordinator(tmp_path, port, server.url):
                await client.stop_run("watched")
                await watching
                assert (await client.get_run("watched")).state is RunState.STOPPED
        store = RedisStateStore(server.url)
        told = await store.read_entries("watched", RunStream.EVENTS, limit=100_000)
        await store.close()
    assert [event.event_id for event in seen] == [entry.entry_id for entry in told]
    steps = [event.step for event in seen if isinstance(event, StepMade)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > NUM_KILLS * EVENTS_BETWEEN
