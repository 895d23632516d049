"""Trackers of a whole run, beside the run's own files."""

from __future__ import annotations

from pathlib import Path

from support.fake_recipes import fake_recipe
from support.fake_roles import fake_mesh
from support.fake_runs import Recorder, make_run, read_lines

from rolemesh.coordinator.recipe.sections.trackers import CustomTrackerSpec
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState

CODE = """
import json

class Keeper:
    def __init__(self, path):
        self.path = path

    def start(self, run, config):
        self.file = open(self.path, "w")
        self.write([run.run_id, config["run"]["name"]])

    def write(self, record):
        self.file.write(json.dumps(record) + "\\n")

    def log(self, step, scalars):
        self.write([step, scalars])

    def finish(self, state):
        self.write(state)
        self.file.close()

class Broken(Keeper):
    def log(self, step, scalars):
        raise RuntimeError("full")
"""


async def test_a_tracker_keeps_what_metrics_jsonl_says_and_a_broken_one_beside_it_ends_nothing(
    tmp_path: Path,
) -> None:
    code, kept = tmp_path / "mine.py", tmp_path / "kept.jsonl"
    code.write_text(CODE)
    trackers = tuple(
        CustomTrackerSpec(tracker=f"{code}:{name}", options={"path": str(path)})
        for name, path in (("Keeper", kept), ("Broken", tmp_path / "lost.jsonl"))
    )
    store, recorder = MemoryStateStore(), Recorder()
    async with fake_mesh() as mesh:
        recipe = fake_recipe().model_copy(update={"trackers": trackers})
        run = make_run(mesh, tmp_path / "run", recipe, store, observer=recorder)
        summary = await run.execute()
    assert summary.state is RunState.SUCCEEDED
    first, before, *steps, last = read_lines(kept)
    assert first == [run.run_id, "fake"]
    assert before[0] == 0
    assert "held_out/score" in before[1]
    records = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [{"step": step, **scalars} for step, scalars in steps] == records
    assert last == "succeeded"
    told = [event for event in recorder.events if event.startswith("tracker ")]
    assert len(told) == 2
    assert "tracker custom-1 failed, and the run goes on: RuntimeError: full" in told[0]
    assert told[1] == f"tracker custom-1 lost {len(records) + 1} of {len(records) + 1} steps"
