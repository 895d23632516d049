"""How a row names an image: a path below a folder, or a data URL that holds it.

Raw bytes of a table become a data URL (RFC 2397), so that a row stays text.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolemesh.engine.images.prompt_images import ImageInvalidError, data_url

DATA = "data:"
"""Begins a URL that holds what it names (RFC 2397)."""
_BASE64 = ";base64"
_SHOWN = 80
"""Most characters of a reference that a message shows."""
_KEYS = {"bytes", "path"}
"""Of an object as Hugging Face's `datasets` writes an image."""


def reference_of(value: Any) -> str:
    """The text by which a row keeps an image.

    Args:
        value: A path, a data URL, the bytes of a file, or an object with `bytes` and `path`, of
            which one may be null; where both are given, the bytes count.

    Raises:
        ImageInvalidError: It is something else.
    """
    if isinstance(value, Mapping) and value and set(value) <= _KEYS:
        held = value.get("bytes")
        value = value.get("path") if held is None else held
    if isinstance(value, bytes):
        return data_url(value)
    if isinstance(value, str) and value:
        return value
    raise ImageInvalidError(
        f"is {_kind_of(value)}: give a path, a data URL, the bytes of a file, or an object with "
        "the keys bytes and path"
    )


def shown(reference: str) -> str:
    """A reference for messages."""
    return repr(reference if len(reference) <= _SHOWN else f"{reference[:_SHOWN]}...")


def data_of(reference: str, folder: Path | None, max_bytes: int) -> bytes:
    """The bytes of the file.

    Args:
        reference: What `reference_of` made.
        folder: Below which paths lie, links resolved; None: there may be none.
        max_bytes: Most bytes.

    Raises:
        ImageInvalidError: There is no such file below the folder, it cannot be read, it has more
            bytes, or the URL holds no bytes.
    """
    if reference[: len(DATA)].lower() == DATA:
        return _held(reference, max_bytes)
    file = _file(reference, folder)
    try:
        size = file.stat().st_size
        if size > max_bytes:
            raise _too_large(reference, size, max_bytes)
        with file.open("rb") as opened:
            # It may have grown meanwhile.
            data = opened.read(max_bytes + 1)
    except OSError as error:
        raise ImageInvalidError(
            f"{shown(reference)} cannot be read ({error.strerror}): check it"
        ) from error
    if len(data) > max_bytes:
        raise _too_large(reference, len(data), max_bytes)
    return data


def _held(reference: str, max_bytes: int) -> bytes:
    """The bytes that a data URL holds."""
    head, comma, text = reference.partition(",")
    if not comma or not head.lower().endswith(_BASE64):
        raise ImageInvalidError(
            f"{shown(reference)} is no data URL with bytes: write data:image/png;base64, and the "
            "bytes in base64 behind it"
        )
    # Four characters are three bytes, less what fills the last three up.
    size = len(text) // 4 * 3 - text[-2:].count("=")
    if size > max_bytes:
        raise _too_large(reference, size, max_bytes)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageInvalidError(
            f"{shown(reference)} is no base64 behind its comma ({error}): write it anew"
        ) from error


def _file(reference: str, folder: Path | None) -> Path:
    """The file of a path, which lies below the folder with all links resolved."""
    if "://" in reference:
        raise ImageInvalidError(
            f"{shown(reference)} is an address, and services fetch nothing: fetch it before, and "
            "give a path below data.images.folder"
        )
    if folder is None:
        raise ImageInvalidError(
            f"{shown(reference)} is a path, but data.images.folder is not given: give the folder "
            "below which images lie"
        )
    try:
        root, file = folder.resolve(), (folder / reference).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise ImageInvalidError(f"{shown(reference)} is no path ({error}): correct it") from error
    if not file.is_relative_to(root):
        raise ImageInvalidError(
            f"{shown(reference)} leads to {str(file)!r}, out of data.images.folder "
            f"{str(folder)!r}: give a path below that, without links out of it"
        )
    if not file.is_file():
        raise ImageInvalidError(
            f"{shown(reference)} is no file below data.images.folder {str(folder)!r}: check both"
        )
    return file


def _too_large(reference: str, size: int, max_bytes: int) -> ImageInvalidError:
    return ImageInvalidError(
        f"{shown(reference)} has {size} bytes, more than {max_bytes}: make it smaller, or raise "
        "data.images.max_bytes"
    )


def _kind_of(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"an object with {', '.join(map(str, value)) or 'nothing'}"
    return "empty" if value == "" else f"a value of type {type(value).__name__}"
