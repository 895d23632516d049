"""Rows with images for models: prompts that show pictures, some of them alike but for those."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from support.tiny_images import IMAGE_PAD, noise, plain, png

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.images.processing import ImageProcessor
from rolemesh.engine.images.prompt_images import PromptImage, images_text

START, END = IMAGE_PAD - 3, IMAGE_PAD - 2


def shown(folder: Path, pixels_HWC: np.ndarray) -> PromptImage:
    """A picture as a prompt shows it."""
    height, width, _ = pixels_HWC.shape
    grid = ImageProcessor(folder).grid(width=width, height=height)
    return PromptImage.of(png(pixels_HWC), grid)


def pictures(folder: Path) -> dict[str, PromptImage]:
    """Three pictures, the first two of one size."""
    return {
        "red": shown(folder, plain((200, 30, 30))),
        "blue": shown(folder, plain((30, 30, 200))),
        "noise": shown(folder, noise(seed=3)),
    }


def with_images(
    batch: Experience, folder: Path, images: Sequence[Sequence[PromptImage]]
) -> Experience:
    """A batch whose prompts show images behind their first token.

    Args:
        batch: Of `token_batch`.
        folder: Of the model.
        images: Of each row, maybe none.
    """
    tokens = ImageProcessor(folder).tokens
    rows, lengths = [], batch["prompt_lengths"].values.clone()
    for number, (row_T, own) in enumerate(zip(batch["tokens"].rows(), images, strict=True)):
        places = [
            token
            for image in own
            for token in (START, *[IMAGE_PAD] * tokens.number(image.grid), END)
        ]
        rows.append(torch.cat([row_T[:1], torch.tensor(places, dtype=torch.int64), row_T[1:]]))
        lengths[number] += len(places)
    return batch | Experience(
        {
            "tokens": Column.ragged(ColumnKind.SEQUENCE, rows, torch.int64),
            "prompt_lengths": Column(ColumnKind.ROW, lengths),
            "images": Column.text([images_text(own) for own in images]),
        }
    )
