"""Images of rows: which of a row's tokens are whose, and where all stand when rows are packed.

Shape letters: T tokens of a row, S packed tokens, F tokens of all images together, one image behind
the other, each once; M packed tokens that are an image's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from rolemesh.engine.experience import Experience
from rolemesh.engine.hardware.devices import sent
from rolemesh.engine.images.places import image_starts
from rolemesh.engine.images.positions import mrope_positions
from rolemesh.engine.images.processing import ImageTokens
from rolemesh.engine.images.prompt_images import ImageInvalidError, PromptImage, images_of
from rolemesh.engine.specs.columns import IMAGES


@dataclass(frozen=True, slots=True)
class RowImages:
    """The images of the rows of a batch."""

    tokens: ImageTokens
    images: tuple[PromptImage, ...]
    """Each once, whatever rows show it."""
    sources: tuple[torch.Tensor, ...]
    """int64 [T] of each row: the place among F of the image's token that stands there, or -1."""
    positions: tuple[torch.Tensor, ...]
    """int64 [3, T] of each row: time, height and width."""

    @classmethod
    def of(cls, batch: Experience, tokens: ImageTokens | None) -> Self | None:
        """Those of a batch; None where no row has any.

        Images stand in prompts. A sampled placeholder is a token like any other.

        Args:
            batch: With the columns tokens, prompt_lengths and images.
            tokens: Of the model; None for one that takes no images.

        Raises:
            ImageInvalidError: A row's images do not fit its tokens, or the model takes none.
        """
        texts = [row.numpy().tobytes() for row in batch[IMAGES].rows()]
        # Samples of one prompt have one text.
        by_text = {text: images_of(text.decode()) for text in dict.fromkeys(texts)}
        return cls.of_rows(
            list(batch["tokens"].rows()),
            batch["prompt_lengths"].values.tolist(),
            [by_text[text] for text in texts],
            tokens,
        )

    @classmethod
    def of_rows(
        cls,
        rows: Sequence[torch.Tensor],
        prompts: Sequence[int],
        images: Sequence[Sequence[PromptImage]],
        tokens: ImageTokens | None,
    ) -> Self | None:
        """The same of rows by themselves.

        Args:
            rows: Tokens of each, int64 [T].
            prompts: Tokens of the prompt of each.
            images: Of each.
            tokens: As `of`.
        """
        if not any(images):
            return None
        if tokens is None:
            raise ImageInvalidError(
                "rows have images, but this model takes none: give the role a model of images and "
                "text, or leave the column 'images' out"
            )
        starts: dict[str, int] = {}
        each_once: list[PromptImage] = []
        num_places = 0
        for image in (image for row in images for image in row):
            if image.sha256 not in starts:
                starts[image.sha256] = num_places
                num_places += tokens.number(image.grid)
                each_once.append(image)
        sources, positions = [], []
        for number, (row_T, prompt, shown) in enumerate(zip(rows, prompts, images, strict=True)):
            grids = [image.grid for image in shown]
            places = image_starts(row_T[:prompt].tolist(), grids, tokens, row=number)
            sources.append(_sources(row_T, places, shown, tokens, starts))
            positions.append(mrope_positions(len(row_T), places, grids, tokens.merge))
        return cls(tokens, tuple(each_once), tuple(sources), tuple(positions))

    def keys(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rows by which to compare them: equal placeholders of different images differ.

        Args:
            rows: Tokens of each row, int64 [T].
        """
        return [
            torch.where(source_T < 0, row_T.to(torch.int64), -1 - source_T)
            for row_T, source_T in zip(rows, self.sources, strict=True)
        ]

    def select(self, rows: Sequence[int]) -> Self:
        """Those of some rows, which may need fewer images."""
        return replace(
            self,
            sources=tuple(self.sources[row] for row in rows),
            positions=tuple(self.positions[row] for row in rows),
        )


def refuse_unseen_images(batch: Experience, tokens: ImageTokens) -> None:
    """Refuses rows whose prompts show images, in a batch without the column of them.

    Else a model would take their places for words, and say nothing.

    Args:
        batch: With the columns tokens and prompt_lengths.
        tokens: Of the model.

    Raises:
        ImageInvalidError: Names the first such row.
    """
    rows = zip(batch["tokens"].rows(), batch["prompt_lengths"].values.tolist(), strict=True)
    for number, (row_T, prompt) in enumerate(rows):
        if bool((row_T[:prompt] == tokens.placeholder).any()):
            raise ImageInvalidError(
                f"the prompt of row {number} shows images, but the rows have no column 'images': "
                "send it with them"
            )


def _sources(
    row_T: torch.Tensor,
    places: Sequence[int],
    images: Sequence[PromptImage],
    tokens: ImageTokens,
    starts: dict[str, int],
) -> torch.Tensor:
    """Where each token of a row's images comes from."""
    source_T = torch.full((len(row_T),), -1, dtype=torch.int64)
    for image, place in zip(images, places, strict=True):
        length, start = tokens.number(image.grid), starts[image.sha256]
        source_T[place : place + length] = torch.arange(start, start + length)
    return source_T


@dataclass(frozen=True, slots=True)
class PackedImages:
    """The images of packed rows, or of this rank's part of them."""

    images: tuple[PromptImage, ...]
    places_M: torch.Tensor
    """int64, in the tokens of the pass."""
    index_M: torch.Tensor
    """int64, among F: what stands there."""

    @classmethod
    def of(cls, rows: RowImages, source_S: torch.Tensor) -> Self | None:
        """Of a pass over tokens of these sources, without the images that it lacks.

        None where it has none.
        """
        places_M = (source_S >= 0).nonzero().flatten()
        if not len(places_M):
            return None
        source_M = source_S[places_M].numpy()
        lengths = np.array([rows.tokens.number(image.grid) for image in rows.images])
        ends = lengths.cumsum()
        owner_M = np.searchsorted(ends, source_M, side="right")
        needed, new_M = np.unique(owner_M, return_inverse=True)
        kept = lengths[needed]
        new_starts = kept.cumsum() - kept
        index_M = source_M - (ends - lengths)[owner_M] + new_starts[new_M]
        images = tuple(rows.images[one] for one in needed)
        return cls(images, places_M, torch.from_numpy(index_M))

    def to(self, device: torch.device | str) -> Self:
        """The same on a device."""
        return replace(
            self, places_M=sent(self.places_M, device), index_M=sent(self.index_M, device)
        )
