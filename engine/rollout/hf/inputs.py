"""What the transformers sampler gives its model in each step of a wave.

Shape letters: B rows of a wave that still run, D that differ when it begins, T tokens of a step, P
longest row when it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from rolemesh.engine.images.processing import image_tokens_of
from rolemesh.engine.layout.family_records import DEEPSTACK_LEVELS
from rolemesh.engine.models.images.image_tower import Tower, tower_of
from rolemesh.engine.models.images.shown_images import Features, show_images
from rolemesh.engine.packing.row_images import PackedImages, RowImages
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.rollout.routes import KeptRoutes


@dataclass(slots=True)
class RunningRow:
    """A completion in the making."""

    request: RolloutRequest
    budget: int
    generator: torch.Generator
    """Draws on a CPU; a device draws by the request's seed and the number of tokens so far."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    routes: KeptRoutes | None = None
    """Of a mixture, where they are kept."""


@dataclass(slots=True)
class WaveInputs:
    """What the model is given in a step, and of which row of the wave it is."""

    tokens_DT: torch.Tensor
    """int64, those that are not in the cache yet."""
    attention_mask: torch.Tensor
    """int64 [D, all so far]."""
    positions: torch.Tensor
    """int64 [D, T]; where a row has images [3, D, T], time, height and width."""
    places: list[int]
    """For each row of the wave, which of the D it is."""
    shown: Features | None = None
    """Images among the tokens."""

    def following(self, tokens_B: torch.Tensor, running: Sequence[int]) -> WaveInputs:
        """Those of the next step: the sampled tokens of the rows that go on."""
        device = tokens_B.device
        kept = torch.tensor([self.places[one] for one in running], dtype=torch.int64)
        kept = kept.to(device)
        tokens = tokens_B[running].unsqueeze(-1)
        mask = torch.cat([self.attention_mask[kept], torch.ones_like(tokens)], dim=-1)
        positions = self.positions[..., kept, -1:] + 1
        return WaveInputs(tokens, mask, positions, list(range(len(running))))


class FirstInputs:
    """Makes the inputs with which a wave begins."""

    def __init__(self, model: Any, folder: Path, device: torch.device) -> None:
        """Takes the model, the folder that it is of, and where it is."""
        self._device = device
        self._folder = folder
        self._image_tokens = image_tokens_of(folder)
        self._tower: Tower | None = None
        if self._image_tokens is not None:
            levels = getattr(model.config, DEEPSTACK_LEVELS, 0)
            show_images(model.base_model, levels)

    def first(self, wave: Sequence[RunningRow]) -> WaveInputs:
        """Inputs of a step without a cache; samples of one prompt begin alike, as one row.

        They are all tokens so far, of D rows that differ.
        """
        numbers: dict[tuple[object, ...], int] = {}
        places = []
        differing: list[RunningRow] = []
        for row in wave:
            shown = (image.sha256 for image in row.request.images)
            key = (*shown, *row.request.prompt_tokens, *row.tokens)
            places.append(numbers.setdefault(key, len(numbers)))
            if len(differing) < len(numbers):
                differing.append(row)
        rows = [torch.tensor([*row.request.prompt_tokens, *row.tokens]) for row in differing]
        longest = max(map(len, rows))
        inputs_DP = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask_DP = torch.zeros_like(inputs_DP)
        for index, row_T in enumerate(rows):
            inputs_DP[index, longest - len(row_T) :] = row_T
            mask_DP[index, longest - len(row_T) :] = 1
        attention_mask = mask_DP.to(self._device)
        # A padded position has no meaning; 0 keeps it inside the rotary table.
        positions = (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
        given = WaveInputs(inputs_DP.to(self._device), attention_mask, positions, places)
        images = RowImages.of_rows(
            rows,
            [len(row.request.prompt_tokens) for row in differing],
            [row.request.images for row in differing],
            self._image_tokens,
        )
        return given if images is None else self._with_images(given, images)

    def _with_images(self, given: WaveInputs, images: RowImages) -> WaveInputs:
        """Inputs of rows with images: padded on the left, as the tokens."""
        longest = given.tokens_DT.shape[1]
        rows = list(zip(images.positions, images.sources, strict=True))
        positions_3DP = torch.stack([pad(at, (longest - at.shape[1], 0)) for at, _ in rows], 1)
        source_DP = torch.stack([pad(one, (longest - len(one), 0), value=-1) for _, one in rows])
        packed = PackedImages.of(images, source_DP.flatten())
        assert packed is not None  # a row has images, and all of their places
        if self._tower is None:
            self._tower = tower_of(self._folder, self._device)
        return replace(
            given,
            positions=positions_3DP.to(self._device),
            shown=Features.of(packed.to(self._device), self._tower),
        )
