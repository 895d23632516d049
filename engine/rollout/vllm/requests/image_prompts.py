"""Prompts with images as a vLLM engine of this process takes them.

Shape letters: D width of the model, F tokens of an image.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rolemesh.engine.images.places import image_starts
from rolemesh.engine.images.prompt_images import PromptImage
from rolemesh.engine.models.images.image_tower import Tower, tower_of
from rolemesh.engine.rollout.requests import RolloutRequest


class ImagePrompts:
    """Shows a folder's tower the images of prompts, and hands vLLM what it makes of them.

    vLLM knows an image by its content and its grid. Under that name it keeps features, and keys and
    values of prompts that begin with the same images; equal placeholders of other images are other
    prompts to it. Features of a frozen tower stay right when weights come.

    Owned by the compute thread; imports vLLM late.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Loads nothing yet: the tower is loaded with the first image."""
        self._folder = folder
        self._device = device
        self._tower: Tower | None = None

    def given(self, request: RolloutRequest) -> Mapping[str, Any]:
        """A request's prompt, as vLLM's engine takes it.

        Raises:
            ImageInvalidError: An image cannot be read, or is not what its grid says.
        """
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        from rolemesh.engine.rollout.vllm.engine.image_model import MODALITY

        prompt = list(request.prompt_tokens)
        if not request.images:
            text: Mapping[str, Any] = tokens_input(prompt)
            return text
        if self._tower is None:
            self._tower = tower_of(self._folder, self._device)
        tokens = self._tower.processor.tokens
        grids = [image.grid for image in request.images]
        starts = image_starts(prompt, grids, tokens, row=request.row)
        features = self._tower.features(request.images)
        items = [
            _item(image, features_FD)
            for image, features_FD in zip(request.images, features, strict=True)
        ]
        shown: Mapping[str, Any] = mm_input(
            prompt,
            MultiModalKwargsItems({MODALITY: items}),
            {MODALITY: [_name(image) for image in request.images]},
            {
                MODALITY: [
                    PlaceholderRange(offset=start, length=tokens.number(grid))
                    for start, grid in zip(starts, grids, strict=True)
                ]
            },
        )
        return shown


def _name(image: PromptImage) -> str:
    return f"{image.sha256}-{'x'.join(map(str, image.grid))}"


def _item(image: PromptImage, features_FD: torch.Tensor) -> Any:
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalKwargsItem,
    )

    from rolemesh.engine.rollout.vllm.engine.image_model import FEATURES, GRID

    # Positions are computed on the host.
    on_host = MultiModalBatchedField(keep_on_cpu=True)
    return MultiModalKwargsItem(
        {
            FEATURES: MultiModalFieldElem(data=features_FD, field=MultiModalBatchedField()),
            GRID: MultiModalFieldElem(data=torch.tensor(image.grid), field=on_host),
        }
    )
