"""Trajectories that the suite has judged and scored: made up, the same each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rolemesh.v1 import reward_pb2

FIRST_TOKEN = 5
"""Smaller ids are special tokens in most vocabularies."""

NUM_TOKENS = 200
"""Ids from FIRST_TOKEN on that are used; every vocabulary has so many."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory, with the fields of its message."""

    prompt: str
    completion: str
    answer: str
    prompt_tokens: tuple[int, ...]
    completion_tokens: tuple[int, ...]
    metadata_json: str = "{}"

    def inline(self) -> reward_pb2.Trajectory:
        """The trajectory as a message, for a reward that does not pull."""
        return reward_pb2.Trajectory(**asdict(self))


def token_ids(seed: int, number: int) -> tuple[int, ...]:
    """Ids that differ from row to row and from place to place."""
    return tuple(
        FIRST_TOKEN + (seed * 31 + place * 17 + seed * place) % NUM_TOKENS
        for place in range(number)
    )


def make_sample(seed: int, completion: str, answer: str = "12") -> Sample:
    """A trajectory with the given texts, and tokens whose number differs from row to row."""
    return Sample(
        prompt=f"Question {seed}: 5 + 7 = ?",
        completion=completion,
        answer=answer,
        prompt_tokens=token_ids(seed, 3 + seed % 4),
        completion_tokens=token_ids(seed + 1000, 2 + seed * 3 % 7),
    )


def ordinary_samples() -> Sequence[Sample]:
    """A few trajectories that a reward should distinguish: right, wrong, long, short."""
    completions = (
        "12",
        "no idea",
        "5 + 7 is 12. The answer is 12.",
        "The answer is <answer>12</answer>",
        "The answer is <answer>13</answer>, or 14, or 15, and so on " + "and on " * 20,
        "\\boxed{12}",
        "13",
    )
    return [make_sample(seed, completion) for seed, completion in enumerate(completions)]


def odd_samples() -> Sequence[Sample]:
    """Unusual texts, which break a server that was only tried with plain ones."""
    completions = (
        "caf\u00e9 na\u00efve \u6570\u5b66 \u0645\u0631\u062d\u0628\u0627 \U0001f600",
        "e\u0301 \u200d zero width \u202e turned round",
        "line one\nline two\r\n\ttab",
        '{"json": [1, 2, "\\u0000"]} </s> <|im_end|> %s {} $x',
        "a" * 20_000,
    )
    return [make_sample(seed, completion, "\u0663") for seed, completion in enumerate(completions)]
