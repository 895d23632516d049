"""Tests that the page about images shows data that loads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from pydantic import TypeAdapter
from support.tiny_images import noise, png, write_tiny_image_model

from rolemesh.engine.data.prompts import load_prompts
from rolemesh.engine.model_folders.pretrained import load_tokenizer
from rolemesh.engine.specs import DataSpec, ImagesSpec

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "images.md").read_text()
SECTIONS: list[dict[str, Any]] = [
    yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)
]
SPEC: TypeAdapter[Any] = TypeAdapter(DataSpec)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pictures = tmp_path / "data" / "pictures"
    pictures.mkdir(parents=True)
    for name in ("heron", "wren"):
        (pictures / f"{name}.png").write_bytes(png(noise()))
    ((name, rows),) = re.findall(r"`([\w./]+)`:\n\n```json\n(.*?)^```", PAGE, re.M | re.S)
    (tmp_path / name).write_text(rows)
    table = pyarrow.table({"prompt": ["?"], "picture": [png(noise())]})
    pyarrow.parquet.write_table(table, tmp_path / "data" / "birds.parquet")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_examples_load(folder: Path) -> None:
    model = write_tiny_image_model(folder / "model")
    found = []
    for section in SECTIONS:
        prompts = load_prompts(
            SPEC.validate_python(section["data"]),
            tokenizer=load_tokenizer(model),
            seed=0,
            model=model,
        )
        assert prompts.num_filtered["train"] == 0
        rows = prompts.slice("train", 0, prompts.size("train"))
        found.append([len(one.images) for one in sorted(rows, key=lambda one: one.prompt_id)])
    assert found == [[1, 2, 1, 0], [1]]


def test_the_page_has_the_bounds_as_they_are() -> None:
    shown = dict(re.findall(r"^\| `(max_\w+)` \| (\d+) \|", PAGE, re.M))
    assert {name: int(value) for name, value in shown.items()} == {
        name: value for name, value in ImagesSpec().model_dump().items() if name.startswith("max_")
    }
