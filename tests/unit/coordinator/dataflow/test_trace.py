from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolemesh.coordinator.dataflow.futures import Node, NodeKind, NodeState
from rolemesh.coordinator.dataflow.trace import PathNode, chrome_trace, critical_path

EXAMPLES = 300


def node(
    node_id: int,
    pool: str,
    start: float,
    seconds: float,
    inputs: tuple[int, ...] = (),
    **fields: int,
) -> Node:
    return Node(
        node_id=node_id, step=1, kind=NodeKind.INFER, service=pool, method="work", pool=pool,
        sequence=0, inputs=inputs, queued_at=0.0, started_at=start, ended_at=start + seconds,
        state=NodeState.DONE, **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def longest_chain(nodes: list[Node]) -> float:
    """Seconds of the longest chain, over all sets of nodes."""

    def follows(first: Node, second: Node) -> bool:
        is_tied = first.node_id in second.inputs or first.pool == second.pool
        return is_tied and first.ended_at <= second.started_at  # type: ignore[operator]

    best = 0.0
    for size in range(1, len(nodes) + 1):
        for chosen in combinations(sorted(nodes, key=lambda n: n.started_at or 0.0), size):
            if all(follows(a, b) for a, b in pairwise(chosen)):
                best = max(best, sum(n.seconds for n in chosen))
    return best


@st.composite
def graphs(draw: st.DrawFn) -> list[Node]:
    """Executed graphs: a node starts when its inputs have ended, or, now and then, before."""
    nodes: list[Node] = []
    for node_id in range(draw(st.integers(1, 8))):
        inputs = tuple(sorted(draw(st.sets(st.integers(0, node_id - 1))))) if node_id else ()
        pool = draw(st.sampled_from("abc"))
        is_early = draw(st.booleans())
        waits_for = [nodes[i] for i in inputs] + ([] if is_early else [
            known for known in nodes if known.pool == pool
        ])  # fmt: skip
        times = [known.started_at if is_early else known.ended_at for known in waits_for]
        start = max([0.0, *(time or 0.0 for time in times)]) + draw(st.integers(0, 3))
        # Whole seconds, so that sums are exact.
        nodes.append(node(node_id, pool, start, float(draw(st.integers(1, 9))), inputs))
    return nodes


@given(graphs())
@settings(max_examples=EXAMPLES, deadline=None)
def test_the_critical_path_is_the_longest_of_all_chains(nodes: list[Node]) -> None:
    path = critical_path(nodes)
    assert sum(part.seconds for part in path) == longest_chain(nodes)
    ends = [part.node.ended_at or 0.0 for part in path]
    starts = [part.node.started_at or 0.0 for part in path[1:]]
    assert all(end <= start for end, start in zip(ends, starts, strict=False))
    # So it is never longer than the time that the graph took.
    assert sum(part.seconds for part in path) <= max(n.ended_at or 0.0 for n in nodes)


def test_weights_that_come_between_two_tokens_are_beside_the_generation() -> None:
    first, take, second = (
        node(0, "rollout", 0.0, 10.0), node(1, "rollout", 5.0, 1.0), node(2, "rollout", 10.0, 5.0),
    )  # fmt: skip
    assert critical_path([first, take, second]) == [PathNode(first, 10.0), PathNode(second, 5.0)]


def test_a_block_comes_after_the_part_of_a_generation_that_made_it() -> None:
    generation = node(0, "actor", 0.0, 10.0)
    early, late = (
        node(1, "reward", 3.0, 1.0, (0,), block=0), node(2, "reward", 9.0, 4.0, (0,), block=1),
    )  # fmt: skip
    early.ready_at, late.ready_at = 2.0, 9.0
    assert critical_path([generation, early]) == [PathNode(generation, 10.0)]
    assert critical_path([generation, early, late]) == [
        PathNode(generation, 9.0), PathNode(late, 4.0),
    ]  # fmt: skip


def test_a_graph_in_which_nothing_ended_has_no_path() -> None:
    waiting = node(0, "a", 0.0, 1.0)
    waiting.ended_at = None
    assert critical_path([waiting]) == []
    assert critical_path([]) == []


def test_the_trace_has_a_span_for_each_block() -> None:
    blocks = [node(i, "reward", float(i), 1.0, block=i) for i in range(3)]
    events = chrome_trace(blocks)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(span["name"], span["args"]["block"]) for span in spans] == [
        ("reward.work", index) for index in range(3)
    ]
    assert [span["ts"] for span in spans] == [0, 1_000_000, 2_000_000]
    assert {(span["pid"], span["tid"]) for span in spans} == {(0, 0)}


@pytest.mark.parametrize("missing", ["started_at", "ended_at"])
def test_a_node_that_never_ran_is_not_in_the_trace(missing: str) -> None:
    odd = node(0, "a", 0.0, 1.0)
    setattr(odd, missing, None)
    assert chrome_trace([odd])["traceEvents"] == []
