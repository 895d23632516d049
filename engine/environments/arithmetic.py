"""Evaluation of arithmetic that a policy writes: exact, bounded, and without running any code.

Python's parser makes the tree. Only numbers, + - * / // % ** and brackets are accepted in it.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction

MAX_CHARACTERS = 200
"""Longest expression."""
MAX_BITS = 256
"""Most bits of the numerator and the denominator of every intermediate number."""
MAX_EXPONENT = 256
"""Largest exponent of a power, positive or negative."""
DIGITS = 10
"""Significant digits of a result that is not a whole number."""

_BINARY: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class ArithmeticInvalidError(ValueError):
    """Text is not arithmetic, or its numbers exceed the bounds."""


def evaluate(text: str) -> str:
    """The value of an expression, as a person would write it.

    Example: "12*7" gives "84", "1/4" gives "0.25", "2**0.5" and "__import__('os')" raise.

    Raises:
        ArithmeticInvalidError: The text is not arithmetic, or too large; the message says why.
    """
    if len(text) > MAX_CHARACTERS:
        raise ArithmeticInvalidError(f"longer than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        # The parser raises the last two for brackets that are nested too deeply.
        raise ArithmeticInvalidError("not an expression") from error
    value = _value(tree.body)
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.{DIGITS}g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            try:
                # The shortest decimal of this float, so that 0.1 is exactly a tenth.
                return _bounded(Fraction(str(number)))
            except ValueError as error:
                raise ArithmeticInvalidError("a number is too large") from error
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            first, second = _value(left), _value(right)
            try:
                return _bounded(Fraction(_BINARY[type(op)](first, second)))
            except ZeroDivisionError as error:
                raise ArithmeticInvalidError("division by zero") from error
    raise ArithmeticInvalidError("only numbers, + - * / // % ** and brackets")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise ArithmeticInvalidError(f"an exponent must be a whole number up to {MAX_EXPONENT}")
    if base == 0 and exponent < 0:
        raise ArithmeticInvalidError("division by zero")
    # Checked before, since the power itself could take too much time and memory.
    if _bits(base) * abs(exponent) > 2 * MAX_BITS:
        raise ArithmeticInvalidError("a number is too large")
    return _bounded(Fraction(base ** int(exponent)))


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise ArithmeticInvalidError("a number is too large")
    return value
