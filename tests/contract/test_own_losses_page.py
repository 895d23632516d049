"""Tests that docs/own-losses.md shows what happens."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from pydantic import TypeAdapter
from support.ragged_batches import RaggedBatch, mixed_masks, random_batch

from rolemesh.coordinator.recipe.algorithm.algorithms import AlgorithmSpec, PolicyGradientSpec
from rolemesh.coordinator.recipe.algorithm.policy_gradients import POLICY_GRADIENTS
from rolemesh.engine.algorithms.estimators.estimation import estimate_advantages
from rolemesh.engine.algorithms.estimators.own_estimators import JudgedBatch
from rolemesh.engine.algorithms.losses.base import LossScale, ModelOutputs, make_loss
from rolemesh.engine.algorithms.losses.policy_losses import PolicyTokens
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.granted.own_functions import OwnFunctions
from rolemesh.engine.specs import DrGrpoSpec, Spec

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "own-losses.md").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.fixture
def section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PolicyGradientSpec:
    """The section of the page, in a folder that has its file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "losses.py").write_text(block("python"))
    adapter: TypeAdapter[PolicyGradientSpec] = TypeAdapter(AlgorithmSpec)
    return adapter.validate_python(yaml.safe_load(block("yaml"))["algorithm"])


def a_batch() -> tuple[RaggedBatch, Experience]:
    drawn = random_batch(
        mixed_masks(seed=71), dict.fromkeys(("logprobs", "advantages", "new"), (-1.0, 1.0)), seed=72
    )
    batch = drawn.experience(torch.float64)
    rows = torch.arange(len(batch))
    return drawn, batch | Experience(
        {
            "rewards": Column(ColumnKind.ROW, (rows % 3).float()),
            "prompt_ids": Column(ColumnKind.ROW, rows // 3),
        }
    )


def test_the_loss_of_the_page_is_the_formula_that_it_states(section: PolicyGradientSpec) -> None:
    drawn, batch = a_batch()
    mask, old, advantages = (batch[name].values for name in ("loss_mask", "logprobs", "advantages"))
    new = drawn.packed("new", torch.float64).requires_grad_()
    loss = make_loss(section.policy_loss, OwnFunctions(section.own_functions))
    outputs = ModelOutputs(logprobs_N=new, entropy_N=torch.zeros_like(new))
    share, metrics = loss(outputs, batch, LossScale.of(batch))
    share.backward()
    # The mean over rows of the means over tokens, by hand.
    weights = torch.exp(-(((new.detach() - old) / 0.2) ** 2))
    expected = torch.zeros_like(old)
    counted = [one for one in batch["loss_mask"].rows() if one.any()]
    start = 0
    for row in batch["loss_mask"].rows():
        here = slice(start, start + len(row))
        if row.any():
            expected[here] = -weights[here] * advantages[here] * row / row.sum() / len(counted)
        start += len(row)
    assert torch.allclose(new.grad, expected, atol=1e-12, rtol=0)
    assert metrics["soft_weight"] == pytest.approx(float(weights[mask].mean()))


def test_the_estimator_of_the_page_is_dr_grpos(section: PolicyGradientSpec) -> None:
    _, batch = a_batch()
    own, _ = estimate_advantages(
        batch, section.advantages, own_functions=OwnFunctions(section.own_functions)
    )
    ours, _ = estimate_advantages(batch, DrGrpoSpec())
    assert torch.equal(own["advantages"].values, ours["advantages"].values)
    assert ours["advantages"].values.any()


@pytest.mark.parametrize(
    ("seen", "heading", "extra"),
    [(PolicyTokens, "## The loss", set()), (JudgedBatch, "## The estimator", {"to_each_token"})],
)
def test_the_tables_name_every_field(seen: Any, heading: str, extra: set[str]) -> None:
    part = PAGE[PAGE.index(heading) :].partition("\n## ")[0]
    named = set(re.findall(r"^\| `(\w+)", part, flags=re.MULTILINE))
    assert named == {field.name for field in dataclasses.fields(seen)} | extra


def test_what_fits_where_is_as_the_page_says() -> None:
    def takes(section: type[Spec], **part: Any) -> bool:
        try:
            section.model_validate({"type": section.model_fields["type"].default, **part})
        except ValueError:
            return False
        return True

    own = "python:mine.py:f"
    fitting: dict[str, set[str]] = {"policy_loss": set(), "advantages": set()}
    for section in get_args(get_args(AlgorithmSpec)[0]):
        name = section.model_fields["type"].default
        if name == "custom":
            continue
        # One of these has to be given its loss.
        needed = {} if name != "dr_grpo" else {"policy_loss": own}
        for field, names in fitting.items():
            if field in section.model_fields and takes(section, **{**needed, field: own}):
                names.add(name)
    assert fitting["advantages"] == {*POLICY_GRADIENTS, "dapo", "ppo"}
    assert fitting["policy_loss"] == {
        *(*fitting["advantages"], "safe_rlhf", "remax", "on_policy_distillation")
    }
