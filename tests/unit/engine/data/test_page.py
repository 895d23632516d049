"""The page on data: every example loads, from the very rows that the page shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from pydantic import TypeAdapter
from support.tiny_models import tiny_tokenizer

from rolemesh.engine.data.prompts import load_prompts
from rolemesh.engine.data.trajectories import read_trajectories
from rolemesh.engine.specs import DataSpec

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "data.md").read_text()
SECTIONS: list[dict[str, Any]] = [
    yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)
]
NAMED_BLOCKS = r"`([\w./]+)`:\n\n```(?:json|python)\n(.*?)^```"

spec_of: TypeAdapter[Any] = TypeAdapter(DataSpec)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the page shows, and those that its examples name besides."""
    (tmp_path / "data" / "preferences").mkdir(parents=True)
    for name, text in re.findall(NAMED_BLOCKS, PAGE, re.M | re.S):
        (tmp_path / name).write_text(text)
    sums = [{"question": "1 + 2", "solution": "3", "difficulty": 1, "image": b"0"}]
    tables = {"sums": sums}
    for split in ("train", "test"):
        tables[f"preferences/{split}"] = [{"prompt": split, "chosen": "a", "rejected": "b"}]
    for name, rows in tables.items():
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, tmp_path / "data" / f"{name}.parquet")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_shows_every_type() -> None:
    shown = {section["data"]["type"] for section in SECTIONS if "data" in section}
    assert shown >= {"jsonl", "parquet", "hf_dataset", "mixture"}
    assert len(SECTIONS) == 8


AT_THE_HUB = [one for one in SECTIONS if "hf:" in json.dumps(one)]
"""Made paths of this machine before a service gets them; see test_hf_files."""


def test_the_example_of_the_hub_names_its_split() -> None:
    (section,) = AT_THE_HUB
    assert section["data"]["path"].endswith(":" + spec_of.validate_python(section["data"]).split)


@pytest.mark.parametrize(
    "section",
    [one for one in SECTIONS if one not in AT_THE_HUB],
    ids=lambda section: json.dumps(section)[:60],
)
def test_an_example_of_the_page_loads(section: dict[str, Any], folder: Path) -> None:
    ((name, body),) = section.items()
    tokenizer = tiny_tokenizer()
    if name == "pretraining_data":
        data = spec_of.validate_python({"type": "jsonl", "path": "data/sums.jsonl"})
        pretraining = spec_of.validate_python(body)
        prompts = load_prompts(data, tokenizer=tokenizer, seed=0, pretraining=pretraining)
        texts = read_trajectories(prompts, "pretraining", 0, 2, "demonstration", max_tokens=20)
        assert texts["tokens"].lengths().tolist() == [12, 12]
        return
    prompts = load_prompts(spec_of.validate_python(body), tokenizer=tokenizer, seed=0)
    assert prompts.slice("train", 0, 4)
    if body.get("held_out_size") or body.get("held_out_split"):
        assert prompts.size("held_out") == 1
