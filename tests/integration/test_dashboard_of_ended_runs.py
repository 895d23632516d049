"""The dashboard over folders of runs, after their stores are gone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest
import yaml
from support import warm_processes
from support.coordinator_doors import bearer, made_token
from support.fake_roles import fake_mesh, fake_recipe
from support.fake_runs import make_run, read_lines
from support.planned_runs import PLAN

from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.run.folders.ended_runs import read_runs
from rolemesh.coordinator.run.folders.evaluations import (
    EvaluationFile,
    new_path,
    write_evaluation,
)
from rolemesh.coordinator.run.results.expert_loads import ExpertsFile
from rolemesh.coordinator.run.results.samples_file import SamplesFile
from rolemesh.coordinator.run.results.scores import TaskScores
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.v1 import coordinator_pb2


@pytest.fixture
async def runs(tmp_path: Path) -> Path:
    """A run that has succeeded, one that was killed, one that is damaged, and a stranger."""
    folder = tmp_path / "runs"
    async with fake_mesh() as mesh:
        await make_run(mesh, folder / "whole", fake_recipe(), MemoryStateStore()).execute()
        run = make_run(mesh, folder / "killed", fake_recipe(), MemoryStateStore())
        await run.execute()
    (folder / "killed" / "summary.json").unlink()
    (folder / "killed" / "run.json").write_text(json.dumps({"run_id": run.run_id}))
    file = SamplesFile(folder / "whole")
    sample = coordinator_pb2.Sample(row=0, prompt="2 + 2", completion="4", reward=1.0)
    file.write(3, [sample], is_held_out=False)
    file.close()
    (folder / "damaged").mkdir()
    (folder / "damaged" / "summary.json").write_text("{")
    (folder / "no-run").mkdir()
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_a_folder_of_runs_is_served_and_nothing_in_it_changes(
    runs: Path, tmp_path: Path
) -> None:
    before = contents(runs)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rolemesh", "dashboard", str(runs), "--http-port", "0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("ROLEMESH_")},
            **warm_processes.commands(),
            "XDG_STATE_HOME": str(tmp_path / "state"),
        },
    )
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    assert line.startswith("2 runs - dashboard and REST: http://"), await process.communicate()
    url = line.split()[6]
    # Nothing is written into the folder, so the token lies in one of the user's.
    token = Path(line.rpartition("token: ")[2].strip())
    assert token.is_relative_to(tmp_path / "state")
    right = bearer(made_token(token.parent))
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        assert "<html" in (await client.get("/")).text
        assert (await client.get("api/v1/runs")).status_code == 401
        client.headers.update(right)
        listed = (await client.get("api/v1/runs")).json()["runs"]
        states = {Path(one["directory"]).name: one["state"] for one in listed}
        assert states == {"whole": "succeeded", "killed": "failed"}
        summary = json.loads((runs / "whole" / "summary.json").read_text())
        place = f"api/v1/runs/{summary['run_id']}"
        metrics = (await client.get(f"{place}/metrics?names=held_out/score")).json()
        records = read_lines(runs / "whole" / "metrics.jsonl")
        assert metrics["steps"] == [0, *(record["step"] for record in records)]
        assert metrics["series"]["held_out/score"][0] == summary["held_out"]["before"]["score"]
        told = (await client.get(f"{place}/samples")).json()
        assert (told["step"], told["samples"][0]["completion"]) == (3, "4")
        loads = (await client.get(f"{place}/experts")).json()
        lines = read_lines(runs / "whole" / "experts.jsonl")
        assert loads["steps"] == [line["step"] for line in lines] == [1, 2, 3, 4]
        told = [layer["choices"] for layer in loads["roles"][0]["layers"]]
        assert told == lines[-1]["roles"]["actor"]["choices"]
        flow = (await client.get(f"{place}/dataflow?step=2")).json()
        assert len(flow["nodes"]) == 7
        # No run can be started here.
        assert (await client.post(f"{place}/resume")).status_code >= 400
        created = await client.post("api/v1/runs", json={"recipe": "run: {}"})
        assert created.status_code >= 400
    process.send_signal(signal.SIGINT)
    _, errors = await process.communicate()
    assert process.returncode == 0
    assert "not shown: " in errors.decode()
    assert "damaged" in errors.decode()
    assert contents(runs) == before


async def test_what_is_left_out_has_a_reason(runs: Path, tmp_path: Path) -> None:
    place = runs / "killed" / "coordinator.json"
    facts = {"address": "127.0.0.1:1", "url": "http://127.0.0.1:2/", "pid": os.getpid()}
    place.write_text(json.dumps(facts))
    found = await read_runs(runs)
    assert len(found.run_ids) == 1
    assert any("it goes on, and is shown at http://127.0.0.1:2/" in one for one in found.left_out)
    assert (await read_runs(runs / "whole")).left_out == []
    for empty in (tmp_path / "nowhere", runs / "no-run", runs / "damaged"):
        with pytest.raises(ValueError, match="holds no run that has ended"):
            await read_runs(empty)


async def test_loads_of_a_step_that_was_not_committed_are_not_shown(runs: Path) -> None:
    file = ExpertsFile(runs / "killed")
    file.write(5, {"actor": {1: [1, 2, 3, 4]}})
    file.close()
    found = await read_runs(runs / "killed")
    loads = await StoreOperations(found.store).get_expert_loads(*found.run_ids)
    assert (loads.step, list(loads.steps)) == (4, [1, 2, 3, 4])
    # A line that no run writes is named, and the run is not shown.
    with (runs / "killed" / "experts.jsonl").open("a") as lines:
        lines.write('{"step": 6}\n')
    with pytest.raises(ValueError, match=r"line 6 of .*experts\.jsonl tells no loads"):
        await read_runs(runs / "killed")


async def test_a_run_is_read_with_the_plan_that_it_began_with(runs: Path) -> None:
    config = runs / "whole" / "config.yaml"
    recipe = yaml.safe_load(config.read_text())

    async def plan(**changes: float) -> coordinator_pb2.GetPlanResponse:
        config.write_text(yaml.safe_dump({**recipe, "plan": {**PLAN, **changes}}))
        found = await read_runs(runs / "whole")
        return await StoreOperations(found.store).get_plan(*found.run_ids)

    found = (await plan()).plan
    assert found.step_s == PLAN["step_s"]
    measured = {task.name for task in found.tasks if task.HasField("measured_s")}
    assert {task["name"] for task in PLAN["tasks"]} < measured
    # A recipe of another version hides no run.
    assert not (await plan(step_minutes=0.1)).HasField("plan")


async def test_evaluations_are_points_of_the_curves(runs: Path) -> None:
    scored = TaskScores(name="sums", num_prompts=2, samples=1)
    scored.scores = {"a": [1.0], "b": [0.0]}
    found = EvaluationFile(policy="p", step=2, tasks={"sums": scored})
    write_evaluation(new_path(runs / "whole" / "evaluations", "x"), found, runs / "whole")
    read = await read_runs(runs / "whole")
    records = [one.values for one in await read.store.read_metrics(read.run_ids[0])]
    shown = {r["step"]: r["evaluated/sums/score"] for r in records if "evaluated/sums/score" in r}
    assert shown == {2: 0.5}
    steps = [record["step"] for record in records]
    assert steps == sorted(set(steps))
