"""An executed graph for people: as a Chrome trace, and the path that decided its length."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rolemesh.coordinator.dataflow.futures import Node, NodeState
from rolemesh.coordinator.dataflow.pools import MOVES


def chrome_trace(nodes: Iterable[Node]) -> dict[str, Any]:
    """The nodes in Chrome's trace event format: one row a service, grouped by pool."""
    nodes = [node for node in nodes if node.started_at is not None and node.ended_at is not None]
    pools = {name: number for number, name in enumerate(sorted({node.pool for node in nodes}))}
    services = {
        name: number for number, name in enumerate(sorted({node.service for node in nodes}))
    }
    events: list[dict[str, Any]] = []
    for name, number in pools.items():
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
    for pool, service in sorted({(node.pool, node.service) for node in nodes}):
        thread = {"ph": "M", "name": "thread_name", "pid": pools[pool], "tid": services[service]}
        events.append({**thread, "args": {"name": service}})
    for node in nodes:
        assert node.started_at is not None
        events.append(
            {
                "ph": "X",
                "name": node.name,
                "cat": node.kind.value,
                "pid": pools[node.pool],
                "tid": services[node.service],
                "ts": round(node.started_at * 1e6),
                "dur": round(node.seconds * 1e6),
                "args": {
                    "step": node.step,
                    "block": node.block,
                    "waited_s": node.started_at - node.queued_at,
                    "tokens": node.num_tokens,
                    "bytes": node.num_bytes,
                    "policy_version": node.policy_version,
                    **node.phases,
                },
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


@dataclass(frozen=True, slots=True)
class PathNode:
    """A node of a critical path."""

    node: Node
    seconds: float
    """Its own time; of a generation whose blocks are read while it runs, up to that block."""


def critical_path(nodes: Sequence[Node]) -> list[PathNode]:
    """The chain of nodes that a step cannot be shorter than, first node first.

    A node comes after those whose columns it reads, and after those that held its pool before it.
    One that reads a block of a generation that still runs comes after the part of it that made the
    block. Other nodes that ran at the same time, such as weights that came between two tokens, do
    not come after each other. The path is the chain with the most seconds; its sum is what the step
    would take if dispatch and waiting cost nothing.

    Args:
        nodes: Nodes of one step that have ended.
    """
    ended = sorted(
        (node for node in nodes if node.started_at is not None and node.ended_at is not None),
        key=lambda node: (node.started_at or 0.0, node.node_id),
    )
    lengths: list[float] = []
    before: list[tuple[int, float] | None] = []
    in_pool: defaultdict[str, list[int]] = defaultdict(list)
    place_of: dict[int, int] = {}
    for place, node in enumerate(ended):
        read = [place_of[known] for known in node.inputs if known in place_of]
        # What comes before it, each with its seconds until then.
        earlier = [(at, seconds) for at in read if (seconds := _lead(ended[at], node)) is not None]
        earlier += [
            (at, ended[at].seconds) for at in in_pool[node.pool] if _precedes(ended[at], node)
        ]
        totals = [lengths[at] - ended[at].seconds + seconds for at, seconds in earlier]
        longest = max(range(len(earlier)), key=lambda which: totals[which], default=None)
        before.append(None if longest is None else earlier[longest])
        lengths.append(node.seconds + (0.0 if longest is None else totals[longest]))
        in_pool[node.pool].append(place)
        place_of[node.node_id] = place
    last = max(range(len(ended)), key=lambda place: lengths[place], default=None)
    step = None if last is None else (last, ended[last].seconds)
    path: list[PathNode] = []
    while step is not None:
        place, seconds = step
        path.append(PathNode(ended[place], seconds))
        step = before[place]
    return path[::-1]


def _precedes(first: Node, second: Node) -> bool:
    return (first.ended_at or 0.0) <= (second.started_at or 0.0)


def _lead(read: Node, reader: Node) -> float | None:
    """Seconds from the start of a node until its reader had what it reads of it, if it did."""
    if _precedes(read, reader):
        return read.seconds
    if reader.ready_at is None or read.started_at is None or reader.ready_at < read.started_at:
        return None
    return reader.ready_at - read.started_at


def span_seconds(nodes: Sequence[Node]) -> float:
    """Seconds from the first start to the last end; 0 where nothing has ended."""
    started = [node.started_at for node in nodes if node.started_at is not None]
    ended = [node.ended_at for node in nodes if node.ended_at is not None]
    return max(ended) - min(started) if started and ended else 0.0


def call_seconds(nodes: Iterable[Node]) -> dict[str, float]:
    """Seconds in which the calls of one role and method were at work, by name ("actor.update").

    Services of a role, blocks and repeated calls that run side by side count once. Roles that had
    to leave the devices, or come back, belong to the call that waited for it.
    """
    calls: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for node in nodes:
        if node.state is NodeState.DONE and node.started_at is not None and node.ended_at:
            moved = sum(node.phases.get(phase, 0.0) for phase in MOVES)
            calls[f"{node.role}.{node.method}"].append((node.started_at - moved, node.ended_at))
    seconds = {}
    for name, spans in calls.items():
        covered, at = 0.0, -math.inf
        for start, end in sorted(spans):
            covered += max(0.0, end - max(at, start))
            at = max(at, end)
        seconds[name] = covered
    return seconds


def waiting_seconds(nodes: Sequence[Node]) -> Mapping[tuple[str, str], float]:
    """Seconds of a step that a pool did nothing while the path was with a role of another pool.

    Returns:
        By the pool that waited and the role that it waited for.
    """
    path = critical_path(nodes)
    waited: defaultdict[tuple[str, str], float] = defaultdict(float)
    for pool in {node.pool for node in nodes}:
        own = [node for node in nodes if node.pool == pool]
        for part in path:
            if part.node.pool != pool:
                waited[pool, part.node.role] += _uncovered(part.node, own)
    return waited


def _uncovered(node: Node, others: Sequence[Node]) -> float:
    """Seconds of a node during which none of the others ran."""
    at, end = node.started_at or 0.0, node.ended_at or 0.0
    left = 0.0
    for other in sorted(others, key=lambda other: other.started_at or 0.0):
        if other.started_at is None or other.ended_at is None:
            continue
        left += max(0.0, min(other.started_at, end) - at)
        at = max(at, other.ended_at)
    return left + max(0.0, end - at)


def path_summary(nodes: Sequence[Node]) -> dict[str, Any]:
    """The critical path of one step as plain JSON values; seconds are of its nodes' own time."""
    path = critical_path(nodes)
    return {
        "step": nodes[0].step if nodes else 0,
        "seconds": span_seconds(nodes),
        "critical_path_seconds": sum(part.seconds for part in path),
        "path": [{"node": _shown(part.node), "seconds": part.seconds} for part in path],
    }


def _shown(node: Node) -> str:
    return node.name if node.block is None else f"{node.name}[{node.block}]"


def print_paths(console: Console, graphs: Sequence[Sequence[Node]]) -> None:
    """A table with a row a step: how long it took, and what it could not be shorter than."""
    table = Table()
    for heading in ("step", "seconds", "critical path"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("its nodes, with seconds")
    for nodes in graphs:
        told = path_summary(nodes)
        path = [f"{part['node']} {part['seconds']:.2f}" for part in told["path"]]
        table.add_row(
            str(told["step"]),
            f"{told['seconds']:.2f}",
            f"{told['critical_path_seconds']:.2f}",
            # No markup: the number of a block stands in brackets.
            Text(", ".join(path)),
        )
    console.print(table)
