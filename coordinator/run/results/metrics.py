"""A step as one flat record, and the places that it is written to."""

from __future__ import annotations

import asyncio
import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rolemesh.coordinator.dataflow.futures import Node, NodeKind
from rolemesh.coordinator.dataflow.pools import MOVES
from rolemesh.coordinator.dataflow.trace import critical_path
from rolemesh.coordinator.recipe.role_names import kind_of
from rolemesh.coordinator.run.results.expert_loads import (
    ExpertsFile,
    loads_of_step,
    loads_response,
    read_expert_loads,
)
from rolemesh.coordinator.run.results.samples_file import SamplesFile
from rolemesh.coordinator.state.store import RunStream, StateStore
from rolemesh.coordinator.trackers.files import METRICS_FILE, LinesOfSteps
from rolemesh.coordinator.trackers.outside import OutsideTracker
from rolemesh.coordinator.trackers.tensorboard import ScalarWriter
from rolemesh.coordinator.trackers.tracker import RunFacts
from rolemesh.rpc.channel import ChannelTraffic, MethodTraffic
from rolemesh.v1 import coordinator_pb2

PHASE_OF_NODE: Mapping[str, str] = {
    "actor.generate": "generate",
    "rollout.generate": "generate",
    "rollout.update_weights": "weight_sync",
    "actor.publish_weights": "publish_weights",
    "actor.compute_logprobs": "proximal",
    "cost.compute_cost": "cost",
    "reward.update": "update_reward",
    "critic.compute_values": "values",
    "reference.compute_logprobs": "reference",
    "actor.compute_reference_logprobs": "reference",
    "teacher.compute_logprobs": "teacher",
    "actor.compute_teacher_logprobs": "teacher",
    "reward.compute_reward": "reward",
    "actor.compute_advantages": "advantages",
    "critic.update": "update_critic",
    "actor.update": "update_actor",
}
"""Names that people use for the work of a node, for all services of a role. Other nodes are called
"role_method"."""

WEIGHT_SYNC = "weight_sync"
"""Phase inside generate: bringing new weights to the sampler. Shown beside it, not in it."""

GRAPHS_FILE = "dataflow.jsonl"
"""In a run's folder: the executed graph of each step, one a line."""

_STATUS_METHOD = "/rolemesh.v1.WorkerService/GetStatus"


def phase_of(node: Node) -> str:
    """The name that people use for the work of a node."""
    name = f"{kind_of(node.role)}.{node.method}"
    return PHASE_OF_NODE.get(name, name.replace(".", "_"))


