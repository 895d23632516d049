"""Whole batches whose rows share prompts: scores, values and steps of training as without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tree_sharing import (
    GRADIENT_TOLERANCE,
    OUTPUT_TOLERANCE,
    assert_near,
    model_folder,
    scored_alone,
    shared_batch,
    sharing_model,
)
from support.updates import forward_backward, plan_whole

from rolemesh.engine.experience import Experience
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.models.scoring import compute_logprobs, compute_values
from rolemesh.engine.models.scoring_model import VALUE_HEAD, ScoringModel
from rolemesh.engine.packing.pass_cost import DEVICE_COSTS
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec
from rolemesh.engine.train.trainer import Trainer


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares whatever it costs: these rows are too short to save much."""
    always = replace(DEVICE_COSTS["cpu"], attention_slowness=1e-9, margin=float("inf"))
    monkeypatch.setitem(DEVICE_COSTS, "cpu", always)


def _ways(folder: Path, **options: Any) -> list[ModelSpec]:
    """With and without sharing."""
    return [
        ModelSpec.model_validate(
            {"path": folder, "compute_dtype": "float32", "share_prefixes": way, **options}
        )
        for way in ("auto", "never")
    ]


def _shares(trainer: Trainer, batch: Experience) -> int:
    passes = trainer.rank_model.micro_batches(batch)
    return sum(len(one.rows) for one in passes if one.shares)


def test_each_row_is_scored_as_if_it_were_alone(tmp_path: Path, always: None) -> None:
    """The oracle: transformers' own forward pass over each row, unpadded, with all logits."""
    model = sharing_model(model_folder(tmp_path, "qwen3"), "policy")
    batch = shared_batch()
    found = compute_logprobs(RankModel(model), batch, temperature=0.8)["logprobs"].values
    with torch.no_grad():
        expected = scored_alone(model, batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=OUTPUT_TOLERANCE)


@pytest.mark.parametrize("budget", [1, 24, 4096])
def test_columns_come_back_row_by_row(tmp_path: Path, always: None, budget: int) -> None:
    folder = model_folder(tmp_path, "smollm2")
    batch = shared_batch()
    scored, values = [], []
    for spec in _ways(folder, micro_batch_tokens=budget):
        scored.append(
            compute_logprobs(RankModel(CausalLm(spec)), batch, temperature=1.0, with_entropy=True)
        )
        critic = ScoringModel(spec, VALUE_HEAD)
        torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(1))
        values.append(compute_values(RankModel(critic), batch))
    for name in ("logprobs", "entropy"):
        assert torch.equal(scored[0][name].offsets, scored[1][name].offsets)
        torch.testing.assert_close(
            scored[0][name].values, scored[1][name].values, rtol=0, atol=OUTPUT_TOLERANCE
        )
    torch.testing.assert_close(values[0].values, values[1].values, rtol=0, atol=OUTPUT_TOLERANCE)


@pytest.mark.parametrize("rows_per_unit", [1, 3])
def test_a_training_step_is_the_same(tmp_path: Path, always: None, rows_per_unit: int) -> None:
    folder = model_folder(tmp_path, "smollm2")
    batch = shared_batch()
    found = []
    for spec in _ways(folder, micro_batch_tokens=40):
        trainer = Trainer.policy(spec, OptimizerSpec())
        assert (_shares(trainer, batch) > 4) == (spec.share_prefixes == "auto")
        metrics, outputs = trainer.forward_backward(
            batch,
            PpoPolicyLossSpec(entropy_coefficient=0.01),
            plan_whole(trainer, batch, rows_per_unit),
        )
        gradients = {name: w.grad.clone() for name, w in trainer.model.named_weights()}
        found.append((metrics, outputs["logprobs"], gradients))
    (shared, outputs, gradients), (expected, padded, padded_gradients) = found
    assert shared.keys() == expected.keys()
    fraction = shared.pop("computed_fraction")
    tokens = batch["tokens"].values
    passes = Trainer.policy(_ways(folder, micro_batch_tokens=40)[0], OptimizerSpec())
    computed = sum(one.num_tokens for one in passes.rank_model.micro_batches(batch, rows_per_unit))
    assert fraction == computed / len(tokens) < expected.pop("computed_fraction") == 1.0
    for name, number in expected.items():
        assert shared[name] == pytest.approx(number, rel=1e-5, abs=1e-6), name
    torch.testing.assert_close(outputs.values, padded.values, rtol=0, atol=OUTPUT_TOLERANCE)
    assert_near(gradients, padded_gradients, GRADIENT_TOLERANCE)


def test_two_passes_have_the_same_bits(tmp_path: Path, always: None) -> None:
    batch = shared_batch()
    trainer = Trainer.policy(_ways(model_folder(tmp_path, "smollm2"))[0], OptimizerSpec())
    found = []
    for _ in range(2):
        forward_backward(trainer, batch, PpoPolicyLossSpec())
        found.append([weight.grad.clone() for _, weight in trainer.model.named_weights()])
        trainer.drop_gradients()
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


def test_without_a_common_prompt_no_bit_differs(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "smollm2")
    batch = shared_batch([(0, 5), (1, 3), (2, 7)])
    found = []
    for spec in _ways(folder):
        trainer = Trainer.policy(spec, OptimizerSpec())
        assert _shares(trainer, batch) == 0
        forward_backward(trainer, batch, PpoPolicyLossSpec())
        found.append([weight.grad.clone() for _, weight in trainer.model.named_weights()])
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


def test_a_mask_of_padded_rows_is_heeded(tmp_path: Path) -> None:
    """Whoever calls the model with a mask of its own, e.g. to sample, gets what it asks for."""
    model = sharing_model(model_folder(tmp_path, "smollm2"), "policy")
    assert model.packing is not None
    row = [5, 6, 7, 8]
    with torch.no_grad():
        padded = model.lm(
            input_ids=torch.tensor([[9, 9, *row]]),
            attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1]]),
            position_ids=torch.tensor([[0, 0, 0, 1, 2, 3]]),
        ).logits[0, 2:]
        alone = model.lm(input_ids=torch.tensor([row])).logits[0]
    torch.testing.assert_close(padded, alone, rtol=0, atol=OUTPUT_TOLERANCE)
