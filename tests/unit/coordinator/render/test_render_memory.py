"""Tests that rendered files reserve enough shared memory for what a role really holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.public_models import config_folder

from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.render.memory import (
    experience_bytes,
    shared_memory_bytes,
    unsized_models,
)
from rolemesh.engine.experience import Column, ColumnKind, Experience, payload_layout

REPOSITORY = Path(__file__).resolve().parents[4]


def actor_experience(num_rows: int, prompt_length: int, completion_length: int) -> Experience:
    """Every column that an actor makes, with five characters a token and 1 KiB of metadata."""

    def ragged(dtype: torch.dtype, length: int, kind: ColumnKind = ColumnKind.COMPLETION) -> Column:
        rows = [torch.zeros(length, dtype=dtype) for _ in range(num_rows)]
        return Column.ragged(kind, rows, dtype)

    columns = {
        "tokens": ragged(torch.int64, prompt_length + completion_length, ColumnKind.SEQUENCE),
        "loss_mask": ragged(torch.bool, completion_length),
        "policy_versions": ragged(torch.int64, completion_length),
        "prompt_text": Column.text(["p" * 5 * prompt_length] * num_rows),
        "completion_text": Column.text(["c" * 5 * completion_length] * num_rows),
        "metadata": Column.text(["m" * 1024] * num_rows),
        "answer": Column.text(["42"] * num_rows),
    }
    for name in ("logprobs", "proximal_logprobs", "advantages", "returns", "token_rewards"):
        columns[name] = ragged(torch.float32, completion_length)
    return Experience(columns)


@pytest.mark.parametrize("prompt_length", [1, 64, 500])
def test_a_step_at_full_length_fits(prompt_length: int) -> None:
    recipe = load_recipe(
        [REPOSITORY / "recipes" / "quickstart-ppo.yaml"],
        overrides=[
            "run.prompts_per_step=256",
            "algorithm.sampling={samples_per_prompt: 7, max_new_tokens: 8}",
            "actor.rollout.max_model_len=4096",
        ],
    )
    bound = experience_bytes(recipe)
    assert bound > 512 << 20  # not the least that every recipe gets
    # A hundredth of the step's rows, so that the test stays small.
    held = actor_experience(256 * 7 // 100, prompt_length, 4096 - prompt_length)
    assert 100 * payload_layout(held).num_bytes <= bound


def test_an_adapter_takes_shared_memory_for_its_factors(tmp_path: Path) -> None:
    """Of which config.json tells the size, where the weights are not here."""
    folder = config_folder(tmp_path, "Qwen2.5-7B-Instruct")
    models = [f"{role}.model.path={folder}" for role in ("actor", "rollout")]

    def shared(rank: int) -> int:
        settings = [*models, f"actor.model.adapter={{rank: {rank}}}"]
        recipe = load_recipe([REPOSITORY / "recipes" / "async-grpo.yaml"], overrides=settings)
        assert not unsized_models(recipe)
        return shared_memory_bytes(recipe)

    row = 28 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    # Two cuts of 12 bytes a number, and two publications of 4; sizes are rounded up to 64 MiB.
    assert shared(512) - shared(256) == pytest.approx(256 * row * (2 * 12 + 2 * 4), abs=64 << 20)
    whole = load_recipe([REPOSITORY / "recipes" / "async-grpo.yaml"], overrides=models)
    assert unsized_models(whole) == [folder]
    with pytest.raises(RecipeError, match="holds no"):
        shared_memory_bytes(whole)
