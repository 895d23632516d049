"""What a run's tuning makes of its files: turns, expectations, words."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.fake_runs import Recorder
from support.recorded_folders import CALLS, run_folder

from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.run.saving.progress import RunProgress
from rolemesh.coordinator.run.saving.resume import read_records
from rolemesh.coordinator.run.tuning.tuning import RetunedError, RunTuning
from rolemesh.coordinator.state.memory import MemoryStateStore

ROLES = ("actor", "critic", "reference", "reward")
APART = {role: {"roles": [role]} for role in ROLES}
GENERATE, VALUES, REFERENCE, REWARD, ADVANTAGES, CRITIC, ACTOR = CALLS
BESIDE_S = 0.03


async def tuned(folder: Path, space: dict[str, Any]) -> tuple[RunProgress, Recorder]:
    """After the fourth step of a run that another process has begun."""
    directory = await asyncio.to_thread(
        run_folder, folder, steps=4, run__tuning={"space": space, "rounding": True}
    )
    # Steps 3 and 4 count. What they took beside their calls counts as well.
    records = read_records(directory)
    progress = RunProgress(step=4, next_prompts=[0] * 5, actor_versions=[0] * 5, records=records)
    recipe, recorder = load_recipe([directory / "config.yaml"]), Recorder()
    store = MemoryStateStore()
    journal = Journal(store, "run", await store.next_epoch("run"))
    run = RunTuning(recipe, progress, directory, recorder)
    assert run.recipe == recipe
    with pytest.raises(RetunedError):
        await run.after_step(journal)
    (entry,) = await store.read_journal("run")
    (turn,) = progress.turns
    assert (entry.step, entry.operation, entry.result) == (4, "run.turn", turn.to_dict())
    lines = (directory / "tuning.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [turn.to_dict()]
    assert run.recipe != recipe
    return progress, recorder


async def test_it_expects_what_the_recorded_graph_takes_with_other_pools(tmp_path: Path) -> None:
    progress, recorder = await tuned(tmp_path, {"pools": [APART]})
    # The median of steps 3 and 4, which took three and four times as long as the calls say.
    slowness = 3.5
    judging, updating = max(VALUES, REFERENCE, REWARD), max(CRITIC, ACTOR)
    # It is rearranged in the graph of one of them.
    graph = 3.0
    measured = slowness * (sum(CALLS) + BESIDE_S)
    saved = graph * (sum(CALLS) - GENERATE - judging - ADVANTAGES - updating)
    (turn,) = progress.turns
    assert turn.expected_s == pytest.approx(measured - saved)
    (told,) = recorder.events
    assert told.startswith("tuning after step 4: tries pools ")
    assert told.endswith(f"expects {turn.expected_s:.3g} s a step")
