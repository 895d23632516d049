"""Rows of a recipe's own data with which a reward is tried, rendered as the policy sees them."""

from __future__ import annotations

import json
from pathlib import Path

from rolemesh.engine.data.prompts import Prompt, load_prompts
from rolemesh.engine.data.rendering.rendering import ChatTokenizer
from rolemesh.engine.data.rendering.tokenizers import load_light_tokenizer
from rolemesh.engine.images.prompt_images import data_url
from rolemesh.engine.specs import DataSpec, Spec
from rolemesh.services.reward.outside.base import RewardRow
from rolemesh.services.reward.outside.check.samples import completions_of

MOST_PROMPTS = 3
"""Most prompts that are taken: each row is sent about ten times."""


class RecipeRowsSpec(Spec):
    """Where the prompts of a recipe come from, as `rolemesh reward check` passes it on."""

    model: Path
    """Folder of the policy."""
    data: DataSpec
    seed: int


def recipe_rows(spec: RecipeRowsSpec) -> list[RewardRow]:
    """The first prompts that the run would train on, each with a right and a wrong completion.

    Raises:
        ValueError: The data or the tokenizer cannot be read.
    """
    tokenizer = load_light_tokenizer(spec.model)
    prompts = load_prompts(spec.data, tokenizer=tokenizer, seed=spec.seed, model=spec.model)
    count = min(MOST_PROMPTS, prompts.size("train"))
    return [
        row
        for prompt in prompts.slice("train", 0, count)
        for row in rows_of_prompt(prompt, tokenizer, has_images=prompts.has_images)
    ]


def rows_of_prompt(
    prompt: Prompt, tokenizer: ChatTokenizer, *, has_images: bool
) -> list[RewardRow]:
    """A prompt with its expected answer as the completion, if it has one, and with a wrong one.

    `has_images` says whether the data has any.
    """
    images = tuple(data_url(one.data) for one in prompt.images) if has_images else None
    return [
        RewardRow(
            prompt=prompt.text,
            completion=completion,
            query=prompt.text + completion,
            prompt_tokens=tuple(prompt.tokens),
            completion_tokens=tuple(tokenizer(completion, add_special_tokens=False)["input_ids"]),
            answer=prompt.answer,
            metadata=json.loads(prompt.metadata),
            images=images,
        )
        for completion in completions_of(prompt.answer)
    ]
