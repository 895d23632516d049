"""How close a text comes to being a bare number. No torch: evaluations without models use it."""

from __future__ import annotations

import re

from rolemesh.engine.data.answers import accepted
from rolemesh.engine.specs import ArithmeticRewardSpec

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class NoAnswerError(ValueError):
    """A row has no answer to compare with."""


def arithmetic_score(spec: ArithmeticRewardSpec, completion: str, answer: str) -> float:
    r"""The score of one completion.

    The exact answer earns `exact`. A bare number that is wrong earns `form`. Text whose last
    number is the answer earns `contained` times the share of its characters that the answer
    takes: "1 + 2 = 3" earns a ninth of `contained`, so that dropping words always pays.
    Of an answer that is a list any item is right.

    Example with the defaults and the answer "12"::

        "12" -> 1.0, " 12\n" -> 1.0, "13" -> 0.1, "5 + 7 = 12" -> 0.2 * 2 / 10, "twelve" -> 0.0

    Raises:
        NoAnswerError: The answer is empty.
    """
    if not answer:
        raise NoAnswerError(
            "a row has no answer, so that arithmetic cannot be judged: use data that has "
            "answers, or another reward.source"
        )
    text, right = completion.strip(), accepted(answer)
    if text in right:
        return spec.exact
    if _NUMBER.fullmatch(text):
        return spec.form
    numbers = _NUMBER.findall(text)
    if numbers and numbers[-1] in right:
        return spec.contained * len(numbers[-1]) / len(text)
    return 0.0
