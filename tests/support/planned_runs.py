"""A run with a plan whose predicted and measured seconds are known, for tests of what tells them.

Of the steps that count the median is the fourth, which takes four times as long as `CALLS` says.
"""

from __future__ import annotations

import json
from typing import Any

from support.fake_recipes import fake_recipe

from rolemesh.coordinator.api.reads.plans import kept_plan
from rolemesh.coordinator.dataflow.futures import Node, NodeKind, NodeState
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.state.store import RunRecord, RunStream, StateStore

NUM_STEPS = 5

PLAN: dict[str, Any] = {
    "step_s": 6.0,
    "tokens": 500.0,
    "rows": "8 rows of 30 tokens",
    "basis": "a calibration of h100, off by 12 %",
    "pools": {
        "actor": {"devices": "2 h100", "roles": {"actor": "1-1-2 fsdp 2"}},
        "critic": {"devices": "1 h100", "roles": {"critic": "1-1-1"}},
    },
    "tasks": [
        {"name": "actor.generate", "pool": "actor", "start_s": 0.0, "end_s": 3.0},
        {"name": "critic.compute_values", "pool": "critic", "start_s": 3.0, "end_s": 3.3},
        {"name": "reward.compute_reward", "start_s": 3.0, "end_s": 3.5},
        {"name": "actor.update", "pool": "actor", "start_s": 3.5, "end_s": 5.1},
    ],
}

POOLS: dict[str, Any] = {
    "actor": {"devices": ["cuda:0"], "roles": ["actor"]},
    "critic": {"devices": ["cuda:1"], "roles": ["critic"]},
    "judges": {"devices": ["cpu"], "roles": ["reference", "reward"]},
}

CALLS: tuple[tuple[str, str, float, float, dict[str, float]], ...] = (
    ("actor", "generate", 0.0, 0.3, {}),
    ("actor", "generate", 0.2, 0.5, {}),
    ("critic", "compute_values", 0.55, 0.65, {"sleep": 0.02, "wake": 0.03, "compute": 0.1}),
    ("actor", "update", 0.6, 1.0, {}),
    ("reference", "compute_logprobs", 0.5, 0.55, {}),
)
"""Service, method, start, end and phases of each call, in seconds of a step of one second."""

EXPECTED: dict[str, tuple[float | None, float | None]] = {
    "actor.generate": (3.0, 2.0),
    "critic.compute_values": (0.3, 0.6),
    "reward.compute_reward": (0.5, None),
    "actor.update": (1.6, 1.6),
    "reference.compute_logprobs": (None, 0.2),
}
"""Predicted and measured seconds by name: calls that overlap count once, moves count."""

MEASURED_STEP_S, MEASURED_TOKENS = 5.0, 400.0


def planned_recipe() -> Recipe:
    """The recipe of the run."""
    values = fake_recipe(pools=POOLS).model_dump(mode="json")
    return Recipe.model_validate({**values, "plan": PLAN})


async def write_planned_run(store: StateStore, run_id: str, *, num_steps: int = NUM_STEPS) -> None:
    """Writes the run: its first two steps take 100 times as long, step s s times."""
    await store.create_run(
        RunRecord(
            run_id=run_id,
            name="planned",
            num_steps=num_steps,
            directory="",
            created_at=1.0,
            updated_at=1.0,
            algorithm="ppo",
            step=num_steps,
            plan=kept_plan(planned_recipe()),
        )
    )
    for step in range(1, num_steps + 1):
        slowness = 100 if step <= 2 else step
        nodes = [
            Node(
                node_id=number,
                step=step,
                kind=NodeKind.INFER,
                service=service,
                method=method,
                pool=service,
                sequence=0,
                inputs=(),
                queued_at=1000.0 * step,
                started_at=1000.0 * step + slowness * start,
                ended_at=1000.0 * step + slowness * end,
                state=NodeState.DONE,
                phases={name: slowness * seconds for name, seconds in phases.items()},
            )
            for number, (service, method, start, end, phases) in enumerate(CALLS)
        ]
        graph = {"step": step, "nodes": [node.to_dict() for node in nodes]}
        record = {"step": step, "time/step": 1.25 * slowness, "tokens": 100.0 * slowness}
        await store.append_entry(run_id, RunStream.GRAPHS, json.dumps(graph).encode(), step=step)
        await store.append_metrics(run_id, record)
