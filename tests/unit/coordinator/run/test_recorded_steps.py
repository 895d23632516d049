"""What the cost model reads of a run's folder: medians, lengths of rows, and what it refuses."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.mapping_jobs import LLAMAS
from support.mesh_runs import tiny_recipe

from rolemesh.coordinator.api.plans import WARMUP_STEPS
from rolemesh.coordinator.dataflow.futures import NodeState
from rolemesh.coordinator.mapping.placed import own_layouts
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.run.folder import NoRunError
from rolemesh.coordinator.run.planning import plan_step
from rolemesh.coordinator.run.recorded_steps import recorded_run

CALLS = (0.4, 0.05, 0.06, 0.01, 0.02, 0.1, 0.2)
"""Seconds of generate, values, reference, reward, advantages, and of both updates."""
STEPS = WARMUP_STEPS + 3


def run_folder(folder: Path, *, steps: int = STEPS, **changes: Any) -> Path:
    """A run of which step s took s times as long, but for the first ones: 100 times."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(LLAMAS["tiny"]))
    directory = folder / "run"
    directory.mkdir(exist_ok=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(tiny_recipe(model, **changes)))
    recipe = load_recipe([directory / "config.yaml"])
    nodes = list(asyncio.run(plan_step(recipe)))
    graphs, records = [], []
    for step in range(1, steps + 1):
        now, slowness = 1000.0 * step, 100 if step <= WARMUP_STEPS else step
        for node, seconds in zip(nodes, CALLS, strict=False):
            node.step, node.state, node.num_rows = step, NodeState.DONE, 8
            node.queued_at = 1000.0 * step
            node.started_at, node.ended_at = now, now + slowness * seconds
            # 8 rows of 30 tokens of prompt and 5 of completion.
            node.num_tokens = 8 * 35
            now = node.ended_at
        graphs.append({"step": step, "nodes": [node.to_dict() for node in nodes]})
        records.append(
            {
                "step": step,
                "time/step": slowness * (sum(CALLS) + 0.03),
                "completion_length/mean": 5.0,
            }
        )
    for name, lines in (("dataflow.jsonl", graphs), ("metrics.jsonl", records)):
        (directory / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


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
