"""Tests of the calculator with turns that a policy in training may well write."""

from __future__ import annotations

import pytest

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.environments.base import EnvironmentFailedError, Observation
from rolemesh.engine.environments.calculator import CalculatorEnvironment
from rolemesh.engine.specs import CalculatorEnvironmentSpec

BEYOND_INT_PARSING = 5000
"""Digits. Python refuses to make an integer of more than 4300."""


def judged(turn: str, answer: str = "91") -> Observation:
    environment = CalculatorEnvironment(CalculatorEnvironmentSpec())
    environment.reset(Prompt(prompt_id=0, text="Q:", tokens=[1], answer=answer, metadata="{}"))
    return environment.step(turn)


@pytest.mark.parametrize("turn", ["1" * BEYOND_INT_PARSING, "0." + "1" * BEYOND_INT_PARSING])
def test_a_policy_that_repeats_a_digit_is_wrong_and_ends_no_run(turn: str) -> None:
    assert judged(turn) == Observation(reward=0.0, done=True)


@pytest.mark.parametrize("turn", ["91", "so 91.0", "7 and 84 make 0091."])
def test_the_last_number_is_compared_by_value(turn: str) -> None:
    assert judged(turn).reward == 1.0


def test_an_answer_that_no_policy_could_give_is_refused() -> None:
    with pytest.raises(EnvironmentFailedError, match="characters"):
        judged("1", answer="1" * BEYOND_INT_PARSING)
