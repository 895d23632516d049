"""What each rule of run.health finds in records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rolemesh.coordinator.recipe.sections.health import HealthSpec
from rolemesh.coordinator.run.steps.health_rules import strikes_of, unjudged

LENGTH = "completion_length/mean"


def struck(
    health: dict[str, Any],
    records: Sequence[Mapping[str, float]],
    updated: Sequence[str] = ("actor",),
) -> list[str]:
    """Texts of the rules that strike about the last record."""
    spec = HealthSpec.model_validate(health)
    return [strike.text for strike in strikes_of(spec, records, "", updated)]


def each(name: str, *values: float) -> list[dict[str, float]]:
    return [{"step": float(step), name: value} for step, value in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("health", "name", "within", "beyond", "text"),
    [
        ({"kl": {"above": 2}}, "kl/mean", 2.0, 2.5, "kl/mean is 2.5, above 2"),
        ({"entropy": {"below": 0.01}}, "entropy", 0.01, 0.001, "entropy is 0.001, below 0.01"),
        ({"grad_norm": {"above": {"actor": 10}}}, "grad_norm", 10.0, 11.0,
         "the gradient norm of the actor is 11, above 10"),
        ({"grad_norm": {"above": {"critic": 10}}}, "critic/grad_norm", 10.0, 11.0,
         "the gradient norm of the critic is 11, above 10"),
        ({"length": {"truncated": 0.5}}, "finished_fraction", 0.5, 0.25,
         "a share of 0.75 of completions is cut, above 0.5"),
        ({"mismatch": {"above": 0.1}}, "sampler_logprob_diff_mean", 0.1, 0.2,
         "sampler_logprob_diff_mean is 0.2, above 0.1"),
    ],
)  # fmt: skip
def test_a_bound_is_the_last_value_that_is_well(
    health: dict[str, Any], name: str, within: float, beyond: float, text: str
) -> None:
    assert struck(health, each(name, within)) == []
    assert struck(health, each(name, beyond)) == [text]
    assert struck(health, each("another", beyond)) == []
    assert struck({}, each(name, beyond)) == []


def test_a_bare_gradient_norm_is_that_of_the_one_role_that_was_trained() -> None:
    health = {"grad_norm": {"above": {"actor": 10, "reward": 1}}}
    assert struck(health, each("grad_norm", 5.0)) == []
    assert len(struck(health, each("grad_norm", 5.0), ("reward",))) == 1


def test_all_of_so_many_steps_in_a_row_must_be_beyond_the_bound() -> None:
    health = {"kl": {"above": 2, "steps": 3}}
    assert struck(health, each("kl/mean", 3, 3)) == []
    assert struck(health, each("kl/mean", 3, 1, 3, 3)) == []
    (text,) = struck(health, each("kl/mean", 1, 3, 3, 4))
    assert text == "kl/mean is 4, above 2, 3 steps in a row"


def test_growth_of_length_is_over_the_first_steps_and_waits_for_them() -> None:
    health = {"length": {"growth": 2, "first_steps": 3}}
    assert struck(health, each(LENGTH, 9, 10, 99)) == []
    assert struck(health, each(LENGTH, 9, 10, 11, 40, 20)) == []
    (text,) = struck(health, each(LENGTH, 9, 10, 11, 12, 20.5))
    assert text == f"{LENGTH} is 20.5, above 2 times the 10 of the first steps"


def test_a_fall_of_the_reward_is_measured_by_the_steps_before() -> None:
    # Mean 0.5 and deviation 0.1: the first value is too old to count.
    before = (-9.0, 0.4, 0.5, 0.6)
    health = {"reward": {"fall": 2, "over": 3}}
    assert struck(health, each("reward/mean", *before[1:], 0.31)) == []
    assert struck(health, each("reward/mean", *before, 0.31)) == []
    assert struck(health, each("reward/mean", *before, 5.0)) == []
    assert struck(health, each("reward/mean", 0.4, 0.5, -3.0)) == []
    (text,) = struck(health, each("reward/mean", *before, 0.29))
    assert "reward/mean is 0.29, more than 2 standard deviations of 0.1 below the 0.5" in text
    # What fell already is not part of the measure.
    again = {"reward": {"fall": 2, "over": 3, "steps": 2}}
    assert len(struck(again, each("reward/mean", *before, -3.0, -3.0))) == 1


def test_a_reward_may_have_a_bound_of_its_own() -> None:
    health = {"reward": {"below": -0.5, "steps": 2}}
    assert struck(health, each("reward/mean", 1.0, -0.5, -0.6)) == []
    assert struck(health, each("reward/mean", 1.0, -0.6)) == []
    (text,) = struck(health, each("reward/mean", -0.7, -0.6))
    assert text == "reward/mean is -0.6, below -0.5, 2 steps in a row"


def test_a_reward_may_be_measured_by_the_best_before() -> None:
    health = {"reward": {"of_best": 0.5}}
    assert struck(health, each("reward/mean", 0.8, 0.1)) != []
    assert struck(health, each("reward/mean", 0.2, 0.8, 0.4)) == []
    (text,) = struck(health, each("reward/mean", 0.2, 0.8, 0.6, 0.39))
    assert text == "reward/mean is 0.39, below 0.5 of the best, 0.8"
    # No share of what is not above 0 can be kept.
    assert struck(health, each("reward/mean", -1.0, -9.0)) == []
    assert struck(health, each("reward/mean", 0.0, -9.0)) == []
    undone = each("reward/mean", 8.0, 1.0, 0.9)
    undone[0]["health/skipped"] = 1.0
    assert struck(health, undone) == []


def test_a_step_that_was_undone_is_no_measure_for_others() -> None:
    records = each(LENGTH, 10, 1000, 30)
    records[1]["health/skipped"] = 1.0
    assert len(struck({"length": {"growth": 2, "first_steps": 1}}, records)) == 1
    assert struck({"length": {"growth": 2, "first_steps": 2}}, records) == []


def test_a_rule_that_waits_for_what_is_not_reported_is_named() -> None:
    spec = HealthSpec.model_validate({"kl": {"above": 1}, "entropy": {"below": 1}})
    assert list(unjudged(spec, {"entropy": 2.0})) == [
        "run.health.kl cannot strike: the steps report no kl/mean"
    ]
