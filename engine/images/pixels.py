"""Reads files of images by Pillow: their sizes, and their pixels as RGB.

A file comes from strangers, and Pillow's readers are written in C: only the process that
`decoding.ImageReader` confines calls this.
"""

from __future__ import annotations

import importlib
import io
import warnings
from typing import Any

from PIL import ExifTags, Image

from rolemesh.engine.images.prompt_images import ImageInvalidError

FORMATS = ("PNG", "JPEG", "WEBP")
"""Names that Pillow gives the formats that are read."""

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What brings an image upright, by the value of Orientation in its EXIF (EXIF 2.32, 4.6.4)."""
_LIES = (5, 6, 7, 8)
"""Values of those whose width becomes the height."""

# Readers are loaded before the first image, whose time would count them. Those that Pillow loads
# first have PNG and JPEG. For a format that is not there it would load all that it has.
Image.preinit()
importlib.import_module("PIL.WebPImagePlugin")
# Our bound is checked before a pixel is decoded; Pillow's own would only warn.
Image.MAX_IMAGE_PIXELS = None


def size_of(data: bytes, max_pixels: int) -> tuple[int, int]:
    """Width and height as the image is shown, from its header alone.

    Raises:
        ImageInvalidError: See `_opened`.
    """
    image = _opened(data, max_pixels)
    width, height = image.size
    return (height, width) if _orientation(image) in _LIES else (width, height)


def rgb_of(data: bytes, max_pixels: int) -> tuple[int, int, bytes]:
    """Width, height and the pixels, row by row, three bytes each: red, green, blue.

    Transparent parts lie over white. Colour profiles are not applied, as no processor of a model
    applies them.

    Raises:
        ImageInvalidError: See `_opened`; or the file is cut off or damaged.
    """
    image = _opened(data, max_pixels)
    # Before the pixels: of a PNG Pillow would look for EXIF behind them too, which `size_of` does
    # not see.
    turn = _TURNS.get(_orientation(image))
    try:
        image.load()
    except MemoryError:
        raise
    except Exception as error:
        # Readers of formats raise errors of many kinds for damaged files.
        raise ImageInvalidError(
            f"cannot be decoded ({_words(error)}): the file is cut off or damaged; replace it"
        ) from error
    made = _on_white(image)
    if turn is not None:
        made = made.transpose(turn)
    return made.width, made.height, made.tobytes()


def _opened(data: bytes, max_pixels: int) -> Image.Image:
    """The image, of which only the header is read.

    Raises:
        ImageInvalidError: It is no PNG, JPEG or WebP file, is animated, or has too many pixels.
    """
    try:
        with warnings.catch_warnings():
            # Of metadata that nobody asks for.
            warnings.simplefilter("ignore")
            image: Any = Image.open(io.BytesIO(data), formats=FORMATS)
    except MemoryError:
        raise
    except Exception as error:
        raise ImageInvalidError(
            "is no PNG, JPEG or WebP file that can be read: convert it to one of these"
        ) from error
    width, height = image.size
    if width * height > max_pixels:
        raise ImageInvalidError(
            f"has {width} x {height} pixels, more than {max_pixels}: make it smaller, or raise "
            "data.images.max_pixels"
        )
    # A JPEG may hold a second picture beside the first, e.g. of a phone's other lens.
    frames = getattr(image, "n_frames", 1) if image.format in ("PNG", "WEBP") else 1
    if frames > 1:
        raise ImageInvalidError(f"is animated ({frames} frames): give one frame of it as a file")
    opened: Image.Image = image
    return opened


def _orientation(image: Image.Image) -> int:
    """The value of Orientation in what stands before the pixels; 1 is upright."""
    try:
        # Not the method of a format's own class: that of PNG decodes the pixels first.
        exif = Image.Image.getexif(image)
        return int(exif.get(ExifTags.Base.Orientation, 1))
    except Exception:
        # EXIF that cannot be read turns nothing, in viewers as here.
        return 1


def _on_white(image: Image.Image) -> Image.Image:
    """The image as RGB."""
    if image.mode.startswith("I"):
        # Of 16 bits the upper 8; converting would cut off at 255.
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if not image.has_transparency_data:
        return image.convert("RGB")
    layered = image.convert("RGBA")
    white = Image.new("RGBA", layered.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, layered).convert("RGB")


def _words(error: Exception) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__
