"""Serves invented runs over REST, to look at the dashboard without a mesh.

    python tests/support/serve_fake_run.py --port 8321 --steps 1000 --live

serves one run that goes on (with --live a step a second) and two that ended, until it is
interrupted. The live run can be paused, resumed and stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import tempfile
import time
from pathlib import Path

from rolemesh.coordinator.api.http.app import make_app
from rolemesh.coordinator.api.http.server import serve_http
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunRecord, RunState, RunStream, StateStore
from rolemesh.v1 import coordinator_pb2

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support.fake_run import STEP_S, append_step, fill_store
from support.rest_servers import tokens_of

LIVE_RUN = "live-1"
ENDED_RUNS = ("ended-1", "ended-2")


async def fill(store: StateStore, folder: Path, num_steps: int) -> RunRecord:
    """Writes the runs; returns the record of the live one."""
    now = time.time()
    for age, run_id in enumerate(ENDED_RUNS, 2):
        began = now - age * num_steps * STEP_S
        await fill_store(
            store,
            run_id,
            folder / run_id,
            num_steps=num_steps,
            created_at=began,
            seed=age,
            with_leases=False,
        )
    began = now - num_steps * STEP_S
    return await fill_store(
        store, LIVE_RUN, folder / LIVE_RUN, num_steps=num_steps, is_live=True, created_at=began
    )


async def go_on(store: StateStore, record: RunRecord, pause_s: float = 1.0) -> None:
    """Makes steps of the live run, and does what it is asked, until it ends."""
    step = record.step
    while True:
        await asyncio.sleep(pause_s)
        asked = await store.get_run(record.run_id)
        if asked.stop_requested or step == record.num_steps:
            is_early = step < record.num_steps
            await _enter(store, asked, RunState.STOPPED if is_early else RunState.SUCCEEDED)
            return
        if asked.pause_requested:
            await _enter(store, asked, RunState.PAUSED)
            continue
        await _enter(store, asked, RunState.RUNNING)
        step += 1
        await append_step(store, dataclasses.replace(record, step=step - 1), step)


async def _enter(store: StateStore, record: RunRecord, state: RunState) -> None:
    if record.state is state:
        return
    number = coordinator_pb2.RunState.Value(f"RUN_STATE_{state.name}")
    event = coordinator_pb2.RunEvent(
        step=record.step, state=coordinator_pb2.RunStateChange(state=number)
    )
    event.time.GetCurrentTime()
    await store.append_entry(record.run_id, RunStream.EVENTS, event.SerializeToString())
    await store.update_run(record.run_id, state=state, updated_at=time.time())


async def serve(port: int, num_steps: int, token: str | None, *, is_live: bool) -> None:
    """Serves until it is cancelled."""
    with tempfile.TemporaryDirectory(prefix="fake-run-") as folder:
        store = MemoryStateStore()
        record = await fill(store, Path(folder), num_steps)
        app = make_app(StoreOperations(store), tokens=tokens_of(token))
        server, bound = await serve_http(app, "127.0.0.1", port)
        print(f"http://127.0.0.1:{bound}/", flush=True)
        try:
            if is_live:
                await go_on(store, record)
            await asyncio.Event().wait()
        finally:
            await server.stop()


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Serves invented runs over REST.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--token")
    parser.add_argument("--live", action="store_true")
    given = parser.parse_args()
    try:
        asyncio.run(serve(given.port, given.steps, given.token, is_live=given.live))
    except KeyboardInterrupt:
        print("ended")


if __name__ == "__main__":
    main()
