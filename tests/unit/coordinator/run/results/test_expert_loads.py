"""experts.jsonl: a line a step, whatever ends a run between a line and its commit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rolemesh.coordinator.commands.cli import app
from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.dataflow.futures import Node, NodeKind
from rolemesh.coordinator.run.results.expert_loads import (
    EXPERTS_FILE,
    ExpertsFile,
    loads_of_step,
    read_expert_loads,
)
from rolemesh.coordinator.run.results.metrics import MetricsWriter
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunRecord, RunStream
from rolemesh.coordinator.trackers.tracker import RunFacts
from rolemesh.rpc.calls.expert_loads import checked_loads
from rolemesh.v1 import coordinator_pb2

RUN = "run"


def loads(step: int) -> dict[int, list[int]]:
    return {1: [step, 2 * step], 3: [0, step]}


def update(service: str, told: dict[int, list[int]]) -> Node:
    return Node(
        node_id=0, step=1, kind=NodeKind.UPDATE, service=service, method="update", pool="all",
        sequence=0, inputs=(), queued_at=0.0, expert_loads=told,
    )  # fmt: skip


def steps_of(folder: Path) -> list[int]:
    return [one.step for one in read_expert_loads(folder)]


def told(answer: coordinator_pb2.GetExpertLoadsResponse) -> dict[str, dict[int, list[int]]]:
    return {one.role: checked_loads(one.layers) for one in answer.roles}


def test_a_step_has_one_line_of_all_its_roles(tmp_path: Path) -> None:
    file = ExpertsFile(tmp_path)
    # Most runs train no mixture.
    assert not (tmp_path / EXPERTS_FILE).exists()
    file.write(1, {"actor": loads(1), "critic": {0: [5, 6, 7]}})
    file.write(2, {"actor": loads(2)})
    file.close()
    first, second = read_expert_loads(tmp_path)
    assert told(first) == {"actor": loads(1), "critic": {0: [5, 6, 7]}}
    assert (second.step, told(second)) == (2, {"actor": loads(2)})
    assert [one.step for one in read_expert_loads(tmp_path, keep=1)] == [2]


@pytest.mark.parametrize("opens_anew", [False, True])
def test_a_step_that_is_made_again_replaces_its_line(tmp_path: Path, opens_anew: bool) -> None:
    """Its first attempt ended between the line and the commit."""
    file = ExpertsFile(tmp_path)
    for step in (1, 2, 3):
        file.write(step, {"actor": loads(step)})
    if opens_anew:
        file.close()
        with (tmp_path / EXPERTS_FILE).open("a") as torn:
            torn.write('{"step": 4, "ro')
        file = ExpertsFile(tmp_path)
    file.write(3, {"actor": loads(30)})
    assert steps_of(tmp_path) == [1, 2, 3]
    assert told(read_expert_loads(tmp_path)[-1]) == {"actor": loads(30)}
    file.rewind(1)
    file.rewind(2)
    assert steps_of(tmp_path) == [1]
    file.write(2, {"actor": loads(2)})
    file.close()
    assert steps_of(tmp_path) == [1, 2]


def test_the_oldest_lines_go_where_the_file_is_full(tmp_path: Path) -> None:
    file = ExpertsFile(tmp_path, max_bytes=2_000)
    for step in range(1, 200):
        file.write(step, {"actor": loads(step)})
        assert (tmp_path / EXPERTS_FILE).stat().st_size <= 2_000
    file.close()
    steps = steps_of(tmp_path)
    assert steps == list(range(steps[0], 200))
    assert len(steps) > 10


@pytest.mark.parametrize(
    "line",
    [
        "no JSON",
        {"step": 1},
        {"step": 1, "roles": {"actor": {"layers": [0], "choices": [[1, -2]]}}},
        {"step": 1, "roles": {"actor": {"layers": [0, 1], "choices": [[1, 2]]}}},
        {"step": 1, "roles": {"actor": {"layers": [0], "choices": [[1.5, 2]]}}},
        {"step": "one", "roles": {}},
        {"step": 1, "roles": []},
    ],
)
def test_a_line_that_no_run_writes_is_named(tmp_path: Path, line: Any) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    (tmp_path / EXPERTS_FILE).write_text(text + "\n")
    with pytest.raises(ValueError, match=rf"line 1 of .*{EXPERTS_FILE} tells no loads of experts"):
        read_expert_loads(tmp_path)


def test_updates_of_a_step_add_up_by_role() -> None:
    nodes = [
        update("critic", {}),
        update("reward", {0: [7, 7]}),
        update("actor", loads(1)),
        update("actor", loads(2)),
    ]
    assert loads_of_step(1, nodes) == {"actor": loads(3), "reward": {0: [7, 7]}}
    assert list(loads_of_step(1, nodes)) == ["actor", "reward"]
    with pytest.raises(RunError, match="step 1: actor: expert_loads of two calls are of different"):
        loads_of_step(1, [*nodes, update("actor", {1: [1, 1]})])


def test_loads_are_no_part_of_the_graph() -> None:
    node = update("actor", loads(1))
    assert "expert_loads" not in node.to_dict()
    assert Node.from_dict(json.loads(json.dumps(node.to_dict()))).expert_loads == {}


# --- the command ------------------------------------------------------------------------------


def rolemesh_experts(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["experts", *arguments])
    return done.exit_code, done.output


def test_people_are_shown_the_most_and_the_least_loaded(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    code, output = rolemesh_experts(str(tmp_path))
    assert code == 2
    assert "has no loads of experts" in output
    file = ExpertsFile(tmp_path)
    file.write(1, {"actor": {1: [6, 2, 4]}})
    file.write(3, {"actor": {1: [6, 2, 4], 3: [0, 0, 9]}, "critic": {0: [1, 1]}})
    file.close()
    code, output = rolemesh_experts(str(tmp_path))
    assert code == 0, output
    assert "step 3, actor: 3 experts a layer; a load of 1 is even" in output
    assert "step 3, critic: 2 experts a layer" in output
    rows = [line.replace("\u2502", " ").split() for line in output.splitlines()]
    assert ["1", "1.500", "0", "0.500", "1"] in rows
    assert ["3", "3.000", "2", "0.000", "0"] in rows
    code, output = rolemesh_experts(str(tmp_path), "--step", "1", "--json")
    told = {"type": "experts", "step": 1, "role": "actor", "layers": [1], "choices": [[6, 2, 4]]}
    assert code == 0
    assert json.loads(output).items() >= told.items()
    code, output = rolemesh_experts(str(tmp_path), "--step", "2")
    assert code == 2
    assert "has loads of steps 1 to 3" in output.replace("\n", " ")
    code, output = rolemesh_experts(str(tmp_path / "none"))
    assert code == 2
    assert "holds no run" in output


# --- the store ------------------------------------------------------------------------------


async def _opened(folder: Path) -> tuple[MemoryStateStore, MetricsWriter]:
    store = MemoryStateStore()
    await store.create_run(
        RunRecord(
            run_id=RUN, name="a", num_steps=9, directory=str(folder), created_at=0.0, updated_at=0.0
        )
    )
    return store, MetricsWriter(RunFacts(run_id=RUN, name="a", directory=str(folder)), store)


async def _in_store(store: MemoryStateStore) -> list[int | None]:
    return [entry.step for entry in await store.read_entries(RUN, RunStream.EXPERTS)]


async def test_the_store_gets_loads_once_and_of_committed_steps_alone(tmp_path: Path) -> None:
    store, writer = await _opened(tmp_path)
    writer.write_loads(1, [update("actor", loads(1))])
    assert steps_of(tmp_path) == [1]
    # It is not committed: the step before is told of once more.
    await writer.tell_loads(0)
    assert await _in_store(store) == []
    await writer.tell_loads(1)
    await writer.tell_loads(1)
    assert await _in_store(store) == [1]
    # A step that trained no mixture, e.g. one that was skipped, tells nothing.
    writer.write_loads(2, [update("critic", {})])
    await writer.tell_loads(2)
    assert await _in_store(store) == steps_of(tmp_path) == [1]
    writer.close()


async def test_a_run_that_is_resumed_tells_what_its_file_has_and_its_store_lacks(
    tmp_path: Path,
) -> None:
    """Killed after the commit of step 2, and in another attempt before that of step 3."""
    store, writer = await _opened(tmp_path)
    for step in (1, 2, 3):
        writer.write_loads(step, [update("actor", loads(step))])
        if step == 1:
            await writer.tell_loads(step)
    writer.close()
    resumed = MetricsWriter(RunFacts(run_id=RUN, name="a", directory=str(tmp_path)), store)
    records = [{"step": 1.0}, {"step": 2.0}]
    await resumed.resume(2, records)
    assert steps_of(tmp_path) == [1, 2]
    assert await _in_store(store) == [1, 2]
    await resumed.resume(2, records)
    assert await _in_store(store) == [1, 2]
    resumed.close()
