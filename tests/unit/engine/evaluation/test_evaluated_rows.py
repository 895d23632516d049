"""Tests of the rows of evaluated tasks: same prompts, same keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import tiny_tokenizer

from rolemesh.engine.data.prompts import load_prompts
from rolemesh.engine.evaluation.tasks import rows_of
from rolemesh.engine.specs.evaluation import EvaluatedTaskSpec, GymTaskSpec


def task(data: dict[str, Any], **more: Any) -> EvaluatedTaskSpec:
    section = {"name": "mine", "data": data, "reward": {"type": "arithmetic"}, **more}
    return EvaluatedTaskSpec.model_validate(section)


def held_out(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    (path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "train.jsonl").write_text(json.dumps({"prompt": "t", "answer": "1"}) + "\n")
    files = {"path": str(path / "train.jsonl"), "held_out_path": str(path / "held.jsonl")}
    return {"type": "jsonl", **files}


def test_a_gym_task_makes_as_many_distinct_prompts_by_its_seed() -> None:
    spec = GymTaskSpec(task="chain_sum", size=12, seed=3)
    first, again = (rows_of(spec.evaluated("sums"), None) for _ in range(2))
    assert [row.key for row in first] == [row.key for row in again]
    assert len({row.key for row in first}) == 12
    other = rows_of(spec.model_copy(update={"seed": 4}).evaluated("sums"), None)
    assert {row.key for row in first} != {row.key for row in other}


def test_fewer_prompts_are_the_first_of_more() -> None:
    few, many = (
        rows_of(GymTaskSpec(task="chain_sum", size=n).evaluated("x"), None) for n in (4, 9)
    )
    assert [row.key for row in few] == [row.key for row in many[:4]]


def test_a_prompt_that_is_there_twice_is_two_rows_and_another_answer_is_another_prompt(
    tmp_path: Path,
) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "a", "answer": "1"}]
    rows.append({"prompt": "a", "answer": "2"})
    keys = [row.key for row in rows_of(task(held_out(tmp_path, rows)), None)]
    assert keys[1] == f"{keys[0]}#2"
    assert keys[2].partition("#")[0] != keys[0]


def test_a_row_has_the_id_of_its_prompt_in_a_run(tmp_path: Path) -> None:
    data = held_out(tmp_path, [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}])
    spec = task({**data, "max_prompt_tokens": 50})
    for given, tokenizer in (
        (task(data), None),
        (task(data), tiny_tokenizer()),
        (spec, tiny_tokenizer()),
    ):
        rows = rows_of(given, tokenizer)
        prompts = load_prompts(given.data, tokenizer=tiny_tokenizer(), seed=3)
        expected = prompts.slice("held_out", 0, 2)
        assert [
            row.prompt(p.text, p.tokens) for row, p in zip(rows, expected, strict=True)
        ] == expected


def test_more_prompts_than_there_are_held_out_are_refused(tmp_path: Path) -> None:
    data = held_out(tmp_path, [{"prompt": "a", "answer": "1"}])
    with pytest.raises(ValueError, match="2 prompts are wanted, but its data holds out 1"):
        rows_of(task(data, num_prompts=2), None)


def test_data_that_holds_out_nothing_is_refused(tmp_path: Path) -> None:
    data = held_out(tmp_path, [])
    del data["held_out_path"]
    with pytest.raises(ValueError, match="holds out no rows"):
        rows_of(task(data), None)


def test_a_bound_in_tokens_needs_a_tokenizer(tmp_path: Path) -> None:
    data = {**held_out(tmp_path, [{"prompt": "a", "answer": "1"}]), "max_prompt_tokens": 5}
    with pytest.raises(ValueError, match="give --tokenizer"):
        rows_of(task(data), None)