def phase_seconds(nodes: Sequence[Node]) -> dict[str, float]:
    """Seconds by phase. In one pool phases follow each other; over several they may overlap."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for node in nodes:
        sync = node.phases.get(WEIGHT_SYNC, 0.0)
        if sync > 0:
            seconds[WEIGHT_SYNC] += sync
        seconds[phase_of(node)] += max(0.0, node.seconds - sync)
        for moving in MOVES:
            if moving in node.phases:
                seconds[moving] += node.phases[moving]
    return dict(seconds)


def phase_peaks(nodes: Sequence[Node]) -> dict[str, int]:
    """Most memory that a rank held in each phase, in bytes, by the name of the phase."""
    peaks: dict[str, int] = {}
    for node in nodes:
        for inner, by_rank in node.peak_bytes.items():
            name = WEIGHT_SYNC if inner == WEIGHT_SYNC else phase_of(node)
            peaks[name] = max(peaks.get(name, 0), *by_rank.values())
    return peaks


def merged_metrics(nodes: Sequence[Node]) -> dict[str, float]:
    """Merges the metrics of the services into one mapping.

    A name with a slash ("kl/mean") belongs to the experience: it is kept, and the value of the
    latest node counts. A bare name ("grad_norm") belongs to its role: if several roles of the step
    report it, it becomes "<role>/name"; otherwise it is kept. Blocks of one call, and calls to
    several services of one role, count as one. Counts with a bare name are summed over a role's
    methods: new weights travel in UpdateWeights, or within Generate.
    """
    calls: dict[tuple[str, str], list[Node]] = {}
    for node in nodes:
        calls.setdefault((node.role, node.method), []).append(node)
    roles_by_name: dict[str, set[str]] = {}
    for (role, _), parts in calls.items():
        for name in combined_metrics(parts):
            roles_by_name.setdefault(name, set()).add(role)
    merged: dict[str, float] = {}
    for (role, _), parts in calls.items():
        for name, value in combined_metrics(parts).items():
            is_bare = "/" not in name
            told = f"{role}/{name}" if is_bare and len(roles_by_name[name]) > 1 else name
            before = merged.get(told, 0.0) if is_bare and name.endswith(COUNTS) else 0.0
            merged[told] = before + value
    return merged


COUNTS = ("_bytes", "_rows", "/errors", "/retries", "/hedged", "/cache_hits")
"""Endings of the names of metrics that are summed over the parts of a call."""


def combined_metrics(nodes: Sequence[Node]) -> dict[str, float]:
    """Combines the metrics of the parts of one call.

    A name that ends in "max", "peak" or "min" gives the largest or the smallest value, a count
    (COUNTS) the sum, any other name the mean over rows. Deviations and standard errors cannot be
    computed from those of the parts, and are left out.
    """
    if len(nodes) == 1:
        return dict(nodes[0].metrics)
    combined: dict[str, float] = {}
    for name in dict.fromkeys(name for node in nodes for name in node.metrics):
        parts = [
            (node.metrics[name], max(1, node.num_rows)) for node in nodes if name in node.metrics
        ]
        values = [value for value, _ in parts]
        if name.endswith(("max", "peak")):
            combined[name] = max(values)
        elif name.endswith("min"):
            combined[name] = min(values)
        elif name.endswith(COUNTS):
            combined[name] = sum(values)
        elif not name.endswith(("std", "standard_error")):
            combined[name] = sum(v * rows for v, rows in parts) / sum(rows for _, rows in parts)
    return combined


def step_record(
    step: int, nodes: Sequence[Node], seconds: float, traffic: MethodTraffic
) -> dict[str, float]:
    """One step as a flat record.

    Args:
        step: Its number, from 1.
        nodes: Its nodes, in call order.
        seconds: Wall time from its first call to its commit.
        traffic: Calls and bytes of the coordinator in this step.
    """
    num_tokens = sum(node.num_tokens for node in nodes if node.method in ("generate", "read"))
    return {
        "step": step,
        **merged_metrics(nodes),
        "tokens": num_tokens,
        "tokens_per_second": num_tokens / seconds if seconds > 0 else 0.0,
        "dataflow/critical_path_seconds": sum(part.seconds for part in critical_path(nodes)),
        **{f"time/{phase}": spent for phase, spent in phase_seconds(nodes).items()},
        "time/step": seconds,
        **{f"memory/{phase}_peak_bytes": peak for phase, peak in phase_peaks(nodes).items()},
        "experience/fetched_bytes": sum(node.num_bytes for node in nodes),
        **traffic_record(traffic),
    }


def steps_behind(nodes: Sequence[Node], actor_versions: Sequence[int]) -> dict[str, float]:
    """How many steps the oldest weights that sampled were behind those that train.

    Args:
        nodes: Of a step.
        actor_versions: Version of the policy after each step before it, from step 0 on.
    """
    sampled = [
        node.metrics["policy_version/min"]
        for node in nodes
        if node.kind is NodeKind.SAMPLE and "policy_version/min" in node.metrics
    ]
    if not sampled:
        return {}
    # The last step that ended with this version or an older one.
    oldest = bisect.bisect_right(actor_versions, min(sampled)) - 1
    return {"staleness/max": float(len(actor_versions) - 1 - oldest)}


def traffic_record(traffic: MethodTraffic) -> dict[str, float]:
    """Calls and bytes of the coordinator, as a step's record names them."""
    return {f"coordinator/{name}": value for name, value in asdict(traffic).items()}


def dataflow_traffic(traffic: ChannelTraffic) -> MethodTraffic:
    """The sum over all methods but the watcher's, whose calls grow with time, not with work."""
    counted = {name: of for name, of in traffic.methods.items() if name != _STATUS_METHOD}
    return ChannelTraffic(counted).total


def traffic_since(before: MethodTraffic, now: MethodTraffic) -> MethodTraffic:
    """The difference of two sums."""
    return MethodTraffic(
        calls=now.calls - before.calls,
        sent_bytes=now.sent_bytes - before.sent_bytes,
        received_bytes=now.received_bytes - before.received_bytes,
    )


