"""What a step leaves behind: its samples come beside the update, its writes side by side."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.fake_in_process import RUN_ID, InProcessRun, run_jumping
from support.fake_recipes import fake_recipe

from rolemesh.coordinator.dataflow.observer import QuietObserver
from rolemesh.coordinator.run.results import samples
from rolemesh.coordinator.run.results.samples import SampleTaker
from rolemesh.coordinator.state.store import RunStream
from rolemesh.v1 import coordinator_pb2

STEPS = 3


def test_samples_are_fetched_before_the_actor_has_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> tuple[InProcessRun, list[int]]:
        recipe = fake_recipe(steps=STEPS, evaluation={"num_prompts": 0})
        run = InProcessRun(recipe, tmp_path, delay=lambda *_: 1.0)
        updates_made: list[int] = []

        async def fetch(*_: object) -> list[coordinator_pb2.Sample]:
            # Half as long as each call.
            await asyncio.sleep(0.5)
            updates_made.append(run.mesh.log.count("actor.Update ends"))
            return [coordinator_pb2.Sample(row=len(updates_made))]

        monkeypatch.setattr(samples, "fetch_samples", fetch)
        run.loop._samples = SampleTaker(run.store, RUN_ID, None, QuietObserver(), 2, None)
        await run.execute()
        assert run.left_running() == []
        return run, updates_made

    run, updates_made = run_jumping(work())
    assert updates_made == list(range(STEPS)), "before the update of their step has ended"
    entries = asyncio.run(run.store.read_entries(RUN_ID, RunStream.SAMPLES))
    told = [coordinator_pb2.ListSamplesResponse.FromString(entry.payload) for entry in entries]
    expected = [(step, step) for step in range(1, STEPS + 1)]
    assert [(one.step, sample.row) for one in told for sample in one.samples] == expected


def test_what_a_step_leaves_behind_is_written_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each write waits for the one beside it. One after another they would wait forever, which the
    # loop takes for the deadlock that it is.
    async def work() -> InProcessRun:
        recipe = fake_recipe(steps=STEPS, evaluation={"num_prompts": 0})
        run = InProcessRun(recipe, tmp_path)
        at_first, then = asyncio.Barrier(2), asyncio.Barrier(2)

        def meets(barrier: asyncio.Barrier, owner: object, name: str, is_met: Any = None) -> None:
            write = getattr(owner, name)

            async def met(*arguments: Any, **named: Any) -> Any:
                if is_met is None or is_met(arguments, named):
                    await barrier.wait()
                return await write(*arguments, **named)

            monkeypatch.setattr(owner, name, met)

        async def fetch(*_: object) -> list[coordinator_pb2.Sample]:
            return [coordinator_pb2.Sample()]

        monkeypatch.setattr(samples, "fetch_samples", fetch)
        run.loop._samples = SampleTaker(run.store, RUN_ID, None, QuietObserver(), 2, None)
        meets(at_first, run.written, "write_graph")
        meets(at_first, run.loop._samples, "take")
        meets(then, run.written, "write_step")
        meets(then, run.store, "update_run", lambda _, named: "metrics" in named)
        await run.execute()
        return run

    run = run_jumping(work())
    assert [record["step"] for record in run.written.records] == list(range(1, STEPS + 1))
