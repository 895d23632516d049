"""What the cost model reads of a run's folder: medians, lengths of rows, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.recorded_folders import CALLS, STEPS, run_folder

from rolemesh.coordinator.api.reads.plans import WARMUP_STEPS
from rolemesh.coordinator.mapping.search.placed import own_layouts
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.run.folders.folder import NoRunError
from rolemesh.coordinator.run.folders.recorded_steps import last_settings, recorded_run
from rolemesh.coordinator.run.saving.turns import TURNS_FILE, Turn


def test_the_median_of_each_call_counts_without_the_first_steps(tmp_path: Path) -> None:
    found = recorded_run(run_folder(tmp_path))
    middle = WARMUP_STEPS + 2
    assert found.seconds == pytest.approx([middle * seconds for seconds in CALLS])
    assert found.step_s == pytest.approx(middle * (sum(CALLS) + 0.03))
    # All roles are in one pool, so that calls follow one another.
    assert found.beside_s == pytest.approx(middle * 0.03)
    assert [task.name for task in found.job.step.tasks][:2] == [
        "actor.generate",
        "critic.compute_values",
    ]
    assert found.name == tmp_path.name


def test_rows_are_as_long_as_they_were(tmp_path: Path) -> None:
    work = recorded_run(run_folder(tmp_path)).job.work
    assert (work.prompt_tokens, work.rows) == (30, 8)
    assert work.completions.mean == pytest.approx(5, rel=0.02)


def test_seconds_are_those_of_the_clock_that_is_given(tmp_path: Path) -> None:
    found = recorded_run(run_folder(tmp_path), lambda unix_s: unix_s / 2)
    assert found.seconds == pytest.approx([(WARMUP_STEPS + 2) * one / 2 for one in CALLS])


def test_placement_and_layouts_are_the_recipes(tmp_path: Path) -> None:
    pools = {"a": {"roles": ["actor", "reference"]}, "b": {"roles": ["critic", "reward"]}}
    directory = run_folder(tmp_path, pools=pools, actor__train={"dp": 2, "fsdp": 1})
    found = recorded_run(directory)
    assert found.pools == {"actor": "a", "reference": "a", "critic": "b", "reward": "b"}
    actor = found.layouts["actor"]
    assert (actor.dp, actor.fsdp, actor.tp, actor.world_size) == (2, 1, 1, 2)
    recipe = load_recipe([directory / "config.yaml"])
    spec = recipe.actor
    assert spec is not None
    assert actor.micro_batch_tokens == spec.model.micro_batch_tokens
    assert found.layouts == own_layouts(recipe, found.job)


def test_what_cannot_be_read_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(NoRunError, match=r"has no config\.yaml"):
        recorded_run(tmp_path / "absent")
    with pytest.raises(NoRunError, match="made 2 steps, and the first 2 do not count"):
        recorded_run(run_folder(tmp_path / "short", steps=2))
    blocks = run_folder(
        tmp_path / "blocks", schedule={"sampler": {"type": "sync", "block_rows": 4}}
    )
    with pytest.raises(RecipeError, match="with block_rows 4"):
        recorded_run(blocks)


def test_steps_that_differ_are_refused(tmp_path: Path) -> None:
    directory = run_folder(tmp_path)
    lines = (directory / "dataflow.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    last["nodes"].pop()
    lines[-1] = json.dumps(last)
    (directory / "dataflow.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(RecipeError, match=f"step {STEPS} made other calls than step 3"):
        recorded_run(directory)


def test_calls_that_did_not_end_are_refused(tmp_path: Path) -> None:
    directory = run_folder(tmp_path)
    text = (directory / "dataflow.jsonl").read_text().replace('"done"', '"failed"')
    (directory / "dataflow.jsonl").write_text(text)
    with pytest.raises(RecipeError, match="calls that were not finished"):
        recorded_run(directory)


def test_roles_that_sleep_in_turn_are_refused(tmp_path: Path) -> None:
    roles = ["actor", "critic", "reference", "reward"]
    pools = {"gpus": {"devices": ["cuda:0"], "roles": roles}}
    with pytest.raises(RecipeError, match=r"roles of pools\.gpus sleep in turn"):
        recorded_run(run_folder(tmp_path, pools=pools))


def test_of_a_run_that_tuned_itself_the_steps_with_its_last_settings_count(tmp_path: Path) -> None:
    directory = run_folder(tmp_path, steps=9)
    key = "actor.model.micro_batch_tokens"
    turns = [
        Turn(step=step, settings={key: tokens}, best={key: 4096}, is_last=step == 5)
        for step, tokens in ((4, 512), (5, 1024))
    ]
    lines = [json.dumps(turn.to_dict()) + "\n" for turn in turns]
    (directory / TURNS_FILE).write_text("".join(lines))
    found = recorded_run(directory)
    # Steps 7 to 9: the first one with the last settings does not count.
    assert found.step_s == pytest.approx(8 * (sum(CALLS) + 0.03))
    assert found.layouts["actor"].micro_batch_tokens == 1024
    assert last_settings(directory) == [f"{key}=1024"]
    assert last_settings(run_folder(tmp_path / "untuned")) == []
