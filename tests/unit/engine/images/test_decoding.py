"""Images from strangers, decoded in a process that can do nothing else."""

from __future__ import annotations

import io
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.tiny_images import noise, plain, png

from rolemesh.engine.images.decoding import ImageReader
from rolemesh.engine.images.pixels import FORMATS
from rolemesh.engine.images.prompt_images import ImageInvalidError
from rolemesh.engine.sandbox.host import Sandbox, find_sandbox

SANDBOX = find_sandbox("auto")
RED, WHITE = (255, 0, 0), (255, 255, 255)
JPEG_ERROR = 3
"""Most by which a plain colour changes: JPEG keeps colours in 8 bits of another space."""


@pytest.fixture(scope="module")
def reader() -> Iterator[ImageReader]:
    with ImageReader(max_pixels=1 << 20) as opened:
        yield opened


def saved(image: Image.Image, kind: str, **settings: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_lossless_files_come_back_to_the_bit(reader: ImageReader, kind: str) -> None:
    drawn = noise(width=33, height=21)
    data = saved(Image.fromarray(drawn), kind, lossless=True)
    assert reader.size(data) == (33, 21)
    found = reader.pixels(data)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, drawn)


@pytest.mark.parametrize(
    ("mode", "color"), [("CMYK", (0, 255, 255, 0)), ("L", 200), ("1", 1), ("RGB", RED)]
)
def test_colours_of_a_jpeg_become_rgb(reader: ImageReader, mode: str, color: Any) -> None:
    image = Image.new(mode, (16, 8), color)
    expected = {"CMYK": RED, "L": (200, 200, 200), "1": WHITE, "RGB": RED}[mode]
    found = reader.pixels(saved(image, "JPEG", quality=100))
    assert found.shape == (8, 16, 3)
    assert np.abs(found.astype(int) - np.array(expected)).max() <= JPEG_ERROR


def test_palettes_grey_and_sixteen_bits_become_rgb(reader: ImageReader) -> None:
    palette = Image.fromarray(plain(RED, width=4, height=4)).quantize(4)
    assert (reader.pixels(saved(palette, "PNG")) == RED).all()
    deep = Image.fromarray(np.array([[0, 0x8000, 0xFFFF]], dtype=np.uint16))
    found = reader.pixels(saved(deep, "PNG"))
    np.testing.assert_array_equal(found[0], [[0] * 3, [128] * 3, [255] * 3])


@pytest.mark.parametrize("mode", ["RGBA", "LA", "palette"])
def test_transparent_parts_lie_over_white(reader: ImageReader, mode: str) -> None:
    layered = Image.new("RGBA", (2, 1), (0, 0, 0, 255))
    layered.putpixel((1, 0), (0, 0, 0, 0))
    if mode == "palette":
        indexed = Image.new("P", (2, 1))
        indexed.putpalette([0, 0, 0, 9, 9, 9])
        indexed.putpixel((1, 0), 1)
        data = saved(indexed, "PNG", transparency=1)
    else:
        data = saved(layered.convert(mode), "PNG")
    np.testing.assert_array_equal(reader.pixels(data)[0], [(0, 0, 0), WHITE])


def test_half_transparent_is_mixed_with_white(reader: ImageReader) -> None:
    data = saved(Image.new("RGBA", (1, 1), (0, 0, 0, 51)), "PNG")
    # 51 / 255 is a fifth of black.
    np.testing.assert_array_equal(reader.pixels(data)[0, 0], [204, 204, 204])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_the_image(reader: ImageReader, kind: str, orientation: int) -> None:
    # Quarters of plain colours, and sides of different lengths.
    shown = np.zeros((32, 64, 3), dtype=np.uint8)
    shown[:16, :32], shown[:16, 32:], shown[16:, :32] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    # What a camera would store, by the definition of each value: where row 0 and column 0 lie.
    stored = {
        1: shown,
        2: shown[:, ::-1],
        3: shown[::-1, ::-1],
        4: shown[::-1],
        5: shown.transpose(1, 0, 2),
        6: shown.transpose(1, 0, 2)[::-1],
        7: shown.transpose(1, 0, 2)[::-1, ::-1],
        8: shown.transpose(1, 0, 2)[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.ascontiguousarray(stored))
    settings = {"quality": 100, "subsampling": 0} if kind == "JPEG" else {"lossless": True}
    data = saved(image, kind, exif=exif.tobytes(), **settings)
    assert reader.size(data) == (64, 32)
    found = reader.pixels(data).astype(int)
    assert found.shape == shown.shape
    assert np.abs(found - shown).max() <= JPEG_ERROR


def test_too_many_pixels_are_refused_before_they_are_decoded(reader: ImageReader) -> None:
    # 40000 x 40000 pixels in some hundred bytes: 4.8 GB, were they decoded.
    head = struct.pack(">IIBBBBB", 40000, 40000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""))
    )
    for ask in (reader.size, reader.pixels):
        with pytest.raises(ImageInvalidError, match=r"bomb has 40000 x 40000 pixels, more"):
            ask(bomb, "bomb")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_file_that_is_cut_off_is_refused(reader: ImageReader, kind: str) -> None:
    data = saved(Image.fromarray(noise()), kind)
    with pytest.raises(ImageInvalidError, match=r"row 3 .*: (convert|the file is cut off)"):
        reader.pixels(data[: len(data) // 2], "row 3")


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_animated_images_are_refused(reader: ImageReader, kind: str) -> None:
    frames = [Image.fromarray(noise(seed=seed)) for seed in range(3)]
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:])
    with pytest.raises(ImageInvalidError, match=r"is animated \(3 frames\): give one frame"):
        reader.size(data)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "PPM"])
