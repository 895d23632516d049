"""Executed graphs as a run's folder keeps them, and as they are shown."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from rolemesh.coordinator.dataflow.futures import Node, NodeKind, NodeState
from rolemesh.coordinator.dataflow.trace import path_summary, print_paths
from rolemesh.coordinator.run.folders.folder import NoRunError, read_graphs


def node(node_id: int, step: int, start: float, end: float, **fields: object) -> Node:
    values: dict[str, object] = {
        "node_id": node_id,
        "step": step,
        "kind": NodeKind.INFER,
        "service": "critic",
        "method": "compute_values",
        "pool": "main",
        "sequence": 0,
        "inputs": (),
        "queued_at": start,
        "started_at": start,
        "ended_at": end,
        "state": NodeState.DONE,
        **fields,
    }
    return Node(**values)  # type: ignore[arg-type]


def write(directory: Path, graphs: list[list[Node]], rest: str = "") -> Path:
    lines = [
        json.dumps({"step": nodes[0].step, "nodes": [one.to_dict() for one in nodes]}) + "\n"
        for nodes in graphs
    ]
    (directory / "dataflow.jsonl").write_text("".join(lines) + rest)
    return directory


def test_a_node_comes_back_from_json_as_it_was() -> None:
    first = node(
        3,
        1,
        1.5,
        2.5,
        inputs=(0, 2),
        block=4,
        num_rows=7,
        phases={"fetch": 0.25},
        peak_bytes={"compute": {0: 5, 12: 6}},
        metrics={"value_loss": 0.5},
        policy_version=9,
    )
    assert Node.from_dict(json.loads(json.dumps(first.to_dict()))) == first


@pytest.mark.parametrize(
    ("field", "value"), [("kind", "GUESS"), ("peak_bytes", 3), ("colour", "red"), ("inputs", 1)]
)
def test_what_is_no_node_is_refused(field: str, value: object) -> None:
    record = {**node(0, 1, 0.0, 1.0).to_dict(), field: value}
    with pytest.raises(ValueError, match=str(value)):
        Node.from_dict(record)


def test_graphs_are_read_by_step_and_a_half_written_line_is_left_out(tmp_path: Path) -> None:
    graphs = [[node(0, 1, 0.0, 1.0)], [node(0, 2, 1.0, 3.0)]]
    write(tmp_path, graphs, rest='{"step": 3, "nodes": [')
    assert read_graphs(tmp_path, None) == graphs
    assert read_graphs(tmp_path, 2) == graphs[1:]
    with pytest.raises(NoRunError, match="no graph of step 3: it has steps 1 to 2"):
        read_graphs(tmp_path, 3)


def test_a_folder_without_graphs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoRunError, match=r"has no dataflow\.jsonl"):
        read_graphs(tmp_path, None)
    write(tmp_path, [])
    with pytest.raises(NoRunError, match="it has no step yet"):
        read_graphs(tmp_path, None)


@pytest.mark.parametrize("line", ["[]", "3", "{", '{"step": 1}', '{"step": 1, "nodes": [{}]}'])
def test_a_line_that_is_no_graph_is_named(tmp_path: Path, line: str) -> None:
    write(tmp_path, [[node(0, 1, 0.0, 1.0)]], rest=line + "\n")
    with pytest.raises(NoRunError, match=r"line 2 of .*dataflow\.jsonl is no executed graph"):
        read_graphs(tmp_path, None)


def test_the_table_has_a_row_a_step_with_its_path() -> None:
    graph = [
        node(0, 5, 10.0, 12.0, service="actor", method="generate"),
        node(1, 5, 12.0, 12.5, inputs=(0,), block=1),
        node(
            2, 5, 12.5, 13.0, inputs=(0,), service="reward", method="compute_reward", pool="other"
        ),
        node(3, 5, 13.0, 16.0, inputs=(1, 2), service="actor", method="update"),
    ]
    told = path_summary(graph)
    assert (told["step"], told["seconds"], told["critical_path_seconds"]) == (5, 6.0, 5.5)
    assert [part["node"] for part in told["path"]] == [
        "actor.generate",
        "critic.compute_values[1]",
        "actor.update",
    ]
    stream = io.StringIO()
    print_paths(Console(file=stream, width=120), [graph])
    shown = stream.getvalue()
    assert "actor.generate 2.00, critic.compute_values[1] 0.50, actor.update 3.00" in shown
    assert " 6.00 " in shown
    assert " 5.50 " in shown
