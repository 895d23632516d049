"""Where a completion ends beside the model's own stop tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError
from support.fake_recipes import fake_recipe
from support.scripted_sampler import AsciiTokenizer

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.engine.rollout.stops import stop_check
from rolemesh.engine.specs import SamplingSpec


def end_of(text: str, **stops: Any) -> int | None:
    """The number of tokens after which a completion of that text ends."""
    is_complete = stop_check(SamplingSpec(**stops), AsciiTokenizer())
    assert is_complete is not None
    tokens: Sequence[int] = AsciiTokenizer()(text)["input_ids"]
    ends = (number for number in range(1, len(tokens) + 1) if is_complete(tokens[:number]))
    return next(ends, None)


@pytest.mark.parametrize(
    ("text", "stops", "end"),
    [
        ("one two three", {"stop": ("two",)}, 7),
        ("one two three", {"stop": ("three", "tw")}, 6),
        ("one two three", {"stop": ("four",)}, None),
        ("aaab", {"stop": ("ab",)}, 4),
        ("one two", {"stop_token_ids": (ord("t"),)}, 5),
        ("one two", {"stop": ("two",), "stop_token_ids": (ord("n"),)}, 2),
        # A text that is longer than what is looked at of the tokens before it.
        ("x" * 100 + "y" * 64, {"stop": ("y" * 64,)}, 164),
    ],
)
def test_a_completion_ends_with_the_token_that_completes_a_stop(
    text: str, stops: dict[str, Any], end: int | None
) -> None:
    assert end_of(text, **stops) == end


def test_without_stops_nothing_is_asked() -> None:
    assert stop_check(SamplingSpec(), AsciiTokenizer()) is None


@pytest.mark.parametrize(
    ("stops", "told"),
    [
        ({"stop": ("",)}, "at least 1 character"),
        ({"stop": ("a" * 257,)}, "at most 256"),
        ({"stop": ("a",) * 17}, "at most 16"),
        ({"stop_token_ids": (-1,)}, "greater than or equal to 0"),
    ],
)
def test_stops_that_cannot_be_are_refused(stops: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        SamplingSpec(**stops)


def test_an_environment_says_by_itself_where_a_turn_ends() -> None:
    values = fake_recipe(roles=("actor", "reward")).model_dump(mode="json")
    values["actor"]["environment"] = {"type": "calculator"}
    values["algorithm"] = {
        "type": "grpo",
        "sampling": {"stop": ["x"], "samples_per_prompt": 2},
        "mini_batch_rows": 8,
    }
    with pytest.raises(ValidationError, match=r"sampling\.stop .* talks to an environment"):
        Recipe.model_validate(values)
