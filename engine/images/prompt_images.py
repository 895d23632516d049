"""The images of a prompt, as they travel: bytes by their content, never as pixel values.

A row of the column `images` is a text, a JSON list with an object for each image, in the order in
which the prompt shows them: `sha256` (hex, of the bytes), `grid` ([1, height, width] in patches, as
the processor of the model cuts it), `data` (the file's bytes, base64) and `processor` (fingerprint
of that processor, if who wrote the row says it). A row without images is the empty text.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

Grid: TypeAlias = tuple[int, int, int]
"""Patches of an image: 1 (frames), rows, columns; before neighbours are merged to one token."""

_SHOWN_DIGITS = 12


class ImageInvalidError(ValueError):
    """An image that cannot be read, or that does not fit what stands beside it."""


@dataclass(frozen=True, slots=True)
class PromptImage:
    """One image of a prompt."""

    data: bytes
    """The file as it was given: PNG, JPEG or WebP."""
    sha256: str
    """Hex, of the data: two images are the same if these are."""
    grid: Grid
    processor: str = ""
    """Fingerprint of the processor that cut it so; empty: not said."""

    @classmethod
    def of(cls, data: bytes, grid: Grid, processor: str = "") -> PromptImage:
        """The image of these bytes."""
        return cls(data, hashlib.sha256(data).hexdigest(), grid, processor)


def media_type(data: bytes) -> str:
    """Media type of a file by its first bytes; of formats that are not read a general one."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return "application/octet-stream"


def data_url(data: bytes) -> str:
    """A file as a data URL (RFC 2397)."""
    return f"data:{media_type(data)};base64,{base64.b64encode(data).decode()}"


class _Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: str
    grid: tuple[int, int, int]
    data: str
    processor: str = ""


_DECODER = msgspec.json.Decoder(list[_Written])


def images_text(images: Sequence[PromptImage]) -> str:
    """A row of the column `images`."""
    if not images:
        return ""
    written = [
        _Written(one.sha256, one.grid, base64.b64encode(one.data).decode(), one.processor)
        for one in images
    ]
    return msgspec.json.encode(written).decode()


def images_of(text: str) -> tuple[PromptImage, ...]:
    """Reads a row of the column `images`.

    Raises:
        ImageInvalidError: It is not what `images_text` writes, or bytes are not of their digest.
    """
    if not text:
        return ()
    try:
        written = _DECODER.decode(text)
        images = tuple(
            PromptImage.of(base64.b64decode(one.data, validate=True), one.grid, one.processor)
            for one in written
        )
    except (msgspec.DecodeError, binascii.Error) as error:
        raise ImageInvalidError(
            f"a row of the column 'images' cannot be read ({error}): it is a JSON list of objects "
            "with sha256, grid, data (base64) and perhaps processor"
        ) from error
    for image, one in zip(images, written, strict=True):
        if image.sha256 != one.sha256:
            raise ImageInvalidError(
                f"an image's bytes have the SHA-256 {image.sha256[:_SHOWN_DIGITS]}, but it is said "
                f"to be {one.sha256[:_SHOWN_DIGITS]}: they changed on their way"
            )
        if min(image.grid) < 1 or image.grid[0] != 1:
            raise ImageInvalidError(
                f"an image's grid is {list(image.grid)}: give [1, rows, columns], in patches"
            )
    return images
