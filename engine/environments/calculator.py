"""A calculator that a policy may ask before it answers: the smallest use of a tool."""

from __future__ import annotations

import re
from fractions import Fraction

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.environments.arithmetic import ArithmeticInvalidError, evaluate
from rolemesh.engine.environments.base import Environment, EnvironmentFailedError, Observation
from rolemesh.engine.specs import CalculatorEnvironmentSpec

_CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")

MAX_NUMBER_CHARACTERS = 1000
"""Longest number that is judged. Python refuses to read an integer of more than 4300 digits, and a
policy that repeats itself may write one."""


class CalculatorEnvironment(Environment):
    """Answers `<calc>...</calc>`; a turn without a call is judged by its last number.

    If the prompt has begun a call ("... = <calc>"), the first turn ends it.

    Example with the answer "91"::

        "12*7 is <calc>12*7</calc>" -> "<result>84</result>"
        "<calc>import os</calc>"    -> "<result>error: not an expression</result>"
        " and 7 more make 91."      -> reward 1, done
    """

    stop = ("</calc>",)

    def __init__(self, spec: CalculatorEnvironmentSpec) -> None:
        self._spec = spec
        self._answer = Fraction(0)
        self._begun = ""

    def reset(self, row: Prompt) -> None:
        """Takes the answer."""
        if not _NUMBER.fullmatch(row.answer.strip()):
            raise EnvironmentFailedError(
                f"the answer of the data is {row.answer[:40]!r}, which is no number: use data "
                "whose answers are, or another environment"
            )
        if len(row.answer.strip()) > MAX_NUMBER_CHARACTERS:
            raise EnvironmentFailedError(
                f"the answer of the data has {len(row.answer.strip())} characters: numbers of up "
                f"to {MAX_NUMBER_CHARACTERS} characters are judged"
            )
        self._answer = Fraction(row.answer.strip())
        _, opening, rest = row.text.rpartition("<calc>")
        self._begun = opening + rest if opening and "</calc>" not in rest else ""

    def step(self, completion_text: str) -> Observation:
        """Computes the last call of the turn, or judges the turn if it has none."""
        text, self._begun = self._begun + completion_text, ""
        calls = _CALL.findall(text)
        if calls:
            try:
                result = evaluate(calls[-1])
            except ArithmeticInvalidError as error:
                result = f"error: {error}"
            return Observation(text=f"<result>{result}</result>")
        numbers = _NUMBER.findall(text)
        is_right = (
            bool(numbers)
            and len(numbers[-1]) <= MAX_NUMBER_CHARACTERS
            and Fraction(numbers[-1]) == self._answer
        )
        return Observation(reward=self._spec.exact if is_right else 0.0, done=True)
