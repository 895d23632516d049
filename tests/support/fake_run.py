"""A plausible run in a store and a folder, without any service: for tests of what is shown of runs.

Numbers are drawn from a fixed seed; names of metrics are those that `step_record` makes of nodes
like the real ones.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

from rolemesh.coordinator.api.messages import to_timestamp
from rolemesh.coordinator.dataflow.futures import Node, NodeKind, NodeState
from rolemesh.coordinator.run.results.metrics import step_record
from rolemesh.coordinator.state.store import (
    RunRecord,
    RunState,
    RunStream,
    ServiceLease,
    StateStore,
)
from rolemesh.rpc.channel import MethodTraffic
from rolemesh.v1 import coordinator_pb2

START = 1_800_000_000.0
"""Unix time at which the run began."""
STEP_S = 10.0
EVALUATE_EVERY = 5
CHECKPOINT_EVERY = 10
LOGS = ("actor", "coordinator", "critic", "reference", "reward", "rollout-0", "rollout-1")
SERVICES = {
    "actor": "actor",
    "critic": "critic",
    "reference": "reference",
    "reward": "reward",
    "rollout-0": "rollout",
    "rollout-1": "rollout",
}
"""Roles by name of the service."""
_GIB = 2**30

NUM_STEPS = 12
"""Steps of the runs "made" and "live" on which tests of what a coordinator answers stand."""


async def fill_store(
    store: StateStore,
    run_id: str,
    directory: Path,
    *,
    num_steps: int = 20,
    is_live: bool = False,
    created_at: float = START,
    seed: int = 0,
    with_leases: bool = True,
) -> RunRecord:
    """Writes a run of asynchronous PPO into a store, and its files into a folder.

    Args:
        store: Gets record, metrics, graphs, events, samples, device use and leases.
        run_id: Its id.
        directory: Gets logs, metrics.jsonl and dataflow.jsonl; made if missing.
        num_steps: Steps that were made.
        is_live: Whether it goes on, in the middle of the step after these; else it has succeeded.
        created_at: Unix time in seconds at which it began.
        seed: Of the numbers.
        with_leases: Whether its services stand in the registry.

    Returns:
        Its record.
    """
    draw = random.Random(seed)
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    services = {
        name: {"role": role, "address": f"127.0.0.1:{41000 + place}", "policy_version": 0}
        for place, (name, role) in enumerate(SERVICES.items())
    }
    await store.create_run(
        RunRecord(
            run_id=run_id,
            name="fake",
            num_steps=num_steps * 2 if is_live else num_steps,
            directory=str(directory),
            created_at=created_at,
            updated_at=created_at,
            algorithm="ppo",
            services=services,
        )
    )
    epoch = await store.next_epoch(run_id)

    async def tell(event: coordinator_pb2.RunEvent, step: int, at: float) -> None:
        event.step = step
        event.time.CopyFrom(to_timestamp(at))
        await store.append_entry(run_id, RunStream.EVENTS, event.SerializeToString(), epoch)

    for state in (coordinator_pb2.RUN_STATE_STARTING, coordinator_pb2.RUN_STATE_RUNNING):
        await tell(
            coordinator_pb2.RunEvent(state=coordinator_pb2.RunStateChange(state=state)),
            0,
            created_at,
        )
    record: dict[str, float] = {}
    with (
        (directory / "metrics.jsonl").open("a") as metrics,
        (directory / "dataflow.jsonl").open("a") as graphs,
    ):
        for step in range(1, num_steps + 1):
            began = created_at + step * STEP_S
            nodes = _nodes(step, began, num_steps, draw)
            record = step_record(step, nodes, STEP_S - 0.5, MethodTraffic(24, 9_000, 7_000))
            record["staleness/max"] = float(min(step - 1, 1))
            if step % EVALUATE_EVERY == 0:
                record |= _held_out(step, num_steps, draw)
            graph = json.dumps({"step": step, "nodes": [node.to_dict() for node in nodes]})
            metrics.write(json.dumps(record) + "\n")
            graphs.write(graph + "\n")
            await store.append_metrics(run_id, record)
            await store.append_entry(run_id, RunStream.GRAPHS, graph.encode(), step=step)
            ended = began + STEP_S - 0.5
            for event in _events(step, record, directory):
                await tell(event, step, ended)
            samples = _samples(step, draw).SerializeToString()
            await store.append_entry(run_id, RunStream.SAMPLES, samples, epoch, step=step)
            for second in range(0, int(STEP_S), 5):
                for look in _looks(began + second, draw):
                    await store.append_entry(
                        run_id, RunStream.DEVICES, look.SerializeToString(), epoch
                    )
    now = created_at + (num_steps + 1) * STEP_S
    for log in LOGS:
        lines = (f"2027-01-15T08:00:00.{n:03d}Z INFO {log}[0] line {n}" for n in range(200))
        (directory / "logs" / f"{log}.log").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if is_live:
        step = num_steps + 1
        nodes = _nodes(step, now, num_steps, draw)
        _cut_short(nodes, now + STEP_S / 2)
        graph = json.dumps({"step": step, "nodes": [node.to_dict() for node in nodes]})
        await store.append_entry(run_id, RunStream.FLOW, graph.encode(), epoch, step=step)
    else:
        ended_event = coordinator_pb2.RunStateChange(state=coordinator_pb2.RUN_STATE_SUCCEEDED)
        await tell(coordinator_pb2.RunEvent(state=ended_event), num_steps, now)
    await store.update_run(
        run_id,
        epoch=epoch,
        state=RunState.RUNNING if is_live else RunState.SUCCEEDED,
        activity=f"step {num_steps + 1}" if is_live else "",
        step=num_steps,
        metrics=record,
        updated_at=now,
    )
    if with_leases:
        for place, (name, facts) in enumerate(services.items()):
            lease = ServiceLease(
                role=str(facts["role"]),
                address=str(facts["address"]),
                run_id=run_id,
                name=name,
                pid=5000 + place,
                status="busy: actor.update, backward 3 of 8" if name == "actor" else "ready",
            )
            await store.register_service(lease, ttl_s=3_600)
    return await store.get_run(run_id)


async def append_step(
    store: StateStore,
    record: RunRecord,
    step: int,
    *,
    seed: int = 1,
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Makes one more step of a run that `fill_store` wrote with is_live, as its process would.

    Args:
        store: Has the run.
        record: Of the run.
        step: Number of the step.
        seed: Of the numbers.
        metrics: Values in place of drawn ones, by name.
    """
    draw, directory = random.Random(seed + step), Path(record.directory)
    began = record.created_at + step * STEP_S
    nodes = _nodes(step, began, step, draw)
    values = step_record(step, nodes, STEP_S - 0.5, MethodTraffic(24, 9_000, 7_000))
    values |= metrics or {}
    graph = json.dumps({"step": step, "nodes": [node.to_dict() for node in nodes]})
    with (directory / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps(values) + "\n")
    await store.append_entry(record.run_id, RunStream.GRAPHS, graph.encode(), step=step)
    await store.append_metrics(record.run_id, values)
    await store.update_run(record.run_id, step=step, metrics=values, activity=f"step {step + 1}")
    for event in _events(step, values, directory):
        event.step = step
        event.time.CopyFrom(to_timestamp(began + STEP_S))
        await store.append_entry(record.run_id, RunStream.EVENTS, event.SerializeToString())
    samples = _samples(step, draw).SerializeToString()
    await store.append_entry(record.run_id, RunStream.SAMPLES, samples, step=step)


