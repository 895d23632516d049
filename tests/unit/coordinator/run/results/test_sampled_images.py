"""Images of samples: which files people are shown, and what is said of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rolemesh.engine.images.prompt_images import PromptImage, data_url, images_text
from rolemesh.rpc.errors import CapacityError
from rolemesh.rpc.experience.columns import ColumnData, Columns
from rolemesh.rpc.samples import images as sampled_images
from rolemesh.rpc.samples import rows as sampled_rows
from rolemesh.rpc.samples.images import (
    MAX_IMAGE_BYTES,
    MAX_NAMED,
    MAX_SHOWN,
    MAX_STEP_BYTES,
    StepOfImages,
)
from rolemesh.rpc.samples.rows import fetch_samples
from rolemesh.v1 import experience_pb2

PNG = b"\x89PNG\r\n\x1a\n"


def image(name: str, size: int = 40, head: bytes = PNG) -> PromptImage:
    return PromptImage.of((head + name.encode()).ljust(size, b"."), (1, 2, 2))


def told_of(*rows: Sequence[PromptImage]) -> list[list[tuple[str, int, bool]]]:
    """Of each row's images the digest, the size and whether the file is there."""
    step = StepOfImages()
    found = [step.row(images_text(row).encode(), at).images for at, row in enumerate(rows)]
    for row, images in zip(found, rows, strict=True):
        for one, given in zip(row, images, strict=False):
            assert one.url in ("", data_url(given.data))
    return [[(one.sha256, one.num_bytes, bool(one.url)) for one in row] for row in found]


def test_each_file_is_carried_once_and_named_by_every_row_that_shows_it() -> None:
    red, blue = image("red"), image("blue")
    assert told_of([red, blue], [], [blue, red]) == [
        [(red.sha256, 40, True), (blue.sha256, 40, True)],
        [],
        [(blue.sha256, 40, False), (red.sha256, 40, False)],
    ]


def test_a_fifth_image_and_a_large_one_and_one_of_no_known_type_are_named() -> None:
    many = [image(str(number)) for number in range(MAX_NAMED + 3)]
    (row,) = told_of(many)
    assert [is_there for *_, is_there in row] == [True] * MAX_SHOWN + [False] * 60
    largest, larger = image("a", MAX_IMAGE_BYTES), image("b", MAX_IMAGE_BYTES + 1)
    foreign = image("c", head=b"<svg>")
    (row,) = told_of([largest, larger, foreign])
    assert row == [
        (largest.sha256, MAX_IMAGE_BYTES, True),
        (larger.sha256, MAX_IMAGE_BYTES + 1, False),
        (foreign.sha256, 40, False),
    ]


def test_the_files_of_a_step_are_bounded_together() -> None:
    full = MAX_STEP_BYTES // MAX_IMAGE_BYTES
    rows = [[image(str(number), MAX_IMAGE_BYTES)] for number in range(full + 1)]
    found = told_of(*rows, rows[0])
    assert [row[0][2] for row in found] == [True] * full + [False, False]


@pytest.mark.parametrize("text", [b"{", b"[]x", b"\xff"])
def test_what_is_no_image_is_refused_with_the_row(text: bytes) -> None:
    with pytest.raises(ValueError, match="column images of row 7: "):
        StepOfImages().row(text, 7)


@pytest.mark.parametrize("has_images", [True, False])
async def test_images_are_fetched_a_row_at_a_time_and_a_row_that_is_too_large_says_so(
    has_images: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    red = image("red")
    texts = [images_text([red]), "", images_text([red])]
    columns = Columns(
        {
            "tokens": ColumnData.sequence([[7, 8]] * 3),
            "prompt_lengths": ColumnData.row([1] * 3, np.int64),
            **({"images": ColumnData.text(texts)} if has_images else {}),
        }
    )
    asked: list[tuple[list[str], Any]] = []

    async def fetch(
        _: object, reference: object, names: Sequence[str], rows: Any = None, **__: Any
    ) -> Columns:
        asked.append((list(names), rows))
        if (list(names), rows) == (["images"], [0]):
            raise CapacityError("too large", reason="FETCH_TOO_LARGE")
        return Columns({name: columns[name] for name in names}).select(rows)

    for module in (sampled_rows, sampled_images):
        monkeypatch.setattr(module, "fetch_columns", fetch)
    schemas = [experience_pb2.ColumnSchema(name=name) for name in columns]
    group = experience_pb2.ColumnGroup(columns=schemas)
    reference = experience_pb2.ExperienceRef(num_rows=3, groups=[group])

    async def fetched(**options: Any) -> Any:
        asked.clear()
        return await fetch_samples(
            lambda _: pytest.fail("nobody is asked"), reference, 3, **options
        )

    first, second, third = await fetched()
    if not has_images:
        assert asked == [(["tokens", "prompt_lengths"], [0, 1, 2])]
        assert not first.images
        assert not first.has_large_images
        return
    assert [names for names, _ in asked] == [["tokens", "prompt_lengths"], *[["images"]] * 3]
    assert (len(first.images), first.has_large_images) == (0, True)
    assert (len(second.images), second.has_large_images) == (0, False)
    # The row that carried nothing has not carried it.
    assert [one.url for one in third.images] == [data_url(red.data)]
    assert not any(one.images for one in await fetched(with_images=False))
    assert len(asked) == 1
