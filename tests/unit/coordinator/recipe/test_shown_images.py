"""Data with images in a recipe: what would see the text alone is refused by its field."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from support.fake_recipes import SECTIONS, fake_recipe

from rolemesh.coordinator.recipe.schema import Recipe

DISTILLATION = {
    "type": "on_policy_distillation",
    "sampling": {"samples_per_prompt": 2},
    "mini_batch_rows": 4,
}
MODEL = SECTIONS["reference"]["model"]
ROWS = {"type": "jsonl", "path": "rows.jsonl"}
SHOWN = {**ROWS, "images": {"folder": "pictures"}}


def recipe(data: dict[str, Any], teacher: dict[str, Any], **actor: Any) -> Recipe:
    values = fake_recipe(roles=("actor",), algorithm={"type": "sft"}).model_dump(mode="json")
    values |= {"algorithm": DISTILLATION, "teacher": teacher, "pools": {}}
    values["actor"] |= {"data": data, **actor}
    values["run"]["evaluation"]["num_prompts"] = 0
    return Recipe.model_validate(values)


def test_a_teacher_with_a_model_sees_images() -> None:
    made = recipe(SHOWN, {"model": MODEL})
    assert made.actor is not None
    assert made.sent_spec("actor")["data"]["images"]["folder"] == "pictures"


def test_an_agent_is_shown_images() -> None:
    agent = {"type": "python_agent", "run": "agents.py:run"}
    rollout = {"type": "vllm", "max_model_len": 64}
    made = recipe(SHOWN, {"model": MODEL}, environment=agent, rollout=rollout, endpoint={})
    assert made.actor is not None
    assert made.actor.environment is not None


@pytest.mark.parametrize(
    ("teacher", "actor", "message"),
    [
        ({"of": "actor", "prompt": {"template": "{prompt}!"}}, {}, r"teacher\.prompt is given"),
        ({"server": {"urls": ["http://h"], "model": "m"}}, {}, r"teacher\.server is given"),
        ({"model": MODEL}, {"environment": {"type": "calculator"}}, "talks to an environment"),
    ],
)
@pytest.mark.parametrize("is_mixed", [False, True])
def test_what_sees_the_text_alone_is_refused(
    teacher: dict[str, Any], actor: dict[str, Any], message: str, is_mixed: bool
) -> None:
    recipe(ROWS, teacher, **actor)
    sources = [{"data": ROWS}, {"data": SHOWN}]
    data = {"type": "mixture", "sources": sources} if is_mixed else SHOWN
    with pytest.raises(ValidationError, match=message):
        recipe(data, teacher, **actor)
