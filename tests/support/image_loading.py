"""Rows with images that tests write and load as a run does."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from support.tiny_images import noise, plain, png

from rolemesh.engine.data.prompts import Prompt, PromptSet, load_prompts
from rolemesh.engine.specs import DataSpec

WIDE, SMALL = png(noise(width=112, height=84)), png(plain((255, 0, 0)))
WIDE_TOKENS, SMALL_TOKENS = 12, 4
"""(112 / 28) * (84 / 28), and (56 / 28) squared."""
PART = {"type": "image"}
SPEC: TypeAdapter[Any] = TypeAdapter(DataSpec)


class Loading:
    """Loads rows of a test as a run does."""

    def __init__(self, model: Path, tokenizer: Any, place: Path, folder: Path) -> None:
        self.model, self.tokenizer, self.place, self.folder = model, tokenizer, place, folder

    def __call__(
        self, rows: Sequence[dict[str, Any]], images: Any = ..., **others: Any
    ) -> PromptSet:
        path = self.place / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        section = {"folder": str(self.folder)} if images is ... else images
        spec = {"type": "jsonl", "path": str(path), "images": section}
        loaded = {name: others.pop(name) for name in ("max_model_len", "model") if name in others}
        return load_prompts(
            SPEC.validate_python(spec | others),
            tokenizer=self.tokenizer,
            seed=0,
            **{"model": self.model, **loaded},
        )


def first(prompts: PromptSet) -> Prompt:
    """The first prompt that is trained on."""
    return prompts.slice("train", 0, 1)[0]


def url(data: bytes) -> str:
    """A picture as an address that holds it."""
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"
