"""An algorithm of the user's own, from a file or from another package."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fake_in_process import InProcessRun, run_jumping
from support.fake_recipes import fake_recipe

from rolemesh.coordinator.algorithms.registry import (
    ENTRY_POINTS,
    algorithm_of,
    roles_in,
    unused_roles,
)
from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.recipe.algorithm.algorithms import CustomSpec
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.engine.specs import SamplingSpec

PAGE = '''
def mine(prompts, actor, reward, reference=None):
    """GRPO twice a step."""
    rollouts = actor.generate(prompts)
    rollouts |= reward.compute_reward(rollouts)
    rollouts |= actor.compute_advantages(rollouts, "grpo")
    actor.update(rollouts)
    actor.update(rollouts)
'''
PARTS = {"advantages": {"type": "grpo"}, "policy_loss": {"type": "ppo_policy"}}


def recipe_for(function: str, roles: tuple[str, ...] = ("actor", "reward"), **parts: Any) -> Recipe:
    algorithm = {
        "type": "custom",
        "function": function,
        "sampling": {"samples_per_prompt": 2},
        "mini_batch_rows": 4,
        **(parts or PARTS),
    }
    return fake_recipe(roles=roles, algorithm=algorithm, steps=2, evaluation={"num_prompts": 0})


def run_of(recipe: Recipe, directory: Path) -> InProcessRun:
    async def work() -> InProcessRun:
        run = InProcessRun(recipe, directory)
        await run.execute()
        return run

    return run_jumping(work())


def write_page(tmp_path: Path, text: str = PAGE) -> str:
    page = tmp_path / "page.py"
    page.write_text(text)
    return str(page)


def test_a_function_of_a_file_is_run(tmp_path: Path) -> None:
    run = run_of(recipe_for(f"{write_page(tmp_path)}:mine"), tmp_path)
    assert run.mesh.methods(1) == [
        "actor.Generate",
        "reward.ComputeReward",
        "actor.ComputeAdvantages",
        "actor.Update",
        "actor.Update",
    ]
    # Both updates of both steps, two optimizer steps each.
    assert run.mesh.roles["actor"].policy_version == 2 * 2 * 2


def test_a_function_of_another_package_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_page(tmp_path, PAGE)
    monkeypatch.syspath_prepend(tmp_path)
    asked = []

    def entry_points(**wanted: str) -> list[importlib.metadata.EntryPoint]:
        asked.append(wanted)
        return [importlib.metadata.EntryPoint("their-grpo", "page:mine", ENTRY_POINTS)]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    recipe = recipe_for("their-grpo")
    run = run_of(recipe, tmp_path)
    assert asked[0] == {"group": "rolemesh.algorithms", "name": "their-grpo"}
    assert run.loop.step == 2
    monkeypatch.delitem(sys.modules, "page")


def test_an_optional_role_is_used_where_the_recipe_has_it(tmp_path: Path) -> None:
    function = f"{write_page(tmp_path)}:mine"
    assert roles_in(recipe_for(function)) == ("actor", "reward")
    assert roles_in(recipe_for(function, ("actor", "reference", "reward"))) == (
        "actor",
        "reward",
        "reference",
    )


def test_an_entry_point_that_nobody_offers_is_named() -> None:
    with pytest.raises(ValueError, match=r"'no_such': there is no such function; .*entry point"):
        algorithm_of(recipe_for("no_such"))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"algorithm\.function is '/nowhere/page\.py:mine'.*is no file"
    ):
        algorithm_of(recipe_for("/nowhere/page.py:mine"))


@pytest.mark.parametrize("name", ["theirs", "PARTS"])
def test_a_name_that_is_no_function_of_the_file_is_refused(name: str, tmp_path: Path) -> None:
    page = write_page(tmp_path, PAGE + "\nPARTS = 3\n")
    with pytest.raises(ValueError, match=r"no such function|has no 'theirs': name another"):
        algorithm_of(recipe_for(f"{page}:{name}"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def mine(:\n", "SyntaxError"),
        ("import no_such_package_of_theirs\n", "ModuleNotFoundError"),
        ("raise RuntimeError('not today')\n", "RuntimeError: not today"),
    ],
    ids=["syntax", "import", "error"],
)
def test_a_file_that_cannot_be_loaded_says_why(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"algorithm\.function is .*page\.py.*{reason}"):
        algorithm_of(recipe_for(f"{write_page(tmp_path, text)}:mine"))


def test_an_entry_point_that_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = importlib.metadata.EntryPoint("broken", "no_such_package_of_theirs:mine", ENTRY_POINTS)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [broken])
    with pytest.raises(ValueError, match=r"'broken' cannot be loaded: ModuleNotFoundError"):
        algorithm_of(recipe_for("broken"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("actor.update(actor.generate(prompts))", "no node produces the column 'advantages'"),
        (
            "r = actor.generate(prompts); actor.compute_advantages(r, 'grpo')",
            "no node produces the column 'rewards'",
        ),
        (
            "r = actor.generate(prompts); r |= reward.compute_reward(r); "
            "actor.compute_advantages(r, 'gae')",
            r"asks for the estimator 'gae', but algorithm\.advantages\.type is 'grpo'",
        ),
        (
            "r = actor.generate(prompts); r |= reward.compute_reward(r); "
            "actor.compute_advantages(r, 'grpo', baseline=r)",
            "estimator 'grpo' compares with no experience: call it without baseline",
        ),
        ("reward.update(actor.generate(prompts))", r"algorithm\.reward_loss is not given"),
        (
            "actor.generate_selected(prompts, judge=reward.compute_reward); actor._select",
            None,
        ),
    ],
    ids=["column of the loss", "column of the estimator", "estimator", "baseline", "part", "rule"],
)  # fmt: skip
def test_what_an_algorithm_asks_for_and_nobody_has_is_named(
    body: str, message: str | None, tmp_path: Path
) -> None:
    page = write_page(tmp_path, f"def mine(prompts, actor, reward):\n    {body}\n")
    recipe = recipe_for(f"{page}:mine")
    message = message or r"algorithm\.selection is not given, but the algorithm asks for it"
    with pytest.raises(RunError, match=message):
        run_of(recipe, tmp_path / "run")


def test_experience_kept_from_another_step_cannot_be_joined(tmp_path: Path) -> None:
    text = """
