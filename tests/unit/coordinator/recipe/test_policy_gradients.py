"""The family of GRPO: a row is a section, in which a recipe may name other parts."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import TypeAdapter
from support.fake_recipes import fake_recipe

from rolemesh.coordinator.recipe.algorithm.algorithms import (
    AlgorithmSpec,
    PolicyGradientSpec,
    section_of,
)
from rolemesh.coordinator.recipe.algorithm.policy_gradients import POLICY_GRADIENTS, PolicyGradient
from rolemesh.coordinator.recipe.loading import dump_recipe, read_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.engine.specs import (
    CispoPolicyLossSpec,
    EstimatorSpec,
    GroupEstimatorSpec,
    LossSpec,
    PolicyTermsSpec,
    RemaxSpec,
    RlooSpec,
)

LENGTH = {"aggregation": "seq_sum_norm", "norm_length": 8}
"""Every policy loss takes it, and `dr_grpo` needs something."""
OWN = "python"
ADAPTER: TypeAdapter[Any] = TypeAdapter(AlgorithmSpec)


def types_in(union: Any, base: type) -> set[str]:
    members = get_args(get_args(union)[0])
    return {one.model_fields["type"].default for one in members if issubclass(one, base)} - {OWN}


LOSSES = types_in(LossSpec, PolicyTermsSpec)
GROUP_ESTIMATORS = types_in(EstimatorSpec, GroupEstimatorSpec)


def section(name: str, **parts: Any) -> Any:
    return ADAPTER.validate_python({"type": name, "policy_loss": LENGTH, **parts})


def taken(name: str, field: str, known: set[str]) -> set[str]:
    """Types that a section takes in a field, by the name alone."""
    found = set()
    for kind in known:
        try:
            given = section(name, **{field: kind})
        except ValueError:
            continue
        assert getattr(given, field).type == kind
        found.add(kind)
    return found


@pytest.mark.parametrize("name", [*POLICY_GRADIENTS, "dapo"])
def test_any_policy_loss_of_ours_fits_and_no_other_loss(name: str) -> None:
    every = types_in(LossSpec, object)
    assert {"ppo_policy", "gspo", "cispo", "reinforce"} <= LOSSES < every
    assert taken(name, "policy_loss", every) == LOSSES


@pytest.mark.parametrize("name", [*POLICY_GRADIENTS, "dapo"])
def test_estimators_of_the_same_kind_fit_and_no_others(name: str) -> None:
    every = types_in(EstimatorSpec, object)
    assert {"grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"} <= GROUP_ESTIMATORS
    fitting = taken(name, "advantages", every)
    if name in ("reinforce_plus_plus", "reinforce"):
        # It compares no rows, so that a recipe may sample one completion of a prompt.
        assert POLICY_GRADIENTS[name].advantages.type in fitting
        assert not fitting & {*GROUP_ESTIMATORS, "gae", "remax", "safe_rlhf"}
    else:
        assert fitting == GROUP_ESTIMATORS


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
def test_a_mapping_without_a_type_is_of_the_type_of_the_row(name: str) -> None:
    row = POLICY_GRADIENTS[name]
    given = section(name, policy_loss={**LENGTH, "kl_in_loss": 0.5}, advantages={"kl_form": "k2"})
    loss = row.policy_loss
    assert type(given.policy_loss) is (loss if isinstance(loss, type) else type(loss))
    assert (given.policy_loss.kl_in_loss, given.policy_loss.norm_length) == (0.5, 8)
    assert type(given.advantages) is type(row.advantages)
    assert given.advantages.kl_form == "k2"


def test_a_part_that_is_written_begins_with_the_defaults_of_its_type() -> None:
    row = ADAPTER.validate_python({"type": "grpo"})
    assert row.policy_loss.aggregation == "seq_mean_token_mean"
    assert section("grpo", policy_loss={"clip_high": 0.3}).policy_loss.aggregation == "token_mean"


def test_remax_takes_its_own_loss_without_a_type_as_well() -> None:
    given = section("remax", policy_loss={"kl_in_loss": 0.5})
    assert (given.policy_loss.type, given.policy_loss.kl_in_loss) == ("reinforce", 0.5)
    assert given.advantages == RemaxSpec()


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
def test_completions_are_as_many_as_the_row_says_and_enough_to_compare(name: str) -> None:
    row = POLICY_GRADIENTS[name]
    assert section(name).sampling.samples_per_prompt == row.samples_per_prompt
    single = {"samples_per_prompt": 1}
    if row.compares:
        with pytest.raises(ValueError, match="compares the completions of a prompt with each"):
            section(name, sampling=single)
    else:
        assert section(name, sampling=single, advantages="python:mine.py:f").advantages.type == OWN


def test_a_row_is_all_that_a_new_algorithm_needs() -> None:
    row = PolicyGradient("Tried here.", RlooSpec(), CispoPolicyLossSpec(), 4)
    made = section_of("tried_here", row)
    assert (made.__name__, made.__doc__) == ("TriedHereAlgorithmSpec", row.paper)
    assert issubclass(made, PolicyGradientSpec)
    plain = made.model_validate({"type": "tried_here"})
    assert (plain.type, plain.advantages, plain.policy_loss) == (
        "tried_here", RlooSpec(), CispoPolicyLossSpec(),
    )  # fmt: skip
    assert (plain.sampling.samples_per_prompt, plain.rows_per_unit) == (4, 4)
    # Whatever the base of sampled algorithms says holds for it, e.g. one temperature.
    sampling = {"samples_per_prompt": 2, "temperature": 0.5}
    warm = made.model_validate({"type": "tried_here", "sampling": sampling})
    assert warm.policy_loss.temperature == 0.5


def test_a_recipe_with_other_parts_survives_being_written_and_read() -> None:
    algorithm = {
        "type": "grpo",
        "sampling": {"samples_per_prompt": 2},
        "advantages": "rloo",
        "policy_loss": {"type": "gspo", "clip_high": 0.1},
    }
    recipe = fake_recipe(roles=("actor", "reward"), algorithm=algorithm)
    assert isinstance(recipe, Recipe)
    assert read_recipe(dump_recipe(recipe), "written") == recipe
