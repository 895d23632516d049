"""Tests of scores of completions: as a run's reward gives them, and never a silent 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rolemesh.engine.data.rows import PromptRow
from rolemesh.engine.evaluation.tasks import rows_of
from rolemesh.engine.specs.evaluation import EvaluatedTaskSpec, GymTaskSpec
from rolemesh.services.evaluation.judging import Judge, UnscoredError, answer_in

SUM = PromptRow(messages=[], answer="12", where="row 3")


def judge(reward: Any, **more: Any) -> Judge:
    data = {"type": "reasoning_gym", "task": "chain_sum"}
    section = {"name": "mine", "data": data, "reward": reward, **more}
    return Judge(EvaluatedTaskSpec.model_validate(section))


async def test_arithmetic_is_graded_as_in_a_run() -> None:
    made = judge({"type": "arithmetic", "exact": 2.0})
    texts = ["12", " 12\n", "13", "5 + 7 = 12", "twelve"]
    scores = [await made.score(SUM, "", text) for text in texts]
    assert scores == pytest.approx([2.0, 2.0, 0.1, 0.2 * 2 / 10, 0.0])
    assert made.full_score == 2.0


async def test_a_row_without_an_answer_is_unscored_and_not_zero() -> None:
    with pytest.raises(UnscoredError, match="row 3: a row has no answer"):
        await judge({"type": "arithmetic"}).score(PromptRow(messages=[], where="row 3"), "", "12")


async def test_a_gym_task_is_scored_by_its_own_scorer() -> None:
    spec = GymTaskSpec(task="chain_sum", size=3).evaluated("sums")
    made = Judge(spec)
    for each in rows_of(spec, None):
        assert await made.score(each.row, "", f" {each.row.answer}\n") == 1.0
        assert await made.score(each.row, "", "no number") < 0.5
    assert made.full_score == 1.0


async def test_a_row_of_no_gym_task_is_unscored() -> None:
    with pytest.raises(UnscoredError, match="of no task of reasoning-gym"):
        await judge({"type": "reasoning_gym"}).score(SUM, "", "12")


async def test_the_last_tag_is_the_answer() -> None:
    made = judge({"type": "arithmetic"}, answer_tag="answer")
    text = "<think>7?</think><answer>7</answer> no: <answer>\n12 </answer>"
    assert await made.score(SUM, "", text) == 1.0
    assert await made.score(SUM, "", "12") == 0.0
    assert answer_in("12", "answer") == ""


async def test_a_function_of_the_user_is_asked_and_its_failure_named(tmp_path: Path) -> None:
    code = (
        "def reward(prompts, completions, **rest):\n"
        "    if completions == ['bad']:\n        raise ValueError('cannot judge this')\n"
        "    return [len(text) / 4 for text in completions]\n"
    )
    (tmp_path / "mine.py").write_text(code)
    made = judge([{"source": f"python:{tmp_path / 'mine.py'}:reward", "weight": 2.0}])
    await made.open()
    try:
        assert await made.score(SUM, "p", "abc") == 1.5
        with pytest.raises(UnscoredError, match="cannot judge this"):
            await made.score(SUM, "p", "bad")
    finally:
        await made.close()
    assert made.full_score is None


def test_a_reward_that_needs_the_runs_services_is_refused() -> None:
    with pytest.raises(ValueError, match=r"of type environment.*the run's own evaluation"):
        judge({"type": "environment"})
    with pytest.raises(ValueError, match="a model that the run's reward service holds"):
        judge({"type": "classifier", "model": {"path": "somewhere"}})
