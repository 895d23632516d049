"""The table of facts: it is whole, and nothing that is given is dropped in silence."""

from __future__ import annotations

import fnmatch
from typing import Any, get_args

import pytest
from support.imports import PREFIX, of_trl, of_verl, recipe_of

from rolemesh.coordinator.imports.draft import Draft
from rolemesh.coordinator.imports.recipe import TOPICS, Imported, imported, table_fields
from rolemesh.coordinator.imports.source import Source, SystemName, known
from rolemesh.coordinator.imports.tables.facts import unsupported
from rolemesh.coordinator.imports.values.models import place
from rolemesh.coordinator.imports.values.trl_trainers import TRAINERS
from rolemesh.coordinator.recipe.loading import read_recipe

SYSTEMS: tuple[SystemName, ...] = get_args(SystemName)
START: dict[SystemName, dict[str, Any]] = {
    "verl": {"algorithm.adv_estimator": "grpo", f"{PREFIX}.rollout.n": 4},
    "openrlhf": {"algo.advantage.estimator": "group_norm", "rollout.n_samples_per_prompt": 4},
    "trl": {},
}
STRANGE = "strange-value-7"


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_nothing_but_defaults_says_is_a_recipe(system: SystemName) -> None:
    made = imported(Source(system, START[system]), "a test")
    read_recipe(made.text, "the import")
    assert made.lost == {}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_trainer_of_trl_has_defaults_that_are_a_recipe(trainer: str) -> None:
    made = of_trl({"trainer": trainer})
    recipe_of(made)
    assert made.lost == {}


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_field_of_a_default_is_read_or_in_the_table(system: SystemName) -> None:
    fields = table_fields(system)
    # Trainers of other settings than these read them.
    beside = {"train.async_queue_size", "data.max_samples", "algo.advantage.is_correction_mode"}
    source = Source(system, START[system])
    imported(source, "a test")
    unread = {name for name in known(system).defaults if not source.was_read(name)}
    assert unread - fields - beside == set()


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_earlier_name_leads_to_a_known_one(system: SystemName) -> None:
    facts = known(system)
    named = table_fields(system) | set(facts.defaults)
    source = Source(system, START[system])
    imported(source, "a test")
    for old, new in facts.renamed.items():
        if old.endswith("*"):
            continue
        is_ruled = any(fnmatch.fnmatch(new, rule.pattern) for rule in facts.rules)
        assert new in named or is_ruled or source.was_read(new), (old, new)


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_field_without_a_counterpart_is_dropped_in_silence(system: SystemName) -> None:
    names = [rule.pattern.replace("*", "some.x") for rule in known(system).rules]
    taken = table_fields(system) | set(known(system).defaults)
    given = {name: STRANGE for name in names if name not in taken and name != "trainer"}
    made = imported(Source(system, {**START[system], **given}), "a test")
    assert [name for name in given if name not in made.text] == []
    read_recipe(made.text, "the import")


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_row_of_the_page_has_a_cell_for_each_system(system: SystemName) -> None:
    for topic in TOPICS:
        lines = topic.table().splitlines()
        assert {line.count("|") for line in lines} == {6}
        assert len(lines) > 5


def test_a_key_that_an_algorithm_lacks_is_known_to_be_none() -> None:
    draft = Draft()
    draft.put("algorithm.type", "ppo")
    assert unsupported(draft, "algorithm.value_loss.clip") == ""
    assert "has no key overlong" in unsupported(draft, "algorithm.advantages.overlong")
    draft.put("algorithm.type", "gspo")
    assert "has no key dual_clip" in unsupported(draft, "algorithm.policy_loss.dual_clip")
    assert "no critic" in unsupported(draft, "critic.optimizer.learning_rate")


def test_names_at_the_hub_are_told_from_paths() -> None:
    assert place("Qwen/Qwen3-8B") == "hf:Qwen/Qwen3-8B"
    assert place("/models/a") == "/models/a"
    assert place("./models/a") == "./models/a"
    assert not place("~/a").startswith("~")


@pytest.mark.parametrize(
    ("made", "kind", "said"),
    [
        (of_trl({"optim": "muon"}), "muon", ""),
        (of_trl({"optim": "adamw_bnb_8bit"}), "adamw", "no moments in 8 bits here"),
        (of_trl({"optim": "lion_32bit"}), "adamw", "AdamW and Muon are the optimizers here"),
        (of_verl("actor_rollout_ref.actor.optim.optimizer=Muon"), "muon", ""),
        (
            of_verl("actor_rollout_ref.actor.optim.optimizer=AdamW8bit"),
            "adamw",
            "no moments in 8 bits here",
        ),
    ],
)
def test_optimizers_by_the_names_of_others(made: Imported, kind: str, said: str) -> None:
    assert recipe_of(made).actor.optimizer.type == kind
    assert said in " ".join(made.lost.values())
