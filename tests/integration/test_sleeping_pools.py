"""Roles that leave their devices for each other: who is awake, what it costs, what fails."""

from __future__ import annotations

import random
import tempfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_in_process import InProcessRun, run_jumping
from support.fake_models import expected_weight
from support.fake_recipes import PPO_ROLES, fake_recipe, split_pools
from support.fake_roles import FakeMesh, fake_mesh
from support.fake_runs import make_run, read_lines

from rolemesh.coordinator.dataflow.errors import NodeFailedError, RunError
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.rpc.errors import PreconditionError

ASLEEP: dict[str, Any] = {"all": {"roles": PPO_ROLES, "sleep": "always"}}
NO_EVALUATION: dict[str, Any] = {"num_prompts": 0}
PPO_GRAPH: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "generate": ("actor", ("actor_update", "critic_update")),
    "values": ("critic", ("generate",)),
    "reference": ("reference", ("generate",)),
    "reward": ("reward", ("generate",)),
    "advantages": ("actor", ("values", "reference", "reward")),
    "critic_update": ("critic", ("advantages",)),
    "actor_update": ("actor", ("advantages",)),
}
"""PPO's step as it stands in the paper: who computes, and after what. A generation comes after the
updates of the step before."""


def fewest_switches(steps: int) -> int:
    """Least number of wakes over all orders of the calls of so many steps, by trying all."""
    nodes = {}
    for step in range(steps):
        for name, (role, after) in PPO_GRAPH.items():
            before = [(step - (name == "generate"), other) for other in after]
            nodes[step, name] = (role, [known for known in before if known[0] >= 0])
    start: tuple[frozenset[Any], str] = (frozenset(), "")
    best, waiting = {start: 0}, deque([start])
    while waiting:
        state = waiting.popleft()
        done, awake = state
        for node, (role, after) in nodes.items():
            if node in done or not done.issuperset(after):
                continue
            following, cost = (done | {node}, role), best[state] + (role != awake)
            if cost < best.get(following, 10**9):
                best[following] = cost
                # A step that wakes nobody is looked at first.
                (waiting.appendleft if role == awake else waiting.append)(following)
    return min(cost for (done, _), cost in best.items() if len(done) == len(nodes))


def moves(mesh: FakeMesh) -> list[str]:
    return [event for event in mesh.log if event.endswith((".Sleep", ".Wake"))]


def check_one_awake(log: list[str]) -> None:
    """At most one role is awake, once all are initialised, and only that one is called."""
    awake: set[str] = set()
    for event in log:
        service, _, what = event.partition(".")
        if what == "Wake":
            awake.add(service)
        elif what == "Sleep" or what == "Initialize ends":
            # A role that is initialised is awake until it is told to sleep, right after.
            awake.discard(service)
        elif not what.startswith("Initialize"):
            assert awake == {service}, (event, awake)
        assert len(awake) <= 1


async def test_colocated_ppo_switches_as_rarely_as_any_order_could(tmp_path: Path) -> None:
    steps = 2
    async with fake_mesh() as mesh:
        recipe = fake_recipe(pools=ASLEEP, steps=steps, evaluation=NO_EVALUATION)
        await make_run(mesh, tmp_path, recipe, MemoryStateStore()).execute()
        assert mesh.roles["actor"].weight == expected_weight(steps)
    check_one_awake(mesh.log)
    trained = mesh.log.index("critic.SaveCheckpoint begins")
    wakes = [event for event in mesh.log[:trained] if event.endswith(".Wake")]
    assert len(wakes) == fewest_switches(steps) == 6 * steps
    # Who is awake at the end saves first, and the actor is woken once for checkpoint and export.
    after = [event for event in mesh.log[trained:] if event.endswith((".Sleep", ".Wake"))]
    assert after == ["critic.Sleep", "actor.Wake"]
    records = read_lines(tmp_path / "metrics.jsonl")
    for record in records:
        assert record["time/wake"] > 0
        assert record["time/sleep"] > 0
    graph = read_lines(tmp_path / "dataflow.jsonl")[0]["nodes"]
    assert [n["phases"].keys() & {"sleep", "wake"} for n in graph][:2] == [
        {"wake"}, {"sleep", "wake"},
    ]  # fmt: skip


