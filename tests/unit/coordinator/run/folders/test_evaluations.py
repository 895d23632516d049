"""Tests of evaluations beside the files of a run, in its curves and in comparisons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rolemesh.coordinator.run.folders.evaluations import (
    EvaluationFile,
    evaluated_metrics,
    new_path,
    newest_scores,
    read_evaluation,
    with_evaluations,
    write_evaluation,
)
from rolemesh.coordinator.run.results.scores import TaskScores


def found(step: int | None, *values: float, **facts: Any) -> EvaluationFile:
    task = TaskScores(name="sums", num_prompts=len(values), samples=1, full_score=1.0)
    task.scores = {str(at): [value] for at, value in enumerate(values)}
    return EvaluationFile(policy="p", step=step, tasks={"sums": task}, ks=(1,), facts=facts)


def write(run: Path, step: int, *values: float, **facts: Any) -> Path:
    path = new_path(run / "evaluations", f"step-{step}")
    write_evaluation(path, found(step, *values, **facts), run)
    return path


def test_a_file_gives_back_what_was_found(tmp_path: Path) -> None:
    path = write(tmp_path, 3, 0.0, 1.0, drawing={"samples": 1})
    read = read_evaluation(path)
    assert read.tasks == found(3, 0.0, 1.0).tasks
    assert (read.step, tuple(read.ks), read.facts) == (3, (1,), {"drawing": {"samples": 1}})
    told = json.loads(path.read_text())["tasks"]["sums"]
    assert told["score"] == {"mean": 0.5, "standard_error": 0.5, "num_prompts": 2}
    assert told["pass_at"]["1"]["mean"] == 0.5


def test_evaluations_of_one_second_do_not_take_each_others_place(tmp_path: Path) -> None:
    assert len({write(tmp_path, 3, 0.5) for _ in range(3)}) == 3


@pytest.mark.parametrize("text", ["", "{}", '{"format": 9}', "[1]", '{"format": 1, "tasks": 3}'])
def test_what_is_no_evaluation_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match="is no evaluation"):
        read_evaluation(tmp_path / "x.json")


def test_of_one_step_the_newest_counts_and_another_task_stays(tmp_path: Path) -> None:
    write(tmp_path, 3, 0.0, 1.0)
    write(tmp_path, 3, 1.0, 1.0)
    metrics = evaluated_metrics(tmp_path)
    assert metrics[3]["evaluated/sums/score"] == 1.0
    assert newest_scores(tmp_path)["sums"].scores.by_prompt() == {"0": 1.0, "1": 1.0}


def test_an_older_step_that_is_evaluated_later_is_not_the_newest(tmp_path: Path) -> None:
    write(tmp_path, 5, 1.0)
    write(tmp_path, 3, 0.0)
    assert newest_scores(tmp_path)["sums"].step == 5


def test_a_file_that_was_moved_away_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, 3, 1.0).unlink()
    assert newest_scores(tmp_path) == {}


def test_records_get_the_scalars_of_their_step_in_order(tmp_path: Path) -> None:
    for step in (0, 2, 4, 9):
        write(tmp_path, step, step / 10)
    records = [{"step": 1.0, "a": 1.0}, {"step": 2.0, "a": 2.0}, {"step": 5.0, "a": 5.0}]
    merged = with_evaluations(records, tmp_path)
    assert [record["step"] for record in merged] == [0, 1, 2, 4, 5, 9]
    shown = [(r["step"], r["evaluated/sums/score"]) for r in merged if "evaluated/sums/score" in r]
    assert shown == [(0, 0.0), (2, 0.2), (4, 0.4), (9, 0.9)]
    assert merged[2]["a"] == 2.0
    assert records[1] == {"step": 2.0, "a": 2.0}


def test_a_run_without_evaluations_is_as_before(tmp_path: Path) -> None:
    records = [{"step": 1.0, "a": 1.0}]
    assert with_evaluations(records, tmp_path) == records
    assert newest_scores(tmp_path) == {}


def test_what_is_of_no_run_has_no_line(tmp_path: Path) -> None:
    write_evaluation(tmp_path / "x.json", found(None, 1.0), None)
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
