"""From pixels to the patches that a model's tower takes, by the processor of its folder.

transformers' own processor, in its form for Pillow: it needs no torchvision, and every role of a
run has the same one, so that all see the same numbers. Its settings and versions are in the run's
fingerprint.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rolemesh.engine.images.prompt_images import Grid, ImageInvalidError
from rolemesh.engine.layout.family_records import TEXT_PARTS
from rolemesh.engine.model_folders.model_files import ModelFolderError, read_whole_config

PROCESSOR_FILE = "preprocessor_config.json"
"""Holds the settings of a folder's processor."""

_MERGE = 2
"""What transformers takes where a config.json does not say."""


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """How an image stands among a row's tokens."""

    placeholder: int
    """Id of the token in whose places the tower's output stands."""
    merge: int
    """So many patches, squared, become one token."""

    def number(self, grid: Grid) -> int:
        """Places that an image takes."""
        return grid[0] * (grid[1] // self.merge) * (grid[2] // self.merge)

    def expanded(self, tokens: Sequence[int], grids: Sequence[Grid]) -> list[int]:
        """Tokens in which each image has all of its places.

        Args:
            tokens: As the chat template has them: one placeholder for each image.
            grids: Of the images, in their order.

        Raises:
            ImageInvalidError: There are more placeholders than images, or fewer.
        """
        found = tokens.count(self.placeholder)
        if found != len(grids):
            raise ImageInvalidError(
                f"the chat template makes {found} places for {len(grids)} images: let each image "
                'be a part {"type": "image"} of a message, and no text hold the token itself'
            )
        following = iter(grids)
        longer: list[int] = []
        for token in tokens:
            times = self.number(next(following)) if token == self.placeholder else 1
            longer += [token] * times
        return longer


def image_tokens_of(folder: Path) -> ImageTokens | None:
    """How images stand among the tokens of a folder's model; None for one that takes none.

    Raises:
        ModelFolderError: See `read_whole_config`.
    """
    config = read_whole_config(folder)
    if config["model_type"] not in TEXT_PARTS:
        return None
    vision = config.get("vision_config") or {}
    return ImageTokens(config["image_token_id"], vision.get("spatial_merge_size", _MERGE))


class ImageProcessor:
    """The processor of a model folder.

    Example: an image of 84 x 112 pixels, patches of 14 x 14, 2 x 2 of them merged::

        processor.grid(width=112, height=84)  # (1, 6, 8)
        processor.tokens.number((1, 6, 8))  # 12
    """

    def __init__(self, folder: Path) -> None:
        """Reads the folder's settings.

        Raises:
            ModelFolderError: The folder's model takes no images, or has no processor.
        """
        tokens = image_tokens_of(folder)
        if tokens is None:
            family = read_whole_config(folder)["model_type"]
            raise ModelFolderError(
                f"model.path {str(folder)!r} is a {family} model, and images are "
                f"served for {', '.join(TEXT_PARTS)}: take such a model, or data without images"
            )
        if not (folder / PROCESSOR_FILE).is_file():
            raise ModelFolderError(
                f"model.path {str(folder)!r} has no {PROCESSOR_FILE}, which says how its images "
                "are cut: copy the model's processor files into it"
            )
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        self._processor: Any = Qwen2VLImageProcessorPil.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        if self._processor.merge_size != tokens.merge:
            raise ModelFolderError(
                f"model.path {str(folder)!r}: {PROCESSOR_FILE} has the merge_size "
                f"{self._processor.merge_size}, but its config.json the spatial_merge_size "
                f"{tokens.merge}: copy the folder again"
            )
        self.tokens = tokens

    @property
    def patch_size(self) -> int:
        """Pixels of a side of a patch."""
        size: int = self._processor.patch_size
        return size

    def grid(self, *, width: int, height: int) -> Grid:
        """Patches of an image of so many pixels.

        Raises:
            ImageInvalidError: It is more than 200 times as long as wide, or the other way round.
        """
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        patch = self._processor.patch_size
        try:
            rows, columns = smart_resize(
                height,
                width,
                patch * self.tokens.merge,
                min_pixels=self._processor.size["shortest_edge"],
                max_pixels=self._processor.size["longest_edge"],
            )
        except ValueError as error:
            raise ImageInvalidError(f"an image of {width} x {height} pixels: {error}") from error
        return 1, rows // patch, columns // patch

    def patches(self, pixels_HWC: np.ndarray) -> tuple[np.ndarray, Grid]:
        """What the tower takes of an image.

        Args:
            pixels_HWC: uint8 [height, width, 3], RGB.

        Returns:
            float32 [patches, values of a patch], and the grid.
        """
        from PIL import Image

        made = self._processor(images=[Image.fromarray(pixels_HWC)], return_tensors="np")
        (grid,) = made["image_grid_thw"].tolist()
        return made["pixel_values"].astype(np.float32, copy=False), tuple(grid)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex; equal where the same pixels become the same patches."""
        import PIL
        import transformers

        said = {
            "processor": json.loads(self._processor.to_json_string()),
            "transformers": transformers.__version__,
            "pillow": PIL.__version__,
        }
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