class MetricsWriter:
    """Writes the record of each step, for people and programs.

    Records go to metrics.jsonl, TensorBoard, the store's metric stream and the trackers of the
    recipe; executed graphs to dataflow.jsonl and the store; completions to samples.jsonl; loads of
    experts to experts.jsonl and the store.

    Invariant: a line of a file is complete when the method that writes it returns. The run waits
    for a tracker only at the end, and for a bounded time.
    """

    def __init__(
        self, run: RunFacts, store: StateStore, trackers: Sequence[OutsideTracker] = ()
    ) -> None:
        """Opens the files.

        Args:
            run: The run that makes the steps.
            store: Store that gets the records, too.
            trackers: Trackers of the recipe, already started.
        """
        self._store = store
        self._run_id = run.run_id
        self._directory = Path(run.directory)
        self.epoch: int | None = None
        """Of the coordinator that writes; None: it is not fenced."""
        self._graphs = LinesOfSteps(self._directory / GRAPHS_FILE)
        self._lines = LinesOfSteps(self._directory / METRICS_FILE)
        self.samples = SamplesFile(self._directory)
        self._experts = ExpertsFile(self._directory)
        self._untold_loads: coordinator_pb2.GetExpertLoadsResponse | None = None
        """Of the newest step, while the store has not got them."""
        self._board = ScalarWriter(self._directory / "tensorboard")
        self._trackers = tuple(trackers)

    async def resume(
        self,
        step: int,
        records: Sequence[Mapping[str, float]],
        before: Mapping[str, float] | None = None,
    ) -> None:
        """Makes files and store say what a run has reached that another process began.

        Args:
            step: Steps that count.
            records: Of those that were told of, oldest first.
            before: Scalars of the evaluation before the first step; None: there was none.
        """
        self.rewind(step, records)
        known: set[int] = set()
        after_id = ""
        while entries := await self._store.read_metrics(self._run_id, after_id):
            known |= {int(entry.values["step"]) for entry in entries}
            after_id = entries[-1].entry_id
        # Held-out curves begin at step 0.
        first = [] if before is None else [{"step": 0.0, **before}]
        for record in (*first, *records):
            if int(record["step"]) not in known:
                await self._store.append_metrics(self._run_id, record, self.epoch)
        told = await self._store.read_entries(self._run_id, RunStream.EXPERTS)
        newest = max((entry.step or 0 for entry in told), default=0)
        for loads in read_expert_loads(self._directory, RunStream.EXPERTS.keep):
            # Of a step that was committed and not told of, or of a store that has lost them.
            if loads.step > newest:
                await self._append_loads(loads)

    async def write_step(self, record: Mapping[str, float]) -> None:
        """Writes a step's record everywhere."""
        step, scalars = int(record["step"]), dict(record)
        # First where another coordinator fences this one off.
        await self._store.append_metrics(self._run_id, record, self.epoch)
        self._lines.append(record)
        del scalars["step"]
        self._write_scalars(step, scalars)

    async def write_before(self, scalars: Mapping[str, float]) -> None:
        """Writes the evaluation before the first step everywhere but to metrics.jsonl, of steps."""
        await self._store.append_metrics(self._run_id, {"step": 0.0, **scalars}, self.epoch)
        self._write_scalars(0, scalars)

    def _write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes scalars to TensorBoard and to the trackers."""
        self._board.write(step, scalars)
        for tracker in self._trackers:
            tracker.log(step, scalars)

    async def write_graph(self, step: int, nodes: Sequence[Node]) -> None:
        """Writes a step's executed graph to dataflow.jsonl and to the store."""
        graph = self._graphs.append({"step": step, "nodes": [node.to_dict() for node in nodes]})
        await self._store.append_entry(
            self._run_id, RunStream.GRAPHS, graph.encode(), self.epoch, step=step
        )

    def write_loads(self, step: int, nodes: Sequence[Node]) -> None:
        """Writes how often each expert was chosen in a step, before it is committed.

        Raises:
            RunError: Two updates of a role told of different experts.
        """
        roles = loads_of_step(step, nodes)
        if roles:
            self._experts.write(step, roles)
            self._untold_loads = loads_response(step, roles)

    async def tell_loads(self, step: int) -> None:
        """Gives the store the loads of a step that is committed, unless it has got them."""
        if self._untold_loads is not None and self._untold_loads.step == step:
            await self._append_loads(self._untold_loads)
            self._untold_loads = None

    async def _append_loads(self, loads: coordinator_pb2.GetExpertLoadsResponse) -> None:
        await self._store.append_entry(
            self._run_id,
            RunStream.EXPERTS,
            loads.SerializeToString(),
            self.epoch,
            step=loads.step,
        )

    def rewind(self, step: int, records: Sequence[Mapping[str, float]]) -> None:
        """Makes the files say what the run has reached: steps after `step` will be made again.

        Args:
            step: Steps that count.
            records: Of those that were told of, oldest first.
        """
        self._graphs.keep(lambda line: line["step"] <= step)
        self._lines.replace(records)
        self.samples.rewind(step)
        self._experts.rewind(step)

    async def finish_trackers(self, state: str, deadline_s: float) -> None:
        """Lets the trackers of the recipe finish, side by side.

        Args:
            state: How the run ended.
            deadline_s: Longest wait, in seconds.
        """
        await asyncio.gather(*(tracker.finish(state, deadline_s) for tracker in self._trackers))

    def close(self) -> None:
        """Closes the files."""
        self._graphs.close()
        self._lines.close()
        self.samples.close()
        self._experts.close()
        self._board.close()