def _nodes(step: int, began: float, num_steps: int, draw: random.Random) -> list[Node]:
    """The calls of a step: two samplers, blocks for the critic, roles in pools of their own."""
    learned = step / max(1, num_steps)
    plan: list[tuple[str, str, NodeKind, str, tuple[int, ...], float, float, int | None]] = [
        # service, method, kind, pool, inputs, start, seconds, block
        ("rollout-0", "update_weights", NodeKind.SAMPLE, "sampling/0", (), 0.0, 0.3, None),
        ("rollout-1", "update_weights", NodeKind.SAMPLE, "sampling/1", (), 0.0, 0.3, None),
        ("rollout-0", "generate", NodeKind.SAMPLE, "sampling/0", (0,), 0.3, 3.5, None),
        ("rollout-1", "generate", NodeKind.SAMPLE, "sampling/1", (1,), 0.3, 3.1, None),
        ("critic", "compute_values", NodeKind.INFER, "judging", (2, 3), 2.0, 0.6, 0),
        ("critic", "compute_values", NodeKind.INFER, "judging", (2, 3), 3.8, 0.6, 1),
        ("reference", "compute_logprobs", NodeKind.INFER, "judging", (2, 3), 4.4, 0.8, None),
        ("reward", "compute_reward", NodeKind.INFER, "rewards", (2, 3), 3.8, 0.4, None),
        ("actor", "compute_advantages", NodeKind.INFER, "training", (4, 5, 6, 7), 5.2, 0.1, None),
        ("critic", "update", NodeKind.UPDATE, "judging", (2, 3, 8), 5.3, 1.2, None),
        ("actor", "update", NodeKind.UPDATE, "training", (2, 3, 8), 5.3, 3.6, None),
        ("actor", "publish_weights", NodeKind.UPDATE, "training", (10,), 8.9, 0.5, None),
    ]
    metrics = _node_metrics(step, learned, draw)
    nodes = []
    for node_id, (service, method, kind, pool, inputs, start, seconds, block) in enumerate(plan):
        jitter = 1 + 0.05 * draw.random()
        num_tokens = 12_000 if method in ("generate", "update", "compute_values") else 0
        role = service.partition("-")[0]
        nodes.append(
            Node(
                node_id=node_id,
                step=step,
                kind=kind,
                service=service,
                method=method,
                pool=pool,
                sequence=block or 0,
                inputs=inputs,
                queued_at=began,
                block=block,
                num_rows=32 if block is not None or role == "rollout" else 64,
                ready_at=began + start,
                started_at=began + start + 0.01,
                ended_at=began + start + seconds * jitter,
                state=NodeState.DONE,
                num_tokens=num_tokens,
                num_bytes=0 if role == "rollout" else 90_000,
                phases={"queue": 0.001, "compute": seconds * 0.95},
                peak_bytes={"compute": {0: 3 * _GIB, 1: 2 * _GIB}},
                metrics=metrics.get(f"{role}.{method}", {}),
                policy_version=step if method == "update" else None,
            )
        )
    return nodes


