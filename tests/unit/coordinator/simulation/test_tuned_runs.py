"""Tests of runs that tune themselves in virtual time, beside a sweep of the whole space."""

from __future__ import annotations

import functools
import itertools
import statistics
from typing import Any

import pytest
from support.fake_recipes import GRPO, PPO, fake_recipe, split_pools
from support.simulated import ROLES, SECONDS, timing

from rolemesh.coordinator.mapping.job.work import Lengths
from rolemesh.coordinator.recipe.sections.tuning import key_of
from rolemesh.coordinator.simulation.run import Outcome, simulate
from rolemesh.coordinator.simulation.timing import RowLengths, Settings, Timing

PROMPTS, SAMPLES, PROMPT_TOKENS, MEAN_TOKENS = 16, 2, 10, 20
ROW_TOKENS = PROMPT_TOKENS + MEAN_TOKENS
TOGETHER = 8
"""Rows that are decoded together; the next one takes the first place that gets free."""
STEPS = 24

SLOW_JUDGES = {
    **SECONDS,
    "critic.compute_values": 1.5,
    "reference.compute_logprobs": 1.5,
    "reward.compute_reward": 2.0,
}


def pools(*sets: str) -> dict[str, Any]:
    """Pools as a recipe holds them, e.g. `pools("actor reward", "critic")`."""
    return {
        f"pool{number}": {"devices": ["cpu"], "roles": roles.split(), "sleep": "auto"}
        for number, roles in enumerate(sets)
    }


POOLS = [
    pools(" ".join(ROLES)),
    pools("actor critic", "reward reference"),
    pools(*ROLES),
]
BLOCKS = [0, 4, 8, 16]


def row_ends(lengths: Any) -> list[float]:
    free, ends = [0.0] * TOGETHER, []
    for length in lengths:
        place = min(range(TOGETHER), key=free.__getitem__)
        free[place] += 0.05 * length
        ends.append(free[place])
    return ends


def run(
    seed: int,
    placed: dict[str, Any],
    block_rows: int,
    *,
    tuning: dict[str, Any] | None = None,
    steps: int = STEPS,
    algorithm: dict[str, Any] = PPO,
    roles: tuple[str, ...] = ROLES,
    sampler: str = "sync",
) -> Outcome:
    recipe = fake_recipe(
        roles=roles,
        algorithm={**algorithm, "sampling": {"samples_per_prompt": SAMPLES}},
        sampler={"type": sampler, "block_rows": block_rows},
        pools=placed,
        evaluation={"num_prompts": 0},
        steps=steps,
        prompts_per_step=PROMPTS,
        recovery={"attempts": 20},
        tuning=tuning,
    )
    settings = Settings(
        timing=Timing(
            calls=timing(SLOW_JUDGES).calls,
            tokens=PROMPTS * SAMPLES * ROW_TOKENS,
            decoding={"actor": row_ends, "rollout": row_ends},
        ),
        lengths=RowLengths(Lengths.spread(MEAN_TOKENS, 64), seed),
        prompt_tokens=PROMPT_TOKENS,
        start_s=16.0,
    )
    return simulate(recipe, settings)


@functools.cache
def swept(seed: int) -> dict[str, float]:
    """The median step of every setting, without tuning."""
    return {
        key_of({"pools": placed, "schedule.sampler.block_rows": rows}): statistics.median(
            run(seed, placed, rows, steps=8).step_seconds
        )
        for placed, rows in itertools.product(POOLS, BLOCKS)
    }


SPACE = {"pools": POOLS, "schedule.sampler.block_rows": BLOCKS}


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_a_badly_set_recipe_comes_within_a_tenth_of_the_best_of_a_sweep_in_20_steps(
    seed: int,
) -> None:
    sweep = swept(seed)
    best = min(sweep.values())
    bad = {"pools": POOLS[0], "schedule.sampler.block_rows": 0}
    assert sweep[key_of(bad)] > 1.5 * best
    tuned = run(seed, POOLS[0], 0, tuning={"space": SPACE, "rounding": True})
    assert tuned.tuning is not None
    turns = tuned.tuning["turns"]
    assert turns[-1]["is_last"]
    assert turns[-1]["step"] <= 20
    assert sweep[key_of(tuned.tuning["settings"])] <= 1.1 * best
    # Each step once, in order, whatever was tried between them.
    assert tuned.commits == tuple(range(1, STEPS + 1))
    assert tuned.recoveries == ()


def test_steps_of_other_pools_take_what_was_expected() -> None:
    tuned = run(0, POOLS[0], 0, tuning={"space": {"pools": POOLS}})
    assert tuned.tuning is not None
    tried = [turn["verdict"] for turn in tuned.tuning["turns"] if turn["verdict"]]
    assert tried
    for verdict in tried:
        # What differs is how long the rows of the steps are.
        assert verdict["measured_s"] == pytest.approx(verdict["expected_s"], rel=0.2)


def test_rows_are_sampled_ahead_also_of_steps_between_which_settings_change() -> None:
    roles = ("actor", "reference", "reward", "rollout")
    apart = [split_pools(roles), pools("actor", "reference reward", "rollout")]
    together = pools("actor reference reward", "rollout")
    common = {"algorithm": GRPO, "roles": roles, "sampler": "one_step_ahead"}
    tuned = run(1, together, 0, tuning={"space": {"pools": apart}}, **common)  # type: ignore[arg-type]
    plain = run(1, together, 0, **common)  # type: ignore[arg-type]
    assert tuned.tuning is not None
    assert tuned.tuning["turns"][0]["step"] == 4
    assert tuned.commits == plain.commits
    assert (tuned.staleness, plain.staleness) == (1, 1)
