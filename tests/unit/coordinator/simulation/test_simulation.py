"""Tests of simulated runs against closed forms, and of what losses cost them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from support.simulated import ROLES, SECONDS, ppo, simulated

from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.mapping.job.tasks import Timeline, step_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.checks.planning import plan_step
from rolemesh.coordinator.simulation.faults import Faults
from rolemesh.coordinator.simulation.run import Outcome


class _At(Faults):
    """Given processes that end at given times."""

    def __init__(self, *losses: tuple[float, str]) -> None:
        super().__init__(losses=len(losses))
        object.__setattr__(self, "given", losses)

    def loss_times(self) -> list[float]:
        return [at for at, _ in self.given]

    def victim(self, number: int, alive: Sequence[str]) -> str:
        assert self.given[number][1] in alive
        return str(self.given[number][1])


def predicted(
    recipe: Recipe, pools: Mapping[str, int], seconds: Mapping[str, float], ahead: tuple[str, ...]
) -> float:
    """Seconds of a step by the arithmetic of plans, which knows nothing of a coordinator."""
    step = step_of(asyncio.run(plan_step(recipe)), ahead=ahead)
    return Timeline(step, pools).period([seconds[task.name] for task in step.tasks])


def drawn(seed: int) -> dict[str, float]:
    """Seconds whose sums have no rounding."""
    generator = random.Random(seed)
    return {name: generator.randrange(1, 512) / 64 for name in SECONDS}


@pytest.mark.parametrize("seed", range(8))
def test_a_step_takes_the_critical_path_of_its_graph(seed: int) -> None:
    seconds, recipe = drawn(seed), ppo()
    outcome = simulated(recipe, seconds=seconds)
    wanted = predicted(recipe, {}, seconds, ())
    assert outcome.step_ends == tuple(wanted * step for step in range(1, 5))
    assert outcome.commits == (1, 2, 3, 4)


def test_roles_of_one_pool_take_the_sum_of_their_calls() -> None:
    seconds, recipe = drawn(0), ppo(pools={"all": {"roles": list(ROLES)}})
    outcome = simulated(recipe, seconds=seconds)
    of_these = [spent for name, spent in seconds.items() if name.split(".")[0] in ROLES]
    assert outcome.period == sum(of_these) - seconds["actor.publish_weights"]


def test_rollout_services_that_are_in_step_add_the_way_of_the_weights() -> None:
    recipe = ppo(samplers=1)
    outcome = simulated(recipe)
    assert outcome.period == predicted(recipe, {}, SECONDS, ()) == 8.5625
    assert outcome.staleness == 0


@pytest.mark.parametrize("generate_s", [1.0, 3.5, 4.0, 8.0])
def test_one_step_ahead_takes_the_longer_one_of_sampling_and_the_rest(generate_s: float) -> None:
    seconds = {**SECONDS, "rollout.generate": generate_s}
    recipe = ppo(samplers=1, sampler={"type": "one_step_ahead"}, steps=6)
    outcome = simulated(recipe, seconds=seconds)
    # The longest judge, advantages, the longer update, and the weights are laid out.
    rest = 0.75 + 0.0625 + 3.0 + 0.25
    # The first two steps find nothing that was sampled ahead at full length.
    assert outcome.step_seconds[1:] == [max(generate_s + 0.5, rest)] * 4
    # A plan has the actor lay weights out beside the judges, where it does so after its update.
    plan = predicted(recipe, {}, seconds, ("rollout",))
    assert plan == max(generate_s + 0.5, rest - 0.25)
    assert outcome.staleness == 1


@pytest.mark.parametrize("most", [1, 2, 3])
def test_async_stays_within_its_bound_and_reaches_it(most: int) -> None:
    sampler = {"type": "async", "max_staleness": most}
    quick = {**SECONDS, "rollout.generate": 0.5}
    outcome = simulated(ppo(samplers=2, sampler=sampler, steps=8), seconds=quick)
    assert outcome.staleness == most


def test_slow_services_take_as_much_longer() -> None:
    recipe, slow = ppo(), Faults(stragglers=1.0, slow_by=4.0)
    assert simulated(recipe, faults=slow).period == 4 * simulated(recipe).period
    some = simulated(ppo(steps=40), faults=Faults(stragglers=0.5, slow_by=4.0))
    # A step is as slow as if all were, or as fast as if none was, with a chance of 2 ** -39.
    assert 7.8125 < some.period < 4 * 7.8125


def test_a_lost_trained_role_costs_its_start_and_the_step_so_far() -> None:
    # The actor ends 1.25 s into the second step: its cut of the first one is what it goes on from.
    outcome = simulated(ppo(), faults=_At((7.8125 + 1.25, "actor")), start_s=16.0)
    assert outcome.commits == (1, 2, 3, 4)
    assert outcome.step_seconds == [1.25 + 16.0 + 7.8125, 7.8125, 7.8125]
    (recovery,) = outcome.recoveries
    assert (recovery.step, recovery.seconds, recovery.lost_steps) == (1, 16.0, 0)
    assert outcome.lost_s == 1.25


def test_a_lost_judge_is_replaced_while_the_step_goes_on() -> None:
    # 0.25 s into its call; the critic goes on, and only the log-probs are late.
    outcome = simulated(ppo(), faults=_At((7.8125 + 4.25, "reference")), start_s=16.0)
    late = 4.25 + 16.0 + 0.75 + 0.0625 + 3.0
    assert outcome.step_seconds == [late, 7.8125, 7.8125]
    assert outcome.lost_s == 0.25
    assert [found.lost_steps for found in outcome.recoveries] == [0]


def test_a_process_that_is_lost_while_another_one_starts_is_started_as_well() -> None:
    outcome = simulated(ppo(), faults=_At((9.0, "actor"), (10.0, "critic")), start_s=16.0)
    assert outcome.commits == (1, 2, 3, 4)
    # Side by side: the second one is there a second after the first one.
    assert [found.seconds for found in outcome.recoveries] == [17.0]


def test_a_run_that_may_not_recover_ends_with_the_loss() -> None:
    recipe = ppo()
    run = recipe.run.model_copy(
        update={"recovery": recipe.run.recovery.model_copy(update={"attempts": 0})}
    )
    with pytest.raises(RunError, match=r"actor \(actor:\d+\) was lost"):
        simulated(recipe.model_copy(update={"run": run}), faults=_At((9.0, "actor")))


@pytest.mark.parametrize("schedule", ["sync", "one_step_ahead", "async"])
def test_ten_losses_are_survived_by_every_schedule(schedule: str) -> None:
    outcome = check_losses(schedule, samplers=36, steps=6)
    assert check_losses(schedule, samplers=36, steps=6) == outcome


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("schedule", ["sync", "one_step_ahead", "async"])
def test_ten_losses_of_a_thousand_services_are_survived(schedule: str) -> None:
    check_losses(schedule, samplers=996, steps=4)


def test_each_of_many_services_may_be_lost_in_a_step_as_often_as_one_alone() -> None:
    recipe = ppo(samplers=12, steps=2, recovery={"attempts": 2, "pause_s": 1.0})
    lost = [(0.5 + number / 8, f"rollout-{number}") for number in range(10)]
    outcome = simulated(recipe, faults=_At(*lost))
    assert outcome.commits == (1, 2)
    # Each for the first time, and so at once; some had their weights, and are given them again.
    assert {found.seconds for found in outcome.recoveries} == {16.0, 16.5}
    assert len(outcome.recoveries) == 10
    # One that is lost for the third time ends the run.
    again = [(0.5 + 40.0 * number, "rollout-3") for number in range(3)]
    slow = {**SECONDS, "rollout.generate": 200.0}
    with pytest.raises(RunError, match=r"rollout-3 \(rollout-3:\d+\) was lost"):
        simulated(recipe, seconds=slow, faults=_At(*again))


def check_losses(schedule: str, *, samplers: int, steps: int) -> Outcome:
    recipe = ppo(samplers=samplers, sampler={"type": schedule}, steps=steps)
    tokens = 2.0 * 2 * recipe.run.prompts_per_step
    faults = Faults(seed=5, losses=10, within_s=steps * 8.0)
    outcome = simulated(recipe, tokens=tokens, faults=faults)
    assert outcome.services == samplers + 4
    assert len(outcome.losses) == 10
    assert outcome.commits == tuple(range(1, steps + 1))
    assert len(outcome.step_ends) == steps
    return outcome


def test_each_sampler_waits_for_its_own_weights_alone() -> None:
    nodes = asyncio.run(plan_step(ppo(samplers=3)))
    takes = {node.service: node.node_id for node in nodes if node.method == "update_weights"}
    read = {node.service: node.inputs for node in nodes if node.method == "generate"}
    assert len(read) == 3
    assert read == {service: (node_id,) for service, node_id in takes.items()}


@pytest.mark.parametrize("schedule", ["one_step_ahead", "async"])
def test_what_calls_wait_for_does_not_grow_with_the_number_of_samplers(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(samplers: int) -> int:
        """Waits for answers of calls and for leases, in a run."""
        counted = 0
        before = asyncio.wait

        async def wait(futures: Iterable[asyncio.Future[Any]], **options: Any) -> Any:
            nonlocal counted
            known = list(futures)
            counted += len(known)
            return await before(known, **options)

        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "wait", wait)
            simulated(ppo(samplers=samplers, sampler={"type": schedule}, steps=4))
        return counted

    assert waits(32) < 2.5 * waits(16)


class _SlowInTurn(Faults):
    """In the second step one sampler takes four times as long, in the third one another."""

    def factor(self, service: str, step: int) -> float:
        return 4.0 if (service, step) in (("rollout-0", 2), ("rollout-1", 3)) else 1.0


def test_a_sampler_that_is_ahead_does_not_wait_for_slower_ones() -> None:
    recipe = ppo(samplers=3, sampler={"type": "one_step_ahead"}, steps=3)
    quick, slow = simulated(recipe), simulated(recipe, faults=_SlowInTurn())
    # Both are slow at the same time: the second one takes its weights and begins while the first
    # one still samples the step before. Together they cost less than one alone would.
    assert slow.step_ends[2] < quick.step_ends[2] + 3 * 4.0
