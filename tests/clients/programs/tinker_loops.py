"""A recipe of tinker-cookbook, unmodified: tinker_loops.py RECIPE NAME=VALUE... runs it to its end.

Data come from here, since there is no hub: what its data set is called has rows of the same form.
The tokenizer is that of a folder with the model's name, where the program runs.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import datasets

NUM_ROWS = 64
SUMS = [(number % 8, number // 8) for number in range(NUM_ROWS)]
QUESTIONS = [f"What is {a} + {b}?" for a, b in SUMS]
ANSWERS = [str(a + b) for a, b in SUMS]
TALK = "That is a very good question, and I am happy to help you with it today."


def dialogues(answers: list[str]) -> list[str]:
    """In the one text of Anthropic's data set."""
    return [
        f"\n\nHuman: {question}\n\nAssistant: {answer}"
        for question, answer in zip(QUESTIONS, answers, strict=True)
    ]


def conversations(role: str, content: str, names: tuple[str, str]) -> list[list[dict[str, str]]]:
    """A question and its answer each, under these keys and names of roles."""
    return [
        [{role: names[0], content: question}, {role: names[1], content: answer}]
        for question, answer in zip(QUESTIONS, ANSWERS, strict=True)
    ]


COLUMNS: dict[str, dict[str, list[Any]]] = {
    "openai/gsm8k": {
        "question": QUESTIONS,
        "answer": [f"We add.\n#### {answer}" for answer in ANSWERS],
    },
    "HuggingFaceH4/no_robots": {
        "messages": conversations("role", "content", ("user", "assistant"))
    },
    "open-thoughts/OpenThoughts3-1.2M": {
        "conversations": conversations("from", "value", ("human", "gpt"))
    },
    "zwhe99/DeepMath-103K": {"question": QUESTIONS},
    "Anthropic/hh-rlhf": {
        "chosen": dialogues(ANSWERS),
        "rejected": dialogues([TALK] * NUM_ROWS),
    },
}
NUM_HELD_OUT = 8
"""Rows of a split test."""


def rows(name: str, *_: Any, split: str | None = None, streaming: bool = False, **__: Any) -> Any:
    """In place of datasets.load_dataset."""
    train = datasets.Dataset.from_dict(COLUMNS[name])
    if split is None:
        held_out = train.select(range(0, NUM_ROWS, NUM_ROWS // NUM_HELD_OUT))
        return datasets.DatasetDict({"train": train, "test": held_out})
    assert split == "train"
    return train.to_iterable_dataset() if streaming else train


if __name__ == "__main__":
    datasets.load_dataset = rows
    recipe = sys.argv.pop(1)
    runpy.run_module(f"tinker_cookbook.recipes.{recipe}", run_name="__main__", alter_sys=True)