def _node_metrics(step: int, learned: float, draw: random.Random) -> dict[str, dict[str, float]]:
    """What the services report of their calls."""

    def near(value: float, spread: float = 0.05) -> float:
        return value + spread * draw.gauss(0, 1)

    reward = near(0.1 + 0.8 * (1 - math.exp(-3 * learned)))
    length = near(180 - 60 * learned, 4)
    rewards = {
        "reward/mean": reward,
        "reward/std": near(0.35, 0.02),
        "reward/min": 0.0,
        "reward/max": 1.0,
        "reward/standard_error": 0.04,
        "accuracy/mean": min(1.0, max(0.0, reward)),
    }
    update = {
        "approx_kl": abs(near(0.006, 0.001)),
        "clip_fraction_high": abs(near(0.02, 0.005)),
        "clip_fraction_low": abs(near(0.03, 0.005)),
        "entropy": near(1.6 - learned, 0.03),
        "grad_norm": abs(near(1.2, 0.2)),
        "learning_rate": 2e-5,
        "loss": near(-0.01, 0.004),
        "optimizer_steps": 2.0,
        "policy_loss": near(-0.01, 0.004),
        "ratio_max": 1.6,
        "ratio_mean": 1.0,
        "sampler_logprob_diff_max": 2.4e-5,
        "sampler_logprob_diff_mean": 1.7e-6,
    }
    return {
        "rollout.generate": {
            "completion_length/mean": length,
            "completion_length/min": 3.0,
            "completion_length/max": 256.0,
            "finished_fraction": 0.97,
            "policy_version/min": float(max(0, step - 2)),
            "policy_version/max": float(step - 1),
            "sampler_logprob/mean": near(-0.6, 0.02),
        },
        "reward.compute_reward": rewards,
        "actor.compute_advantages": {
            **rewards,
            "advantages/mean": near(0.0, 0.01),
            "advantages/std": 1.0,
            "advantages/rows_without_tokens": 0.0,
            "kl/coefficient": 0.02,
            "kl/mean": abs(near(0.4 * learned, 0.01)),
            "kl/per_row": abs(near(30 * learned, 0.5)),
            "returns/mean": near(reward, 0.02),
            "returns/std": 0.4,
            "values/explained_variance": near(0.7 * learned, 0.03),
            "values/mean": near(reward, 0.05),
        },
        "critic.update": {
            "grad_norm": abs(near(2.0, 0.3)),
            "learning_rate": 1e-4,
            "loss": abs(near(0.2 * (1 - learned), 0.01)),
            "optimizer_steps": 2.0,
            "value_clip_fraction": 0.01,
            "value_error_max": 0.9,
            "value_loss": abs(near(0.2 * (1 - learned), 0.01)),
            "values_mean": near(reward, 0.05),
        },
        "actor.update": update,
    }


