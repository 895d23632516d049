"""The calculator's arithmetic: exact, bounded, and never executed."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from rolemesh.engine.environments.arithmetic import (
    MAX_CHARACTERS,
    ArithmeticInvalidError,
    evaluate,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12*7", "84"),
        (" 1 + 2 * (3 - 4) ", "-1"),
        ("0.1 + 0.2", "0.3"),
        ("1/4", "0.25"),
        ("1/3", "0.3333333333"),
        ("6/3", "2"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2**10", "1024"),
        ("2**-2", "0.25"),
        ("-2**2", "-4"),
        ("2**200 % 7", "4"),
        ("1e3", "1000"),
        ("+5", "5"),
    ],
)
def test_expressions_have_their_values(text: str, value: str) -> None:
    assert evaluate(text) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not an expression"),
        ("12*", "not an expression"),
        ("x = 1", "not an expression"),
        ("1\n2", "not an expression"),
        ("\0", "not an expression"),
        ("(" * 150 + "1", "not an expression"),
        ("__import__('os').getcwd()", "only numbers"),
        ("[1][0]", "only numbers"),
        ("(1).real", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("lambda: 1", "only numbers"),
        ("1 << 400", "only numbers"),
        ("'a' * 9", "only numbers"),
        ("True + 1", "only numbers"),
        ("1j * 1j", "only numbers"),
        ("1 < 2", "only numbers"),
        ("(x := 1)", "only numbers"),
        ("1/0", "division by zero"),
        ("1 // 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("2 ** 0.5", "an exponent must be a whole number"),
        ("9 ** 9 ** 9", "an exponent must be a whole number up to"),
        ("(2 ** 250) ** 250", "too large"),
        ("2 ** 200 * 2 ** 200", "too large"),
        ("9" * 100, "too large"),
        ("1e999", "too large"),
        ("1" + "+1" * MAX_CHARACTERS, "longer than"),
    ],
)
def test_everything_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(ArithmeticInvalidError, match=message):
        evaluate(text)


def test_deep_nesting_is_refused_or_worked_out_but_never_breaks() -> None:
    for depth in range(1, MAX_CHARACTERS // 2):
        text = "(" * depth + "1" + ")" * depth
        if len(text) <= MAX_CHARACTERS:
            assert evaluate(text) == "1"
    assert evaluate("-" * (MAX_CHARACTERS - 1) + "1") == "-1"


def test_random_expressions_agree_with_the_tree_that_they_were_written_from() -> None:
    draw = random.Random(5)

    def tree(depth: int) -> tuple[str, Fraction]:
        if depth == 0 or draw.random() < 0.3:
            number = draw.randint(0, 99)
            return str(number), Fraction(number)
        (left, first), (right, second) = tree(depth - 1), tree(depth - 1)
        match draw.choice("+-*/"):
            case "+":
                return f"({left} + {right})", first + second
            case "-":
                return f"({left} - {right})", first - second
            case "*":
                return f"({left} * {right})", first * second
        return (f"({left} / {right})", first / second) if second else (left, first)

    for _ in range(300):
        text, value = tree(4)
        if len(text) > MAX_CHARACTERS:
            continue
        is_whole = value.denominator == 1
        assert evaluate(text) == (str(value) if is_whole else f"{float(value):.10g}")