def test_other_formats_are_refused(reader: ImageReader, kind: str) -> None:
    data = saved(Image.fromarray(noise()), kind)
    with pytest.raises(ImageInvalidError, match="is no PNG, JPEG or WebP file"):
        reader.size(data)


def test_no_image_has_its_digest_in_the_message(reader: ImageReader) -> None:
    # The SHA-256 of no bytes begins so.
    with pytest.raises(ImageInvalidError, match="the image with the SHA-256 e3b0c44298fc is no"):
        reader.size(b"")


def test_readers_are_loaded_before_the_first_image() -> None:
    """By a process that has opened none: its time would count them."""
    images = [saved(Image.new("RGB", (5, 4)), kind) for kind in FORMATS]
    code = (
        "import sys; from rolemesh.engine.images.pixels import size_of; before = set(sys.modules)\n"
        f"for data in {images}: assert size_of(data, 20) == (5, 4)\n"
        "print(*(name for name in set(sys.modules) - before if name.startswith('PIL.')))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []


def test_a_hanging_worker_costs_one_image() -> None:
    # Long enough for a first image on a machine with much else to do.
    with ImageReader(timeout_s=3.0) as reader:
        data = png(noise())
        reader.size(data)
        first = reader.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(ImageInvalidError, match=r"cat.png was not read.*no answer within 3"):
            reader.size(data, "cat.png")
        assert reader.size(data) == (112, 84)
        assert reader.pid != first


def test_a_killed_worker_costs_one_image() -> None:
    with ImageReader() as reader:
        data = png(noise())
        reader.size(data)
        first = reader.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        killing = threading.Timer(0.2, os.kill, (first, signal.SIGKILL))
        killing.start()
        with pytest.raises(ImageInvalidError, match=r"cat.png was not read.*ended \(code -9\)"):
            reader.size(data, "cat.png")
        killing.join()
        np.testing.assert_array_equal(reader.pixels(data), noise())


def test_the_worker_outlives_the_thread_that_asked_first() -> None:
    with ImageReader() as reader:
        data = png(noise())
        asking = threading.Thread(target=reader.size, args=(data,))
        asking.start()
        asking.join()
        first = reader.pid
        time.sleep(0.2)
        assert reader.size(data) == (112, 84)
        assert reader.pid == first


def test_closing_ends_the_worker() -> None:
    with ImageReader() as reader:
        reader.size(png(noise()))
        pid = reader.pid
        assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert reader.pid is None


def test_without_a_sandbox_it_works_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with ImageReader(Sandbox(kind="none", lacks="the control")) as reader:
        assert reader.size(png(noise())) == (112, 84)
    assert "images are decoded in the sandbox none (the control)" in caplog.text


@pytest.mark.skipif(not SANDBOX.is_there, reason=f"no sandbox here: {SANDBOX}")
def test_the_worker_reaches_no_file_and_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow is replaced by code that tries what a file that took the process over would."""
    secret = tmp_path / "secret"
    secret.write_text("x")
    listening = socket.create_server(("127.0.0.1", 0))
    package = tmp_path / "packages" / "PIL"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for name in ("ExifTags", "WebPImagePlugin"):
        (package / f"{name}.py").write_text("")
    tries = {
        "read": f"open({str(secret)!r}).read()",
        "write": f"open({str(tmp_path / 'made')!r}, 'w')",
        "connect": f"socket.create_connection(('127.0.0.1', {listening.getsockname()[1]}))",
    }
    (package / "Image.py").write_text(
        "import socket\n"
        "class Transpose:\n    pass\n"
        "for name in ('FLIP_LEFT_RIGHT', 'ROTATE_180', 'FLIP_TOP_BOTTOM', 'TRANSPOSE',\n"
        "             'ROTATE_270', 'TRANSVERSE', 'ROTATE_90'):\n"
        "    setattr(Transpose, name, 0)\n"
        "class Found:\n    size = (1, 1)\n    format = 'PNG'\n    n_frames = 1\n"
        f"TRIES = {tries!r}\n"
        "class Image:\n    pass\n"
        "def preinit():\n    pass\n"
        "def open(file, formats):\n"
        "    found = 0\n"
        "    import builtins\n"
        "    for number, code in enumerate(TRIES.values()):\n"
        "        try:\n"
        "            eval(code, {'open': builtins.open, 'socket': socket})\n"
        "        except OSError:\n"
        "            found += 1 << number\n"
        "    made = Found()\n"
        "    made.size = (1 + found, 1)\n"
        "    return made\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(package.parent), prepend=os.pathsep)
    with ImageReader(Sandbox(kind="none", lacks="the control")) as reader:
        assert reader.size(b"") == (1, 1), "nothing is refused without a sandbox"
    (tmp_path / "made").unlink()
    with ImageReader(SANDBOX) as reader:
        assert reader.size(b"") == (1 + 0b111, 1)
    assert not (tmp_path / "made").exists()
    listening.close()