def _held_out(step: int, num_steps: int, draw: random.Random) -> dict[str, float]:
    score = 0.1 + 0.8 * (1 - math.exp(-3 * step / num_steps)) + 0.02 * draw.gauss(0, 1)
    return {
        "held_out/score": score,
        "held_out/standard_error": 0.03,
        "held_out/reward/mean": score,
        "held_out/accuracy/mean": score,
    }


def _events(
    step: int, record: dict[str, float], directory: Path
) -> Iterator[coordinator_pb2.RunEvent]:
    held_out = {name: value for name, value in record.items() if name.startswith("held_out/")}
    if held_out:
        yield coordinator_pb2.RunEvent(evaluated=coordinator_pb2.Evaluated(metrics=held_out))
        text = f"held-out score after {step} steps: {held_out['held_out/score']:.3f}"
        yield coordinator_pb2.RunEvent(note=coordinator_pb2.Note(text=text))
    yield coordinator_pb2.RunEvent(step_made=coordinator_pb2.StepMade(metrics=record))
    if step % CHECKPOINT_EVERY == 0:
        folder = str(directory / "checkpoints" / f"step-{step:08d}")
        saved = coordinator_pb2.CheckpointSaved(directory=folder)
        yield coordinator_pb2.RunEvent(checkpoint_saved=saved)


def _samples(step: int, draw: random.Random) -> coordinator_pb2.ListSamplesResponse:
    samples = []
    for row in range(4):
        left, right = draw.randrange(100), draw.randrange(100)
        completion = f" {left + right - (row == 3)}\nDone — «ok» 🙂"
        tokens = [draw.randrange(50_000) for _ in range(12)]
        samples.append(
            coordinator_pb2.Sample(
                row=row,
                prompt=f"What is {left} + {right}? <b>Answer</b> briefly.",
                completion=completion,
                answer=str(left + right),
                reward=0.0 if row == 3 else 1.0,
                policy_version=max(0, step - 1),
                token_ids=tokens,
                logprobs=[-draw.expovariate(2.0) for _ in tokens],
                loss_mask=[True] * (len(tokens) - 1) + [False],
                advantages=[draw.gauss(0, 1) for _ in tokens],
                reward_parts={"python/acc": float(row != 3)},
            )
        )
    return coordinator_pb2.ListSamplesResponse(step=step, samples=samples)


def _looks(at: float, draw: random.Random) -> Iterator[coordinator_pb2.GetDeviceUseResponse]:
    """One look at each service: the actor has two ranks, sampling is on GPUs."""
    busy = {"actor": 0.9, "critic": 0.3, "reference": 0.15, "reward": 0.05}
    for service, role in SERVICES.items():
        series = []
        for rank in range(2 if role == "actor" else 1):
            place = "cpu" if role == "reward" else f"cuda:{rank}"
            share = min(1.0, max(0.0, busy.get(service, 0.6) + 0.1 * draw.gauss(0, 1)))
            series.append(
                coordinator_pb2.DeviceUseSeries(
                    service=service,
                    rank=rank,
                    device=place,
                    times=[to_timestamp(at)],
                    busy=[share],
                    memory_bytes=[int((20 + 40 * share) * _GIB)],
                    memory_total_bytes=80 * _GIB,
                )
            )
        yield coordinator_pb2.GetDeviceUseResponse(devices=series)


def _cut_short(nodes: list[Node], now: float) -> None:
    """Turns a finished graph into one that is as far as it was then."""
    for node in nodes:
        if node.ready_at is not None and node.ready_at > now:
            node.ready_at = None
        if node.started_at is None or node.started_at > now:
            node.started_at, node.state = None, NodeState.QUEUED
        elif node.ended_at is not None and node.ended_at > now:
            node.state = NodeState.RUNNING
        if node.ended_at is None or node.ended_at > now:
            node.ended_at, node.policy_version = None, None
            node.metrics, node.phases, node.peak_bytes = {}, {}, {}