kept = []
def mine(prompts, actor, reward):
    kept.append(actor.generate(prompts))
    kept[0] | kept[-1]
"""
    with pytest.raises(RunError, match=r"'mine' cannot be run: .* made in two different steps"):
        run_of(recipe_for(f"{write_page(tmp_path, text)}:mine"), tmp_path / "run")


def test_roles_without_use_are_named() -> None:
    recipe = fake_recipe(
        roles=("actor", "critic", "reward", "cost"),
        algorithm={"type": "grpo", "sampling": {"samples_per_prompt": 2}},
    )
    assert unused_roles(recipe) == ("critic", "cost")


def test_a_role_that_the_recipe_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="algorithm 'ppo' needs the role 'critic', but the recipe"):
        roles_in(fake_recipe(roles=("actor", "reference", "reward")))


def test_an_update_keeps_together_what_a_custom_algorithm_says() -> None:
    pairs = CustomSpec(function="mine.py:mine", unit_rows=2, mini_batch_rows=6)
    groups = CustomSpec(
        function="mine.py:mine", mini_batch_rows=6, sampling=SamplingSpec(samples_per_prompt=3)
    )
    assert (pairs.rows_per_unit, groups.rows_per_unit) == (2, 3)
    with pytest.raises(ValueError, match="mini_batch_rows is 64 and unit_rows is 3"):
        CustomSpec(function="mine.py:mine", unit_rows=3)
