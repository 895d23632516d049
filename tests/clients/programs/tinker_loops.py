"""A loop of tinker-cookbook, unmodified: tinker_loops.py LOOP NAME=VALUE... runs it to its end.

Data come from here, since there is no hub: what its data set is called has rows of the same form.
The tokenizer is that of a folder with the model's name, where the program runs.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import datasets

NUM_ROWS = 64


def rows(name: str, *_: Any, **__: Any) -> datasets.DatasetDict:
    """In place of datasets.load_dataset."""
    sums = [(number % 8, number // 8) for number in range(NUM_ROWS)]
    if name == "openai/gsm8k":
        made: dict[str, list[Any]] = {
            "question": [f"What is {a} + {b}?" for a, b in sums],
            "answer": [f"We add.\n#### {a + b}" for a, b in sums],
        }
    else:
        made = {
            "messages": [
                [
                    {"role": "user", "content": f"What is {a} + {b}?"},
                    {"role": "assistant", "content": str(a + b)},
                ]
                for a, b in sums
            ]
        }
    return datasets.DatasetDict({"train": datasets.Dataset.from_dict(made)})


if __name__ == "__main__":
    datasets.load_dataset = rows
    loop = sys.argv.pop(1)
    runpy.run_module(f"tinker_cookbook.recipes.{loop}", run_name="__main__", alter_sys=True)