async def test_roles_that_stay_are_not_told_to_move(tmp_path: Path) -> None:
    pools = {
        "a": {"roles": ["actor"], "sleep": "never"},
        "b": {"roles": ["critic", "reference", "reward"]},
    }
    async with fake_mesh() as mesh:
        recipe = fake_recipe(pools=pools, steps=1, evaluation=NO_EVALUATION)
        await make_run(mesh, tmp_path, recipe, MemoryStateStore()).execute()
    assert moves(mesh) == []
    (record,) = read_lines(tmp_path / "metrics.jsonl")
    assert "time/wake" not in record


async def test_a_role_that_sleeps_alone_is_woken_once(tmp_path: Path) -> None:
    pools = {**split_pools(PPO_ROLES), "actor": {"roles": ["actor"], "sleep": "always"}}
    async with fake_mesh() as mesh:
        recipe = fake_recipe(pools=pools, steps=2, evaluation=NO_EVALUATION)
        await make_run(mesh, tmp_path, recipe, MemoryStateStore()).execute()
    assert moves(mesh) == ["actor.Sleep", "actor.Wake"]


async def test_rollout_services_that_sleep_are_each_woken(tmp_path: Path) -> None:
    roles = (*PPO_ROLES, "rollout")
    pools = {**split_pools(roles), "rollout": {"roles": ["rollout"], "sleep": "always"}}
    async with fake_mesh(roles, replicas=2) as mesh:
        recipe = fake_recipe(
            roles=roles, pools=pools, services={"rollout": {"replicas": 2}}, steps=2,
            evaluation=NO_EVALUATION,
        )  # fmt: skip
        await make_run(mesh, tmp_path, recipe, MemoryStateStore()).execute()
    assert sorted(moves(mesh)) == [
        f"rollout-{index}.{move}" for index in (0, 1) for move in ("Sleep", "Wake")
    ]


@given(
    seed=st.integers(0, 2**32),
    block_rows=st.sampled_from([0, 2]),
    every_steps=st.integers(0, 2),
    is_mixed=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_one_role_of_a_pool_is_awake_whatever_the_timing(
    seed: int, block_rows: int, every_steps: int, is_mixed: bool
) -> None:
    mixed = {
        "a": {"roles": ["actor", "reward"], "sleep": "always"},
        "b": {"roles": ["critic", "reference"], "sleep": "always"},
    }
    pools = mixed if is_mixed else ASLEEP

    async def work() -> FakeMesh:
        draw = random.Random(seed)
        recipe = fake_recipe(
            pools=pools, steps=3, evaluation={"num_prompts": 2, "every_steps": every_steps},
            sampler={"type": "sync", "block_rows": block_rows}, checkpoint={"every_steps": 1},
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as directory:
            run = InProcessRun(recipe, Path(directory), delay=lambda service, method: draw.random())
            await run.execute()
        assert run.loop.step == 3
        return run.mesh

    mesh = run_jumping(work())
    for pool in pools.values():
        # The fakes refuse a call while they sleep: that none did is the other half of the claim.
        check_one_awake([e for e in mesh.log if e.partition(".")[0] in pool["roles"]])


@pytest.mark.parametrize(
    ("service", "method", "message"),
    [
        (
            "critic",
            "Wake",
            r"step 1: critic\.wake failed on critic rank 0 \[OUT_OF_MEMORY\]: 2 GiB",
        ),
        ("actor", "Sleep", r"actor\.sleep failed on actor rank 0 \[OUT_OF_MEMORY\]: 2 GiB"),
    ],
)
async def test_a_move_that_fails_ends_the_run_and_says_which(
    service: str, method: str, message: str, tmp_path: Path
) -> None:
    async with fake_mesh() as mesh:
        mesh.roles[service].failures[method] = PreconditionError(
            "2 GiB are not free", reason="OUT_OF_MEMORY"
        )
        recipe = fake_recipe(pools=ASLEEP, steps=1, evaluation=NO_EVALUATION)
        with pytest.raises(RunError, match=message) as failed:
            await make_run(mesh, tmp_path, recipe, MemoryStateStore()).execute()
        assert mesh.of("critic.ComputeValues") == []
    assert isinstance(failed.value, NodeFailedError)


@pytest.mark.parametrize(("method", "work"), [("SaveCheckpoint", "critic"), ("Export", "actor")])
async def test_what_is_saved_is_awake(method: str, work: str, tmp_path: Path) -> None:
    async with fake_mesh() as mesh:
        recipe = fake_recipe(pools=ASLEEP, steps=1, evaluation=NO_EVALUATION)
        await make_run(mesh, tmp_path, recipe, MemoryStateStore()).execute()
    assert [call.state for call in mesh.calls if call.method == method and call.role == work] == [
        "done"
    ]
    assert (tmp_path / "model/weight.json").is_file()
