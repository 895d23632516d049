"""Completions of several forms, for the judge of form: bare numbers, and other texts."""

from __future__ import annotations

import random
from typing import Literal, get_args

NumberKind = Literal["number", "number_unspaced"]
Kind = Literal[
    NumberKind, "words", "number_then_words", "words_then_number", "punctuated", "equation",
    "several_numbers", "endless_digits", "junk", "empty",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
NUMBER_KINDS: tuple[NumberKind, ...] = get_args(NumberKind)
"""The form that is wanted, with and without the space that a tokenizer puts before a number."""

# fmt: off
_WORDS = (
    "the", "answer", "is", "sum", "of", "a", "number", "equals", "plus", "and", "what", "question",
    "I", "am", "sorry", "can", "help", "you", "one", "two", "ten", "twelve", "twenty", "forty",
    "hundred", "zero", "yes", "no", "only", "please", "total", "result", "makes", "so", "it",
    "The", "Answer", "apples", "user", "assistant", "To", "solve", "this", "we", "add", "first",
    "then", "equal", "value", "Let", "step", "units", "tens", "carry", "correct", "because",
)
_HELD_OUT_WORDS = (
    "which", "gives", "three", "seven", "eleven", "thirty", "fifty", "thousand", "Sure", "Here",
    "final", "digits", "calculate", "find", "both", "together", "oranges", "dollars", "problem",
    "Therefore", "hence", "that", "my", "are", "not", "maybe", "sixteen", "nothing", "Yes", "Sum",
)
# fmt: on
_MARKS = ".,;:!?=+-*/()\"'%$#\n"


def completion(kind: Kind, draw: random.Random, *, held_out: bool) -> str:
    """Draws a completion of the kind.

    Args:
        kind: One of KINDS.
        draw: Source of random choices within the kind.
        held_out: Draw from words and numbers that are used for nothing else.

    Returns:
        Text to follow a prompt that ends with an equals sign.
    """
    number, other = _number(draw, held_out), _number(draw, held_out)
    words = _words(draw, held_out)
    space = draw.choice(("", " "))
    match kind:
        case "number":
            return f" {number}"
        case "number_unspaced":
            return number
        case "words":
            return f" {words}{draw.choice(('', '.'))}"
        case "number_then_words":
            return f"{space}{number}{draw.choice((' ', '. ', ', ', chr(10), chr(10) * 2))}{words}"
        case "words_then_number":
            return f" {words} {number}{draw.choice(('', '.'))}"
        case "punctuated":
            return f"{space}{number}{draw.choice(_MARKS)}"
        case "equation":
            left = f"{number} {draw.choice('+-*')} {other}"
            return f"{space}{draw.choice((left, f'{number} = {other}', f'{left} = {number}'))}"
        case "several_numbers":
            numbers = [number, *(_number(draw, held_out) for _ in range(draw.randint(1, 3)))]
            return space + draw.choice((" ", ", ", "\n", " and ", ".")).join(numbers)
        case "endless_digits":
            return space + "".join(draw.choice("0123456789") for _ in range(draw.randint(5, 8)))
        case "junk":
            return space + "".join(draw.choice(_MARKS + "abcxyz ") for _ in range(3))
        case "empty":
            return draw.choice(("", " ", "\n"))


def _number(draw: random.Random, held_out: bool) -> str:
    """0 to 999, those of two digits most often; every seventh is held out."""
    while True:
        number = draw.randrange(draw.choice((10, 100, 200, 1000)))
        if (number % 7 == 3) == held_out:
            return str(number)


def _words(draw: random.Random, held_out: bool) -> str:
    return " ".join(draw.choices(_HELD_OUT_WORDS if held_out else _WORDS, k=draw.randint(1, 5)))
