"""Images of sampled rows for people: within bounds, and each file once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rolemesh.engine.images.prompt_images import (
    ImageInvalidError,
    PromptImage,
    data_url,
    images_of,
    media_type,
)
from rolemesh.rpc.channel import MeshChannel
from rolemesh.rpc.errors import CapacityError
from rolemesh.rpc.experience.column_fetch import fetch_columns
from rolemesh.v1 import coordinator_pb2, experience_pb2

IMAGES = "images"
"""Column of a text a row: the images of its prompt."""

MAX_SHOWN = 4
"""Images of a row that are shown."""

MAX_NAMED = 64
"""Images of a row that are told of at all."""

MAX_IMAGE_BYTES = 256 * 2**10
"""A larger file is named, and not shown."""

MAX_STEP_BYTES = 2**20
"""Of the files of a step that are shown; further ones are named. A coordinator keeps those of 64
steps."""

MAX_FETCHED_BYTES = 16 * 2**20
"""Of a row with more, no image is told of."""


@dataclass(frozen=True, slots=True)
class RowOfImages:
    """What people are told of a row's images."""

    images: tuple[coordinator_pb2.SampledImage, ...] = ()
    are_large: bool = False
    """Whether there are some that were too large to be fetched."""


async def fetch_images(
    channel_to: Callable[[str], MeshChannel],
    reference: experience_pb2.ExperienceRef,
    rows: Sequence[int],
    *,
    timeout_s: float | None = None,
) -> list[RowOfImages]:
    """What is told of the images of some rows, of a batch with the column IMAGES.

    Args:
        channel_to: As `fetch_columns`.
        reference: The batch.
        rows: Which of its rows.
        timeout_s: Longest time of each call; None: the method's.

    Raises:
        RolemeshError: As `fetch_columns` does.
        ValueError: The images of a row cannot be read; names the row.
    """
    # One after another: each may be large, and only a little is kept of it.
    shown = StepOfImages()
    found = []
    for row in rows:
        try:
            columns = await fetch_columns(
                channel_to,
                reference,
                [IMAGES],
                [row],
                max_bytes=MAX_FETCHED_BYTES,
                timeout_s=timeout_s,
            )
        except CapacityError as error:
            if error.reason != "FETCH_TOO_LARGE":
                raise
            found.append(RowOfImages(are_large=True))
            continue
        found.append(shown.row(columns[IMAGES].rows()[0].tobytes(), row))
    return found


class StepOfImages:
    """Rows of one step, of which each file is carried once."""

    def __init__(self) -> None:
        """Nothing is carried yet."""
        self._carried: set[str] = set()
        self._free_bytes = MAX_STEP_BYTES

    def row(self, encoded: bytes, row: int) -> RowOfImages:
        """What is told of the next row.

        Args:
            encoded: Its value in the column IMAGES.
            row: Its number, for messages.

        Raises:
            ValueError: It cannot be read.
        """
        try:
            images = images_of(encoded.decode())
        except (ImageInvalidError, UnicodeDecodeError) as error:
            raise ValueError(f"column {IMAGES} of row {row}: {error}") from error
        return RowOfImages(
            tuple(
                coordinator_pb2.SampledImage(
                    sha256=image.sha256,
                    num_bytes=len(image.data),
                    url=self._url(image) if number < MAX_SHOWN else "",
                )
                for number, image in enumerate(images[:MAX_NAMED])
            )
        )

    def _url(self, image: PromptImage) -> str:
        size = len(image.data)
        is_image = media_type(image.data).startswith("image/")
        if (
            image.sha256 in self._carried
            or not is_image
            or size > min(MAX_IMAGE_BYTES, self._free_bytes)
        ):
            return ""
        self._carried.add(image.sha256)
        self._free_bytes -= size
        return data_url(image.data)
