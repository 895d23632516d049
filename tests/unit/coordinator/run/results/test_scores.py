"""Tests of scores of a task: what counts, and what is left out and named."""

from __future__ import annotations

import json
import math

import pytest

from rolemesh.coordinator.run.results.scores import NAMED_ROWS, TaskScores, compared


def scores(rows: dict[str, list[float | None]], full_score: float | None = 1.0) -> TaskScores:
    samples = max(map(len, rows.values()))
    made = TaskScores(name="t", num_prompts=len(rows), samples=samples, full_score=full_score)
    for at, (key, given) in enumerate(rows.items()):
        for sample, score in enumerate(given):
            line = {"key": key, "row": at, "sample": sample, "score": score, "why": "broken"}
            made.add({**line, "finish_reason": "length", "num_tokens": 2})
    return made


def test_a_prompt_counts_once_whatever_its_samples() -> None:
    found = scores({"a": [1.0, 1.0, 1.0, 0.0], "b": [0.0, 0.0, 0.0, 0.0]}).score()
    assert found is not None
    assert found.mean == 0.375
    # Two prompts with 0.75 and 0: not eight rows.
    assert found.standard_error == pytest.approx(0.75 / math.sqrt(2) / math.sqrt(2))


def test_what_has_no_score_is_left_out_counted_and_named() -> None:
    made = scores({"a": [1.0, None], "b": [None, None], "c": [0.0, 1.0]})
    found = made.score()
    assert found is not None
    assert found.mean == 0.75
    assert found.num_prompts == 2
    assert made.unscored == 3
    assert made.unscored_rows[0] == "row 0, sample 1: broken"


def test_not_all_of_very_many_are_named() -> None:
    made = scores({str(n): [None] for n in range(NAMED_ROWS + 5)})
    assert made.score() is None
    assert made.unscored == NAMED_ROWS + 5
    assert len(made.unscored_rows) == NAMED_ROWS
    assert made.metrics([]) == {}


def test_pass_at_k_takes_prompts_that_have_k_scores() -> None:
    made = scores({"a": [1.0, 0.0, 0.0, 0.0], "b": [0.0] * 4, "c": [1.0, None, None, None]})
    one, two = made.pass_at(1), made.pass_at(2)
    assert one is not None
    assert two is not None
    assert (one.mean, one.num_prompts) == (pytest.approx((0.25 + 0 + 1) / 3), 3)
    # 1 - C(3, 2) / C(4, 2) = 0.5 of the first, 0 of the second.
    assert (two.mean, two.num_prompts) == (pytest.approx(0.25), 2)
    assert made.metrics([2])["evaluated/t/pass@2"] == pytest.approx(0.25)


def test_pass_at_k_without_a_right_score_says_what_to_give() -> None:
    with pytest.raises(ValueError, match="--pass-score"):
        scores({"a": [1.0]}, full_score=None).pass_at(1)


def test_a_file_gives_back_the_same_scores() -> None:
    made = scores({"a": [1.0, None], "b": [0.5, 0.0]})
    read = TaskScores.of_dict("t", json.loads(json.dumps(made.to_dict([1]))))
    assert read == made


def test_two_are_compared_prompt_by_prompt() -> None:
    found = compared(scores({"a": [0.0], "b": [1.0]}), scores({"b": [1.0], "a": [1.0]}))
    assert found is not None
    assert found.mean == 0.5
    assert found.num_prompts == 2
