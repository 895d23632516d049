"""Prompts with pictures, and transformers' whole model of images and text that scores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.tiny_images import IMAGE_PAD, noise, plain, png
from transformers import AutoModelForImageTextToText

from rolemesh.engine.images.processing import ImageProcessor
from rolemesh.engine.images.prompt_images import PromptImage
from rolemesh.engine.rollout.requests import RolloutRequest, RolloutTrajectory

LARGE_HEADS: Mapping[str, Any] = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [4, 6, 6],
        "rope_theta": 10000.0,
    },
}
"""vLLM's kernels on a CPU want heads of 32 at least."""
START, END = 256 + 3, 256 + 4
"""<|vision_start|> and <|vision_end|>."""

Pictures = Mapping[int, Sequence[np.ndarray]]
"""Pixels of each row's images."""


def whole_model(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def text_weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    """What a trainer sends: all but the tower, by the names of a decoder."""
    return [
        (name.replace("model.language_model.", "model."), weight)
        for name, weight in model.named_parameters()
        if ".visual." not in name
    ]


def request(
    processor: ImageProcessor, row: int, pictures: Sequence[np.ndarray], text: str = "what?"
) -> RolloutRequest:
    """A prompt that shows pictures and then asks."""
    tokens, images = [row % 200], []
    for pixels in pictures:
        height, width, _ = pixels.shape
        images.append(PromptImage.of(png(pixels), processor.grid(width=width, height=height)))
        tokens += [START, IMAGE_PAD, END]
    tokens += text.encode()
    expanded = processor.tokens.expanded(tokens, [image.grid for image in images])
    return RolloutRequest(row=row, prompt_tokens=expanded, seed=100 + row, images=images)


def pictures_of_rows() -> dict[int, Sequence[np.ndarray]]:
    """One picture, two of unequal sizes, none; and one in the place of another."""
    return {
        0: [noise(seed=0)],
        1: [noise(width=56, height=140, seed=1), noise(seed=0)],
        2: [],
        3: [noise(seed=5)],
        4: [plain((200, 30, 10))],
        5: [],
    }


@torch.no_grad()
def scores(
    model: Any,
    processor: ImageProcessor,
    asked: RolloutRequest,
    pictures: Sequence[np.ndarray],
    trajectory: RolloutTrajectory,
) -> torch.Tensor:
    """float64, of each completion token, by transformers' model of images and text."""
    prompt, completion = list(asked.prompt_tokens), list(trajectory.completion_tokens)
    shown: dict[str, torch.Tensor] = {}
    places = [False] * len(prompt)
    if pictures:
        cut = [processor.patches(pixels) for pixels in pictures]
        count = sum(processor.tokens.number(grid) for _, grid in cut)
        for at in [at for at, token in enumerate(prompt) if token == IMAGE_PAD][:count]:
            places[at] = True
        shown = {
            "pixel_values": torch.from_numpy(np.concatenate([patches for patches, _ in cut])),
            "image_grid_thw": torch.tensor([grid for _, grid in cut]),
            "mm_token_type_ids": torch.tensor([[*places, *(False for _ in completion)]]).int(),
        }
    # Transformers takes every placeholder for an image's, also one that was sampled: those of the
    # images have a number that is nowhere else.
    free = next(token for token in range(511, 0, -1) if token not in {*prompt, *completion})
    model.config.image_token_id = free
    given = [free if place else token for token, place in zip(prompt, places, strict=True)]
    logits_TV = model(torch.tensor([[*given, *completion]]), **shown).logits[0]
    logprobs_TV = logits_TV[len(prompt) - 1 : -1].double().log_softmax(-1)
    return logprobs_TV.gather(-1, torch.tensor(completion)[:, None])[:, 0]


def differences(
    model: Any,
    processor: ImageProcessor,
    requests: Sequence[RolloutRequest],
    pictures: Pictures,
    trajectories: Sequence[RolloutTrajectory],
) -> torch.Tensor:
    """abs(sampler - transformers) of each completion token."""
    asked = {one.row: one for one in requests}
    found = [
        (
            torch.tensor(one.logprobs, dtype=torch.float64)
            - scores(model, processor, asked[one.row], pictures[one.row], one)
        ).abs()
        for one in trajectories
    ]
    return torch.cat(found)
