"""Images as data URLs: of which type a file is said to be."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image
from support.tiny_images import noise

from rolemesh.engine.images.prompt_images import data_url


@pytest.mark.parametrize(
    ("name", "media_type"),
    [
        ("PNG", "image/png"),
        ("JPEG", "image/jpeg"),
        ("WEBP", "image/webp"),
        # Of no format that is read.
        ("BMP", "application/octet-stream"),
    ],
)
def test_a_file_is_of_the_type_that_its_first_bytes_say(name: str, media_type: str) -> None:
    file = io.BytesIO()
    Image.fromarray(noise()).save(file, name)
    head, text = data_url(file.getvalue()).split(",")
    assert head == f"data:{media_type};base64"
    assert base64.b64decode(text) == file.getvalue()
