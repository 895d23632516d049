"""Sample rows with which a reward is tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rolemesh.engine.data.answers import ANSWER, accepted, json_text
from rolemesh.engine.data.files import jsonl
from rolemesh.engine.data.rows import DataInvalidError
from rolemesh.services.reward.outside.base import RewardRow

LONG_CHARACTERS = 200_000
"""Length of a completion that is longer than most rewards expect: about 50,000 tokens."""

MOST_ROWS = 64
"""Most rows that are read from a file: each row is sent about ten times."""

_ARITHMETIC = (
    ("What is 12 + 30?", "42", ("42", "41", "12 + 30 = 42")),
    ("What is 7 - 9?", "-2", ("-2", "I do not know.", "7 - 9 is -2, since 9 is larger than 7.")),
)

_ODD_TEXTS = (
    "Gr\u00fc\u00dfe, \u4e16\u754c \U0001f642 \u05e9\u05dc\u05d5\u05dd",
    'a "quoted"\tline\r\nand \\ {braces} <tags> & more',
)


WRONG = "I do not know."
"""A completion that is right for next to no prompt."""


class CheckInputError(ValueError):
    """The source, or the rows to try it with, cannot be read."""


def sample_rows() -> list[RewardRow]:
    """Right, wrong and wordy answers to two questions of arithmetic."""
    return [
        # Functions of verl's form are told where a row comes from.
        make_row(prompt, completion, answer, {"data_source": "arithmetic"})
        for prompt, answer, completions in _ARITHMETIC
        for completion in completions
    ]


def make_row(
    prompt: str, completion: str, answer: str = "", metadata: Mapping[str, Any] | None = None
) -> RewardRow:
    """Makes a row. Its token ids are the bytes of its texts, since there is no tokenizer here."""
    return RewardRow(
        prompt=prompt,
        completion=completion,
        query=prompt + completion,
        prompt_tokens=tuple(prompt.encode("utf-8", "replace")) or (0,),
        completion_tokens=tuple(completion.encode("utf-8", "replace")),
        answer=answer,
        metadata=metadata or {},
    )


def completions_of(answer: str) -> Sequence[str]:
    """Completions to try where none is given: the expected answer, if any, and a wrong one.

    Args:
        answer: Expected answer; "" for none. Of a list in JSON the first item is taken.
    """
    return [accepted(answer)[:2][-1], WRONG] if answer else [WRONG]


def read_rows(path: Path) -> list[RewardRow]:
    """Reads a JSONL file: prompt, optionally completion and answer; other keys are metadata.

    A row without a completion is sent with its answer as the completion, and with a wrong one.

    Raises:
        CheckInputError: The file cannot be read; the text names the line.
    """
    try:
        records = list(jsonl.records(path, "--jsonl"))
    except DataInvalidError as error:
        raise CheckInputError(str(error)) from error
    rows = []
    for record, where in records:
        if not isinstance(record, dict):
            record = {}
        prompt, completion = record.pop("prompt", None), record.pop("completion", None)
        answer = record.pop("answer", None)
        # As the data of a run is read.
        if isinstance(answer, bool | list | dict):
            record[ANSWER] = answer
        if answer is not None and not isinstance(answer, str):
            answer = json_text(answer)
        texts = (prompt, *("" if text is None else text for text in (completion, answer)))
        if not all(isinstance(text, str) for text in texts):
            raise CheckInputError(
                f"{where}: give an object with the text prompt, and maybe "
                "completion and answer (--recipe renders prompts of messages)"
            )
        completions = completions_of(texts[2]) if completion is None else [completion]
        rows += [make_row(prompt, one, texts[2], record) for one in completions]
    if not 0 < len(rows) <= MOST_ROWS:
        raise CheckInputError(
            f"--jsonl {path} makes {len(rows)} rows to send: give 1 to {MOST_ROWS}"
        )
    return rows


def like(row: RewardRow, completion: str) -> RewardRow:
    """The row with another completion."""
    made = make_row(row.prompt, completion, row.answer, row.metadata)
    return dataclasses.replace(made, images=row.images)


def odd_rows(row: RewardRow) -> list[RewardRow]:
    """Completions with letters of many kinds, line ends and quotes."""
    return [like(row, text) for text in _ODD_TEXTS]


def long_row(row: RewardRow) -> RewardRow:
    """A completion that goes on and on."""
    return like(row, ("and " * (LONG_CHARACTERS // 4))[:LONG_CHARACTERS])
