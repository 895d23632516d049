"""A tiny model of images, a folder of pictures, and rows loaded with both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.image_loading import SMALL, WIDE, Loading
from support.tiny_images import write_tiny_image_model

from rolemesh.engine.data import image_rows
from rolemesh.engine.images.decoding import ImageReader
from rolemesh.engine.model_folders.pretrained import load_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_image_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return load_tokenizer(model)


@pytest.fixture(scope="module")
def one_reader() -> Iterator[None]:
    """One process reads the images of all tests; each load of rows would start its own."""
    readers: dict[int, ImageReader] = {}

    def reader(*, max_pixels: int) -> ImageReader:
        return readers.setdefault(max_pixels, ImageReader(max_pixels=max_pixels))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_rows, "ImageReader", reader)
        yield
    for one in readers.values():
        one.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "pictures"
    (made / "deep").mkdir(parents=True)
    (made / "wide.png").write_bytes(WIDE)
    (made / "deep" / "small.png").write_bytes(SMALL)
    return made


@pytest.fixture
def load(model: Path, tokenizer: Any, tmp_path: Path, folder: Path, one_reader: None) -> Loading:
    return Loading(model, tokenizer, tmp_path, folder)
