"""Images that clients of an endpoint send in their messages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rolemesh.engine.data.image_rows import DataImages
from rolemesh.engine.data.rows import PromptRow
from rolemesh.engine.images.decoding import ImageReader
from rolemesh.engine.images.openai_parts import without_urls
from rolemesh.engine.images.processing import PROCESSOR_FILE, ImageProcessor, image_tokens_of
from rolemesh.engine.images.prompt_images import ImageInvalidError, PromptImage
from rolemesh.engine.specs.data import ImagesSpec


class ClientImages:
    """Reads images of messages, within bounds. Owner: the endpoint's loop.

    Images are read by one confined process, as those of the data are, and nothing is opened that a
    client names.
    """

    def __init__(self, folder: Path, bounds: ImagesSpec) -> None:
        """Takes the processor of a folder; starts nothing yet.

        Raises:
            ModelFolderError: The folder's model takes no images, or has no processor.
        """
        self._max_per_prompt = bounds.max_per_prompt
        self._images = DataImages(
            processor=ImageProcessor(folder),
            reader=ImageReader(max_pixels=bounds.max_pixels),
            bounds=bounds,
        )

    @classmethod
    def of_folder(cls, folder: Path, sections: Sequence[ImagesSpec]) -> ClientImages | None:
        """For the model of a folder; None where it takes no images, or has no processor.

        Args:
            folder: Of the model.
            sections: `images` of the run's data, of which the widest bounds count; none: the
                defaults do.
        """
        if image_tokens_of(folder) is None or not (folder / PROCESSOR_FILE).is_file():
            return None
        found = sections or (ImagesSpec(),)
        bounds = ImagesSpec(
            max_pixels=max(one.max_pixels for one in found),
            max_bytes=max(one.max_bytes for one in found),
            max_per_prompt=max(one.max_per_prompt for one in found),
        )
        return cls(folder, bounds)

    async def read(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], tuple[PromptImage, ...]]:
        """Turns with a part {"type": "image"} in each image's place, and the images in order.

        Raises:
            ImageInvalidError: A message is not what it should be, or there are too many images.
            DataInvalidError: An image cannot be read, or is beyond a bound.
        """
        turns, urls = without_urls(messages)
        if len(urls) > self._max_per_prompt:
            raise ImageInvalidError(
                f"messages show {len(urls)} images, more than {self._max_per_prompt}: send fewer, "
                "or raise data.images.max_per_prompt"
            )
        row = PromptRow(messages=turns, images=urls, where="messages")
        # The process that reads them may be kept busy by an image, and the loop must not be.
        return turns, await asyncio.to_thread(self._images.of, row)

    def expanded(self, tokens: Sequence[int], images: Sequence[PromptImage]) -> list[int]:
        """Tokens of a rendered prompt in which each image has all of its places.

        Raises:
            DataInvalidError: There are more places than images, or fewer.
        """
        return self._images.expanded(tokens, images, PromptRow(messages=(), where="messages"))

    def close(self) -> None:
        """Ends the process that reads."""
        self._images.reader.close()
