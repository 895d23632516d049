"""Rows for tests of rewards from outside."""

from __future__ import annotations

from typing import Any

from rolemesh.services.reward.outside.base import RewardRow


def reward_row(completion: str, *, answer: str = "", prompt: str = "2+2=", **metadata: Any) -> Any:
    return RewardRow(
        prompt=prompt,
        completion=completion,
        query=f"{prompt}{completion}</s>",
        prompt_tokens=(1, 2),
        completion_tokens=tuple(ord(letter) for letter in completion),
        answer=answer,
        metadata=metadata,
    )


def reward_rows(*completions: str, answer: str = "", **metadata: Any) -> list[RewardRow]:
    return [reward_row(completion, answer=answer, **metadata) for completion in completions]
