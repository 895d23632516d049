"""Rows with images that do not load: what is wrong, bounds, and paths out of their folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.image_loading import PART, SPEC, WIDE, Loading, first, url

from rolemesh.engine.data.prompts import load_prompts
from rolemesh.engine.data.rows import DataInvalidError
from rolemesh.engine.granted.grants import Grant, NotGrantedError
from rolemesh.engine.images.decoding import MAX_PIXELS
from rolemesh.engine.specs import ImagesSpec


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "<image><image>", "images": ["wide.png"]}, r"shows 2 images.*has 1"),
        ({"prompt": "<image>", "images": ["wide.png"] * 2}, r"shows 1 images.*has 2"),
        ({"prompt": [{"role": "user", "content": [PART]}], "images": []}, r"shows 1 .*has 0"),
        ({"prompt": "?", "images": ["wide.png"] * 9}, r"has 9 images, more than 8: .*per_prompt"),
        ({"prompt": "?", "images": [7]}, r"images\[0\] is a value of type int: give a path"),
        ({"prompt": "?", "images": [""]}, r"images\[0\] is empty: give a path"),
        ({"prompt": "?", "images": ["no.png"]}, r"'no.png' is no file below data.images.folder"),
        ({"prompt": "?", "images": ["deep"]}, r"'deep' is no file below"),
        ({"prompt": "?", "images": ["https://a.b/c.png"]}, r"an address, and services fetch"),
        ({"prompt": "?", "images": ["data:image/png,abc"]}, r"no data URL with bytes"),
        ({"prompt": "?", "images": ["data:;base64,ab!c"]}, r"no base64 behind its comma"),
        ({"prompt": "?", "images": ["data:;base64,YWJj"]}, r"is no PNG, JPEG or WebP file"),
        ({"prompt": "<|image_pad|>", "images": ["wide.png"]}, r"makes 2 places for 1 images"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video"}]}], "images": []},
            r"a part of type 'video'",
        ),
        (
            {"prompt": [{"role": "user", "content": [{**PART, "image": "a"}]}], "images": ["a"]},
            r"a part of type 'image' with image: a part is",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                    {"role": "user", "content": [PART]},
                    {"role": "assistant", "content": "c"},
                ],
                "images": ["wide.png"],
            },
            r"shows an image behind the first answer",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_row(
    load: Loading, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataInvalidError, match=rf"rows.jsonl, line 2: .*{message}"):
        load([{"prompt": "a", "images": []}, row])


def test_bounds_have_errors_of_their_own(load: Loading) -> None:
    row = {"prompt": "?", "images": ["wide.png"]}
    folder = str(load.folder)
    with pytest.raises(DataInvalidError, match=r"line 1: .*wide.png' has 112 x 84 pixels, more th"):
        load([row], images={"folder": folder, "max_pixels": 112 * 84 - 1})
    with pytest.raises(DataInvalidError, match=r"wide.png' has \d+ bytes, more than 99: .*max_byt"):
        load([row], images={"folder": folder, "max_bytes": 99})
    with pytest.raises(DataInvalidError, match=r"data:image/png.*has \d+ bytes, more than 99"):
        load([{**row, "images": url(WIDE)}], images={"max_bytes": 99})
    exact = {"folder": folder, "max_pixels": 112 * 84, "max_bytes": len(WIDE), "max_per_prompt": 1}
    assert len(first(load([row], images=exact)).images) == 1


def test_no_more_pixels_may_be_allowed_than_whoever_decodes_takes() -> None:
    assert ImagesSpec(max_pixels=MAX_PIXELS).max_pixels == MAX_PIXELS
    with pytest.raises(ValidationError, match=f"less than or equal to {MAX_PIXELS}"):
        ImagesSpec(max_pixels=MAX_PIXELS + 1)


def test_each_source_of_a_mixture_has_its_own_bounds(load: Loading, tmp_path: Path) -> None:
    row = json.dumps({"prompt": "?", "images": ["wide.png"]})
    (tmp_path / "one.jsonl").write_text(row)
    own = {"type": "jsonl", "path": str(tmp_path / "one.jsonl")}
    images = {"folder": str(load.folder)}
    sources = [
        {"data": {**own, "images": images}},
        {"data": {**own, "images": {**images, "max_pixels": 99}}},
    ]
    spec = SPEC.validate_python({"type": "mixture", "sources": sources})
    with pytest.raises(DataInvalidError, match=r"sources.1.data.path .*more than 99"):
        load_prompts(spec, tokenizer=load.tokenizer, seed=0, model=load.model)


@pytest.mark.parametrize("way", ["dots", "absolute", "link", "linked folder"])
def test_no_path_leads_out_of_the_folder(load: Loading, tmp_path: Path, way: str) -> None:
    outside = tmp_path / "outside.png"
    outside.write_bytes(WIDE)
    (load.folder / "link.png").symlink_to(outside)
    (load.folder / "up").symlink_to(tmp_path)
    name = {
        "dots": "../outside.png",
        "absolute": str(outside),
        "link": "link.png",
        "linked folder": "up/outside.png",
    }[way]
    with pytest.raises(DataInvalidError, match=r"leads to .*out of data.images.folder"):
        load([{"prompt": "?", "images": [name]}])


def test_a_link_within_the_folder_is_followed(load: Loading) -> None:
    os.symlink("wide.png", load.folder / "link.png")
    assert first(load([{"prompt": "?", "images": ["link.png"]}])).images[0].data == WIDE


def test_paths_need_the_folder(load: Loading) -> None:
    with pytest.raises(DataInvalidError, match=r"'wide.png' is a path, but data.images.folder is"):
        load([{"prompt": "?", "images": ["wide.png"]}], images={})


def test_the_folder_has_to_be_granted(load: Loading, tmp_path: Path) -> None:
    spec = SPEC.validate_python(
        {"type": "jsonl", "path": str(tmp_path / "a"), "images": {"folder": "/etc"}}
    )
    with pytest.raises(NotGrantedError, match=r"images\.folder is '/etc'"):
        Grant(folders=(tmp_path,)).check(spec, "data.")
