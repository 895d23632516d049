"""Prompts by position: a training split in shuffled epochs without end, and a held-out split.

A position always names the same prompt, so the coordinator sends positions and no text, and a
replayed step sees the same prompts. Held-out prompts are never training prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rolemesh.engine.specs import DataSpec, JsonlSpec, ReasoningGymSpec

Message = Mapping[str, str]
Split = Literal["train", "held_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One prompt as the data set has it."""

    messages: Sequence[Message]
    """Chat turns, each with role and content."""
    assistant_prefix: str = ""
    """Text that the assistant's turn already begins with; part of the prompt."""
    answer: str = ""
    """Expected answer, empty when the data set has none."""
    metadata: str = "{}"
    """The row as JSON, for rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt that is ready for sampling."""

    prompt_id: int
    """Index in the data set; held-out prompts follow the training prompts."""
    text: str
    """The rendered prompt."""
    tokens: Sequence[int]
    """Token ids of the rendered prompt."""
    answer: str
    metadata: str


class ChatTokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Renders chat turns."""

    def __call__(self, text: str, **kwargs: Any) -> Any:
        """Encodes text."""


class EmptyDataError(ValueError):
    """A split that is asked for has no prompts."""


class PromptSet:
    """The prompts of a run.

    Invariant: `slice` is a pure function of its arguments and of (rows, seed).
    """

    def __init__(
        self,
        train: Sequence[PromptRow],
        held_out: Sequence[PromptRow],
        *,
        tokenizer: ChatTokenizer,
        seed: int,
    ) -> None:
        """Takes the rows of both splits; seed decides the order of training epochs."""
        self._rows: dict[Split, Sequence[PromptRow]] = {"train": train, "held_out": held_out}
        self._tokenizer = tokenizer
        self._seed = seed
        self._order: tuple[int, list[int]] = (-1, [])

    def size(self, split: Split) -> int:
        """Prompts in the split."""
        return len(self._rows[split])

    def slice(self, split: Split, start: int, count: int) -> list[Prompt]:
        """The prompts at positions start..start+count-1.

        Raises:
            EmptyDataError: the split has no prompts.
            ValueError: the range is not valid, or reaches beyond the held-out split.
        """
        rows = self._rows[split]
        if start < 0 or count < 1:
            raise ValueError(
                f"prompts start={start}, count={count}: start must be >= 0 and count >= 1"
            )
        if not rows:
            raise EmptyDataError(
                f"the {split} split of the data is empty: raise data.{split}_size, or give a "
                "file with at least one prompt"
            )
        if split == "held_out":
            if start + count > len(rows):
                raise ValueError(
                    f"held-out prompts {start} to {start + count - 1} were asked for, but there "
                    f"are {len(rows)}: lower run.evaluation.num_prompts or raise the held-out split"
                )
            return [self._render(split, index) for index in range(start, start + count)]
        return [self._render(split, self._train_index(at)) for at in range(start, start + count)]

    def _train_index(self, position: int) -> int:
        epoch, within = divmod(position, len(self._rows["train"]))
        if self._order[0] != epoch:
            order = list(range(len(self._rows["train"])))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1][within]

    def _render(self, split: Split, index: int) -> Prompt:
        row = self._rows[split][index]
        text = self._tokenizer.apply_chat_template(
            list(row.messages), add_generation_prompt=True, tokenize=False
        )
        text += row.assistant_prefix
        tokens = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        offset = 0 if split == "train" else len(self._rows["train"])
        return Prompt(
            prompt_id=offset + index,
            text=text,
            tokens=tokens,
            answer=row.answer,
            metadata=row.metadata,
        )


def load_rows(spec: DataSpec) -> tuple[list[PromptRow], list[PromptRow]]:
    """Loads training and held-out rows; raises EmptyDataError when there is nothing to train on."""
    loaders: dict[str, Callable[[Any], tuple[list[PromptRow], list[PromptRow]]]] = {
        "reasoning_gym": _load_reasoning_gym,
        "jsonl": _load_jsonl,
    }
    train, held_out = loaders[spec.type](spec)
    if not train:
        raise EmptyDataError(
            f"actor.data ({spec.type}) holds no training prompt: give a file with prompts, or "
            "raise train_size"
        )
    return train, held_out


def _load_reasoning_gym(spec: ReasoningGymSpec) -> tuple[list[PromptRow], list[PromptRow]]:
    from rolemesh.engine.data.reasoning_gym import load

    return load(spec)


def _load_jsonl(spec: JsonlSpec) -> tuple[list[PromptRow], list[PromptRow]]:
    from rolemesh.engine.data.jsonl import load

    return load(spec)
