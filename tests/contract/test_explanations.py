"""Tests that no key, metric, reason or command is without an explanation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from rolemesh.coordinator.api.credentials import UnauthenticatedError
from rolemesh.coordinator.api.http.problems import REASON_BY_STATUS
from rolemesh.coordinator.explained.commented import commented_recipe
from rolemesh.coordinator.explained.keys import keys_of, text_of
from rolemesh.coordinator.explained.metrics import METRICS, explanation
from rolemesh.coordinator.recipe.loading import load_recipe, read_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.rpc.errors import ERROR_CLASSES
from rolemesh.rpc.reasons import REASONS
from rolemesh.services.runtime.server.errors import CATALOGUE

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = sorted((REPOSITORY / "recipes").glob("*.yaml"))


def all_sections() -> Iterator[type[BaseModel]]:
    found: list[type[BaseModel]] = [Recipe]
    for section in found:
        yield section
        for key in keys_of(section):
            found.extend(inner for inner in key.sections if inner not in found)


def test_every_key_of_a_recipe_is_explained() -> None:
    silent = [
        f"{section.__name__}.{key.name}"
        for section in all_sections()
        for key in keys_of(section)
        if not key.text
    ]
    assert silent == [], "give each field a docstring below it"


def test_every_section_is_explained() -> None:
    assert [section.__name__ for section in all_sections() if not text_of(section)] == []


def test_every_number_of_a_recipe_has_a_unit() -> None:
    bare = [
        f"{section.__name__}.{key.name}"
        for section in all_sections()
        for key in keys_of(section)
        if "number" in key.values and not key.unit
    ]
    assert bare == [], "add their units in coordinator/explained/units.py"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_printed_recipe_is_the_recipe(recipe: Path) -> None:
    loaded = load_recipe([recipe])
    printed = commented_recipe(loaded)
    assert read_recipe(printed, "printed") == loaded


def test_a_printed_recipe_has_explanation_unit_and_default_above_each_key() -> None:
    lines = commented_recipe(load_recipe([RECIPES[0]])).splitlines()
    keep = next(index for index, line in enumerate(lines) if line.startswith("    keep:"))
    assert lines[keep - 2].startswith("    # Newest checkpoints kept")
    assert lines[keep - 1] == "    # [checkpoints; default 2]"


def sent_reasons() -> set[str]:
    """Reasons that the code can send: literals in it, and those of the tables."""
    given = re.compile(r'reason="([A-Z_]+)"')
    found = {entry.reason for entry in CATALOGUE.values()}
    found |= {error.default_reason for error in (*ERROR_CLASSES, UnauthenticatedError)}
    found |= set(REASON_BY_STATUS.values())
    for folder in ("coordinator", "engine", "services", "src/rolemesh/rpc"):
        for file in (REPOSITORY / folder).rglob("*.py"):
            found |= set(given.findall(file.read_text()))
    return found


def test_every_reason_is_explained_and_no_other() -> None:
    assert set(REASONS) == sent_reasons()
    assert list(REASONS) == sorted(REASONS)
    assert all(reason.meaning and reason.remedy for reason in REASONS.values())


# Keys of metrics that the engine and the services give: `metrics["..."] = ` and tables of them.
MAKERS = (
    "engine/algorithms/**/*.py", "engine/rollout/sampling.py", "services/reward/outside/counts.py",
    "engine/rewards/sources.py", "coordinator/run/results/metrics.py",
    "coordinator/run/steps/training.py", "coordinator/run/steps/health.py",
    "coordinator/run/steps/health_rules.py", "coordinator/run/results/evaluation.py",
)  # fmt: skip


def made_metrics() -> set[str]:
    """Names in the code that have the form of a metric with a slash, or stand in a loss's table."""
    found = set()
    for pattern in MAKERS:
        for file in REPOSITORY.glob(pattern):
            text = file.read_text()
            found |= set(re.findall(r'"([a-z_]+/[a-z_0-9]+)"', text))
            if "@loss_for(" in text:
                found |= set(re.findall(r'"([a-z_]+)": ', text))
                found |= set(re.findall(r'metrics\["([a-z_]+)"\]', text))
    return found


def test_every_metric_that_the_code_makes_is_explained() -> None:
    made = made_metrics()
    assert {"kl/mean", "approx_kl", "held_out/score", "time/cut", "nll", "value_loss"} <= made
    assert [name for name in sorted(made) if explanation(name) is None] == []


def test_names_of_metrics_are_unique() -> None:
    names = [name for metrics in METRICS.values() for name in metrics]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("reward/mean", "Mean reward over the judged rows"),
        ("held_out/reward/mean", "Mean reward over the judged rows"),
        ("reward/judge/mean", "Mean reward of one source"),
        ("critic/grad_norm", "L2 norm"),
        ("time/update_actor", "Seconds of a phase"),
        ("memory/generate_peak_bytes", "Most memory"),
        ("held_out/pass@4", "Probability"),
        ("auxiliary/sft/nll", "A metric of a loss beside"),
    ],
)
def test_a_name_of_a_record_finds_its_explanation(name: str, start: str) -> None:
    found = explanation(name)
    assert found is not None
    assert found.startswith(start)


@pytest.mark.parametrize("name", ["kl", "memory/generate", "actor/kl/mean", "held_out/kl", "x/y"])
def test_a_made_up_name_has_none(name: str) -> None:
    assert explanation(name) is None
