"""Tests of a run's plan beside what was measured: numbers known beforehand, and what is missing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.fake_recipes import fake_recipe
from support.planned_runs import (
    EXPECTED,
    MEASURED_STEP_S,
    MEASURED_TOKENS,
    PLAN,
    planned_recipe,
    write_planned_run,
)

from rolemesh.coordinator.api.reads.plans import MEASURED_STEPS, counted, kept_plan, usual
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.dataflow.futures import Node, NodeKind, NodeState
from rolemesh.coordinator.dataflow.trace import call_seconds
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunStream
from rolemesh.v1 import coordinator_pb2


async def told(num_steps: int) -> coordinator_pb2.RunPlan:
    store = MemoryStateStore()
    await write_planned_run(store, "planned", num_steps=num_steps)
    return (await StoreOperations(store).get_plan("planned")).plan


async def test_medians_stand_beside_what_was_predicted() -> None:
    plan = await told(5)
    assert plan.step_s == PLAN["step_s"]
    assert plan.measured_step_s == pytest.approx(MEASURED_STEP_S)
    assert (plan.tokens, plan.measured_tokens) == (PLAN["tokens"], MEASURED_TOKENS)
    assert (plan.num_steps, plan.rows, plan.basis) == (3, PLAN["rows"], PLAN["basis"])
    assert [task.name for task in plan.tasks] == list(EXPECTED)
    for task in plan.tasks:
        predicted, measured = EXPECTED[task.name]
        assert task.HasField("predicted_s") == (predicted is not None), task.name
        assert task.HasField("measured_s") == (measured is not None), task.name
        assert task.predicted_s == pytest.approx(predicted or 0.0), task.name
        assert task.measured_s == pytest.approx(measured or 0.0), task.name
    assert [task.pool for task in plan.tasks] == ["actor", "critic", "", "actor", ""]


async def test_nothing_is_measured_before_the_third_step() -> None:
    plan = await told(2)
    assert plan.num_steps == 0
    assert not plan.HasField("measured_step_s")
    assert not any(task.HasField("measured_s") for task in plan.tasks)
    assert [task.name for task in plan.tasks] == [task["name"] for task in PLAN["tasks"]]


async def test_steps_that_come_are_counted_and_those_taken_back_are_not() -> None:
    store = MemoryStateStore()
    await write_planned_run(store, "planned")
    operations = StoreOperations(store)
    before = (await operations.get_plan("planned")).plan
    await store.append_metrics("planned", {"step": 5, "time/step": 1.0, "tokens": 1.0})
    after = (await operations.get_plan("planned")).plan
    assert (before.measured_step_s, after.measured_step_s) == (5.0, 3.75)
    # A step that is made again has another graph, without any call here.
    again = json.dumps({"step": 5, "nodes": []}).encode()
    await store.append_entry("planned", RunStream.GRAPHS, again, step=5)
    sampled = (await operations.get_plan("planned")).plan.tasks[0]
    assert (before.tasks[0].measured_s, sampled.measured_s) == (pytest.approx(2.0), 1.75)


async def test_pools_of_the_plan_stand_beside_those_of_the_recipe() -> None:
    pools = {pool.name: pool for pool in (await told(5)).pools}
    assert list(pools) == ["actor", "critic", "judges"]
    actor, judges = pools["actor"], pools["judges"]
    assert (actor.planned_devices, list(actor.devices)) == ("2 h100", ["cuda:0"])
    assert (list(actor.planned_roles), list(actor.roles)) == (
        ["actor 1-1-2 fsdp 2"],
        ["actor 1-1-1"],
    )
    assert (judges.planned_devices, list(judges.planned_roles)) == ("", [])
    assert list(judges.roles) == ["reference 1-1-1", "reward 1-1-1"]


async def test_calls_of_one_name_add_up_in_the_plan() -> None:
    store = MemoryStateStore()
    await write_planned_run(store, "planned")
    second = {"name": "actor.generate", "pool": "actor", "start_s": 4.0, "end_s": 4.5}
    twice = {**PLAN, "tasks": [*PLAN["tasks"], second]}
    await store.update_run("planned", plan={"predicted": twice, "pools": {}})
    plan = (await StoreOperations(store).get_plan("planned")).plan
    (sampled,) = [task for task in plan.tasks if task.name == "actor.generate"]
    assert (sampled.start_s, sampled.predicted_s) == (0.0, 3.5)


async def test_a_run_without_a_plan_has_none() -> None:
    assert kept_plan(fake_recipe()) == {}
    assert kept_plan(planned_recipe())["predicted"]["step_s"] == PLAN["step_s"]
    store = MemoryStateStore()
    await write_planned_run(store, "other")
    await store.update_run("other", plan={})
    assert not (await StoreOperations(store).get_plan("other")).HasField("plan")


def test_services_of_a_role_and_moves_of_others_count_once() -> None:
    def node(service: str, start: float, end: float, **changes: Any) -> Node:
        return Node(
            node_id=0, step=1, kind=NodeKind.SAMPLE, service=service, method="generate", pool="p",
            sequence=0, inputs=(), queued_at=0.0, started_at=start, ended_at=end,
            **{"state": NodeState.DONE, **changes},
        )  # fmt: skip

    nodes = [
        node("rollout-0", 1.0, 3.0),
        node("rollout-1", 2.0, 6.0),
        node("rollout-0", 2.5, 2.75),
        node("rollout-1", 8.0, 9.0, phases={"sleep": 0.25, "wake": 0.5, "compute": 1.0}),
        node("rollout-0", 20.0, 90.0, state=NodeState.FAILED),
        node("actor", 0.0, 0.5),
    ]
    assert call_seconds(nodes) == {"rollout.generate": 5 + 1.75, "actor.generate": 0.5}


def test_the_newest_steps_count_without_the_first_ones() -> None:
    assert counted(range(1, 6)) == [3, 4, 5]
    assert counted(range(1, 1000)) == list(range(1000 - MEASURED_STEPS, 1000))
    assert usual({1: 100.0, 2: 100.0}) is None
    assert usual({1: 100.0, 2: 100.0, 3: 3.0, 4: 5.0}) == 4.0
