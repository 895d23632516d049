"""A task with a known optimum for a tiny model of images and text: name the colour of a square."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

from support.image_prompts import LARGE_HEADS
from support.learning_runs import write_rows
from support.tiny_images import plain, png, write_tiny_image_model

COLORS = ((220, 20, 20), (20, 220, 20), (20, 20, 220))

REWARD = '''
"""1 where the last character of the completion, by its remainder, names the colour."""


def named(prompts, completions, answer):
    return [
        float(bool(text) and ord(text[-1]) % 3 == int(wanted))
        for text, wanted in zip(completions, answer, strict=True)
    ]
'''


def write_task(folder: Path, seed: int, family: str = "qwen2_5_vl") -> Path:
    """A model, squares of three colours in two sizes, and the reward."""
    write_tiny_image_model(folder / "model", family=family, seed=seed, **LARGE_HEADS)
    pictures = folder / "pictures"
    pictures.mkdir()
    rows = []
    for number, color in enumerate(COLORS):
        for shade in range(4):
            pixels = plain(
                tuple(max(0, one - 12 * shade) for one in color),
                width=28 * (1 + shade % 2),
                height=28,
            )
            name = f"{string.ascii_lowercase[number]}{shade}.png"
            (pictures / name).write_bytes(png(pixels))
            rows.append({"prompt": "?", "images": [name], "answer": str(number)})
    write_rows(folder / "rows.jsonl", rows)
    (folder / "named.py").write_text(REWARD)
    return folder


def picture_rows(task: Path) -> list[dict[str, Any]]:
    """The rows of the task."""
    return [json.loads(line) for line in (task / "rows.jsonl").read_text().splitlines()]


def data_of(task: Path, **fields: Any) -> dict[str, Any]:
    """The section of the data in a recipe."""
    images = {"folder": str(task / "pictures")}
    return {"type": "jsonl", "path": str(task / "rows.jsonl"), "images": images, **fields}


def reward_of(task: Path) -> dict[str, Any]:
    """The section of the reward in a recipe."""
    return {"source": {"type": "python", "function": f"{task / 'named.py'}:named"}}
