"""Runs whose weights go by exchanges: the same steps, and a fetch wherever one cannot be used."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_in_process import InProcessRun, run_jumping
from support.fake_models import expected_weight
from support.fake_recipes import PPO_ROLES, fake_recipe, split_pools
from support.fake_roles import FakeRole, fake_mesh
from support.fake_runs import kill_during, make_run

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.folders.summary import RunSummary
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState
from rolemesh.rpc.errors import UnavailableError

ROLES = (*PPO_ROLES, "rollout")
STEPS = 4
SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {"type": "sync"},
    "ahead": {"type": "one_step_ahead"},
    "async": {"type": "async", "max_staleness": 2},
    "whole": {"type": "async", "max_staleness": 1, "partial_rollouts": False},
}


def recipe_with(schedule: str, weights: str = "nccl", **changes: Any) -> Recipe:
    usual: dict[str, Any] = {
        "pools": split_pools(ROLES),
        "services": {"rollout": {"replicas": 2}},
        "steps": STEPS,
        "evaluation": {"num_prompts": 0},
    }
    sampler = {**SCHEDULES[schedule], "weights": weights}
    return fake_recipe(roles=ROLES, sampler=sampler, **{**usual, **changes})


def made(recipe: Recipe, breaking: tuple[str, ...] = (), **fakes: Any) -> InProcessRun:
    """The run, from beginning to end."""

    async def work() -> InProcessRun:
        with tempfile.TemporaryDirectory() as directory:
            run = InProcessRun(recipe, Path(directory), **{"has_exchanges": True, **fakes})
            run.mesh.breaking.update(breaking)
            await run.execute()
        assert run.left_running() == []
        return run

    return run_jumping(work())


def ways(run: InProcessRun) -> Counter[str]:
    """How often weights were brought by an exchange, and how often fetched."""
    requests: list[Any] = [call.request for call in run.mesh.of("rollout.UpdateWeights")]
    return Counter("exchange" if request.exchange else "fetch" for request in requests)


def meetings(run: InProcessRun) -> Counter[str]:
    """Calls of a kind, by service."""
    kinds = ("OfferExchange", "JoinExchange", "leave")
    return Counter(f"{c.service} {c.method}" for c in run.mesh.calls if c.method in kinds)


def learnt(run: InProcessRun) -> list[Any]:
    """What does not depend on timing: what each step trained on, and what became of it."""
    updates: list[Any] = run.mesh.of("actor.Update")
    tokens = [run.mesh.values(one.request.experience, "tokens") for one in updates]
    return [*tokens, run.mesh.roles["actor"].weight]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_weights_of_all_steps_go_by_one_exchange_for_each_service(schedule: str) -> None:
    run = made(recipe_with(schedule))
    assert run.mesh.roles["actor"].weight == expected_weight(STEPS)
    assert set(ways(run)) == {"exchange"}
    assert len(run.mesh.of("rollout.UpdateWeights")) >= 2 * (STEPS - 1)
    once = {f"rollout-{i} {kind}": 1 for i in (0, 1) for kind in ("OfferExchange", "JoinExchange")}
    assert meetings(run) == {**once, "actor OfferExchange": 2, "actor JoinExchange": 2}
    told = [f"weights go from the actor to rollout-{index} by NCCL" for index in (0, 1)]
    assert [text for text in run.observer.events if text.startswith("weights go")] == told


@pytest.mark.parametrize("schedule", ["sync", "ahead"])
def test_a_run_learns_the_same_either_way(schedule: str) -> None:
    by_exchange = made(recipe_with(schedule))
    fetched = made(recipe_with(schedule, "grpc"))
    assert set(ways(fetched)) == {"fetch"}
    assert meetings(fetched) == {}
    assert not fetched.mesh.of("actor.SendWeights")
    assert learnt(by_exchange) == learnt(fetched)


def test_a_take_that_is_repeated_names_the_same_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service would refuse another request with the same key."""
    serve, asked = FakeRole.UpdateWeights, []

    async def breaks_once(self: FakeRole, request: Any, context: Any) -> AsyncIterator[Any]:
        asked.append(request)
        if len(asked) == 1:
            broken = UnavailableError("the connection broke")
            broken.is_broken_connection = True
            raise broken
        async for response in serve(self, request, context):
            yield response

    monkeypatch.setattr(FakeRole, "UpdateWeights", breaks_once)
    run = made(recipe_with("sync", services={"rollout": {"replicas": 1}}))
    assert run.mesh.roles["actor"].weight == expected_weight(STEPS)
    assert asked[0] == asked[1]
    assert asked[0].exchange


