"""The examples of the recipes that learn from data: what is wanted is right, the rest is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rolemesh.engine.data.prompts import load_rows
from rolemesh.engine.specs import JsonlSpec
from rolemesh.quickstart.sum_examples import FILES, main, write_examples

NUM_ROWS = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sums")
    write_examples(folder, num_rows=NUM_ROWS, seed=0)
    return folder


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def right_answer(row: dict[str, Any]) -> str:
    left, plus, right, *_ = row["prompt"].split()
    assert plus == "+"
    return str(int(left) + int(right))


def test_demonstrations_are_right(folder: Path) -> None:
    rows = rows_of(folder / "demonstrations.jsonl")
    assert len(rows) == NUM_ROWS
    assert all(row["completion"] == row["answer"] == right_answer(row) for row in rows)


def test_the_chosen_one_is_right_and_the_rejected_one_is_not(folder: Path) -> None:
    rows = rows_of(folder / "preferences.jsonl")
    assert all(row["chosen"] == right_answer(row) for row in rows)
    assert all(row["rejected"].strip() not in ("", right_answer(row)) for row in rows)
    numbers = sum(row["rejected"].isdigit() for row in rows)
    assert 0 < numbers < NUM_ROWS


def test_judgements_say_what_is_right(folder: Path) -> None:
    rows = rows_of(folder / "judgements.jsonl")
    assert all((row["completion"] == right_answer(row)) is row["label"] for row in rows)
    assert {row["label"] for row in rows} == {True, False}


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_data_for_a_run(name: str, folder: Path) -> None:
    train, held_out = load_rows(JsonlSpec(path=folder / name, held_out_size=8))
    assert len(held_out) == 8
    assert len(train) > 0


def test_the_same_call_writes_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--rows", str(NUM_ROWS)]) == 0
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_no_rows_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--rows", "0"])
    assert "--rows is 0: give at least 1" in capsys.readouterr().err
