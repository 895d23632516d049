"""Samples of a training loop's steps: they come beside the update, and cost the step no time."""

from __future__ import annotations

import asyncio
from pathlib import Path

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
