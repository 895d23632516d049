"""Tests of scores of completions: as a run's reward gives them, and never a silent 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rolemesh.engine.data.rows import PromptRow
from rolemesh.engine.evaluation.tasks import rows_of
from rolemesh.engine.specs.evaluation import EvaluatedTaskSpec, GymTaskSpec
from rolemesh.services.evaluation.answers import UnscoredError
from rolemesh.services.evaluation.judging import Judge, answer_in

SUM = PromptRow(messages=[], answer="12", where="row 3")


def judge(reward: Any, **more: Any) -> Judge:
    data = {"type": "reasoning_gym", "task": "chain_sum"}
    section = {"name": "mine", "data": data, "reward": reward, **more}
    return Judge(EvaluatedTaskSpec.model_validate(section))


async def score(
    made: Judge, row: PromptRow, prompt: str, text: str, given: float | None = None
) -> float:
    """The score of one answer; raises why it has none."""
    (found,) = made.finish([await made.begin(row, prompt, text, given)])
    if isinstance(found, UnscoredError):
        raise found
    return found


async def test_arithmetic_is_graded_as_in_a_run() -> None:
    made = judge({"type": "arithmetic", "exact": 2.0})
    texts = ["12", " 12\n", "13", "5 + 7 = 12", "twelve"]
    scores = [await score(made, SUM, "", text) for text in texts]
    assert scores == pytest.approx([2.0, 2.0, 0.1, 0.2 * 2 / 10, 0.0])
    assert made.full_score == 2.0


async def test_a_row_without_an_answer_is_unscored_and_not_zero() -> None:
    with pytest.raises(UnscoredError, match="row 3: a row has no answer"):
        await score(judge({"type": "arithmetic"}), PromptRow(messages=[], where="row 3"), "", "12")


async def test_a_gym_task_is_scored_by_its_own_scorer() -> None:
    spec = GymTaskSpec(task="chain_sum", size=3).evaluated("sums")
    made = Judge(spec)
    for each in rows_of(spec, None):
        assert await score(made, each.row, "", f" {each.row.answer}\n") == 1.0
        assert await score(made, each.row, "", "no number") < 0.5
    assert made.full_score == 1.0


async def test_a_row_of_no_gym_task_is_unscored() -> None:
    with pytest.raises(UnscoredError, match="of no task of reasoning-gym"):
        await score(judge({"type": "reasoning_gym"}), SUM, "", "12")


async def test_the_last_tag_is_the_answer() -> None:
    made = judge({"type": "arithmetic"}, answer_tag="answer")
    text = "<think>7?</think><answer>7</answer> no: <answer>\n12 </answer>"
    assert await score(made, SUM, "", text) == 1.0
    assert await score(made, SUM, "", "12") == 0.0
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
        assert await score(made, SUM, "p", "abc") == 1.5
        with pytest.raises(UnscoredError, match="cannot judge this"):
            await score(made, SUM, "p", "bad")
    finally:
        await made.close()
    assert made.full_score is None


async def test_what_an_environment_gave_is_one_source_of_several() -> None:
    calculator = {"environment": {"type": "calculator"}}
    alone = judge({"type": "environment", "full_score": 3.0}, **calculator)
    assert await score(alone, SUM, "", "12", 2.5) == 2.5
    assert alone.full_score == 3.0
    both = [{"source": {"type": "environment"}}, {"source": {"type": "arithmetic"}, "weight": 0.5}]
    assert await score(judge(both, **calculator), SUM, "", "12", 2.5) == 3.0


async def test_an_answer_that_no_source_judges_is_unscored(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def reward(prompts, completions, **rest):\n    return [None]\n"
    )
    made = judge(f"python:{tmp_path / 'mine.py'}:reward")
    await made.open()
    try:
        with pytest.raises(UnscoredError, match="no source of the reward applies"):
            await score(made, SUM, "p", "12")
    finally:
        await made.close()


def test_a_classifier_that_is_not_there_is_told_with_its_task() -> None:
    with pytest.raises(ValueError, match=r"task mine: the classifier .*'somewhere'"):
        judge({"type": "classifier", "model": {"path": "somewhere"}})