@given(schedule=st.sampled_from(sorted(SCHEDULES)), seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_whatever_the_timing_every_step_is_made(schedule: str, seed: int) -> None:
    """A sender and a taker that do not find each other cost a fetch, never the step."""
    draw = random.Random(seed)

    def delay(service: str, method: str) -> float:
        return draw.choice((0.0, 0.1, 1.0, 10.0)) * draw.random()

    run = made(recipe_with(schedule), delay=delay)
    assert run.mesh.roles["actor"].weight == expected_weight(STEPS)
    for name, exchange in run.mesh.exchanges.items():
        assert len(exchange.joined) == 2, name
        assert exchange.barrier.n_waiting == 0, name


def test_a_sampler_that_is_busy_for_long_fetches_its_weights() -> None:
    """Its own pool is not free when the actor is: neither waits for the other."""

    def delay(service: str, method: str) -> float:
        return 60.0 if (service, method) == ("rollout-1", "Generate") else 0.0

    slow = made(recipe_with("whole"), delay=delay)
    assert slow.mesh.roles["actor"].weight == expected_weight(STEPS)
    by_service: dict[str, set[bool]] = {}
    for call in slow.mesh.of("rollout.UpdateWeights"):
        request: Any = call.request
        by_service.setdefault(call.service, set()).add(bool(request.exchange))
    assert True in by_service["rollout-0"]
    assert False in by_service["rollout-1"]


@pytest.mark.parametrize("unable", ["actor", "rollout-1"])
def test_a_service_that_cannot_fetches_and_is_asked_once(unable: str) -> None:
    run = made(recipe_with("sync"), unable=frozenset({unable}))
    assert run.mesh.roles["actor"].weight == expected_weight(STEPS)
    expected = {"fetch": 2 * STEPS} if unable == "actor" else {"fetch": STEPS, "exchange": STEPS}
    assert ways(run) == expected
    refused = [text for text in run.observer.events if "fetches weights by gRPC" in text]
    assert len(refused) == (2 if unable == "actor" else 1)
    assert all("no libnccl" in text for text in refused)
    assert meetings(run)["rollout-1 OfferExchange"] == 1
    # What was offered by then takes memory.
    assert meetings(run)["rollout-1 leave"] == 1


def test_services_that_know_no_exchange_fetch() -> None:
    run = made(recipe_with("sync"), has_exchanges=False)
    assert run.mesh.roles["actor"].weight == expected_weight(STEPS)
    assert ways(run) == {"fetch": 2 * STEPS}
    assert meetings(run) == {}
    told = [text for text in run.observer.events if "fetches weights" in text]
    assert all("actor has no rolemesh.v1.ExchangeService" in text for text in told)
    assert len(told) == 2


def test_an_exchange_that_fails_is_left_and_not_used_again() -> None:
    run = made(recipe_with("sync"), breaking=("rollout-0/1/1",))
    assert run.mesh.roles["actor"].weight == expected_weight(STEPS)
    # The step of the failure has its weights by a fetch within the same call.
    assert ways(run) == {"exchange": STEPS + 1, "fetch": STEPS - 1}
    assert meetings(run)["rollout-0 leave"] == meetings(run)["actor leave"] == 1
    assert run.mesh.exchanges["rollout-0/1/1"].joined == set()
    (told,) = [text for text in run.observer.events if "fetches weights" in text]
    assert told == "rollout-0 fetches weights by gRPC, not by an exchange: rank 1 vanished"


def test_roles_that_sleep_meet_anew_each_time() -> None:
    pools = {
        "train": {"roles": [role for role in ROLES if role != "rollout"], "sleep": "always"},
        "sample": {"roles": ["rollout"]},
    }
    run = made(recipe_with("sync", pools=pools))
    assert run.mesh.roles["actor"].weight == expected_weight(STEPS)
    assert ways(run) == {"exchange": 2 * STEPS}
    assert meetings(run)["actor JoinExchange"] == 2 * STEPS


# --- over real connections --------------------------------------------------------------------


def check(summary: RunSummary, mesh: Any) -> None:
    assert summary.state is RunState.SUCCEEDED
    assert mesh.roles["actor"].weight == expected_weight(STEPS)
    assert mesh.restarted == ["rollout-0"]


@pytest.mark.parametrize("schedule", ["sync", "async"])
async def test_the_next_process_of_a_service_meets_anew(schedule: str, tmp_path: Path) -> None:
    """In the synchronous schedule while the step goes on, else in the next attempt."""
    recipe = recipe_with(
        schedule, recovery={"attempts": 3, "pause_s": 0.0}, evaluation={"num_prompts": 0}
    )
    async with fake_mesh(ROLES, replicas=2, has_cuts=True, has_exchanges=True) as mesh:
        run = make_run(mesh, tmp_path, recipe, MemoryStateStore(), restart=mesh.restart)
        run._loss_grace_s = 0.2
        check(await kill_during(run, mesh, "rollout-0", "Generate", "rollout-0", 2), mesh)
        joined = [
            call.request.exchange  # type: ignore[attr-defined]
            for call in mesh.calls
            if (call.service, call.method) == ("rollout-0", "JoinExchange")
        ]
        assert len(joined) == 2
        methods = [(call.service, call.method) for call in mesh.calls]
        restarted = len(methods) - methods[::-1].index(("rollout-0", "Initialize"))
        taken = [
            call.request.exchange  # type: ignore[attr-defined]
            for call in mesh.calls[restarted:]
            if (call.service, call.method) == ("rollout-0", "UpdateWeights")
        ]
        # Never that of the process before.
        assert set(taken) <= {"", joined[1]}
        assert taken[-1] == joined[1]


async def test_a_taker_that_dies_in_a_transfer_is_replaced(tmp_path: Path) -> None:
    recipe = recipe_with("sync", recovery={"attempts": 3, "pause_s": 0.0})
    async with fake_mesh(ROLES, replicas=2, has_cuts=True, has_exchanges=True) as mesh:
        run = make_run(mesh, tmp_path, recipe, MemoryStateStore(), restart=mesh.restart)
        run._loss_grace_s = 0.2
        check(await kill_during(run, mesh, "rollout-0", "UpdateWeights", "rollout-0", 2), mesh)
