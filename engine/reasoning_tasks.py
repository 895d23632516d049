"""reasoning-gym: how it is imported, and how its scorers are asked.

pycosat has no wheel: installing it takes a C compiler, which a user's machine need not have. The
library imports it with everything else, but only the generator of one task calls it; a missing one
costs that task alone. Some scorers hand text to Python's `eval`, or to sympy's parser, which does
the same: from here they get none that could do more than name a value.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

TASKS_OF_PYCOSAT = ("zebra_puzzles",)
"""Tasks whose prompts cannot be drawn without pycosat. Their scorers need none."""

_EVALUATE_LISTS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
"""Tasks whose scorers evaluate a completion that is not one of the right answers, as a list."""

_EVALUATE_FORMULAS = (
    *("countdown", "puzzle24", "polynomial_multiplication"),
    *("simple_integration", "intermediate_integration"),
)
"""Tasks whose scorers evaluate every completion, as a formula."""

_FUNCTIONS = frozenset(
    {"Abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "csc", "erf"}
    | {"exp", "ln", "log", "sec", "sin", "sinh", "sqrt", "tan", "tanh"}
)
_SYMBOL = re.compile(r"[A-Za-z]\w{0,30}")
_FORMULA_NODES = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.expr_context,
)
_MOST_CHARACTERS = 10_000
"""Longest text that is parsed."""

_REMEDY = (
    "it has no wheel, so install a C compiler and Python's headers (Debian: apt-get install gcc "
    "python3-dev), then `pip install pycosat==0.6.6` into the environment of the services"
)


class _MissingPycosat(ModuleType):
    """Stands in for pycosat while reasoning-gym is imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        tasks = ", ".join(TASKS_OF_PYCOSAT)
        raise ValueError(f"pycosat is not installed, which {tasks} needs: {_REMEDY}")


def reasoning_gym() -> ModuleType:
    """The library.

    Raises:
        ValueError: It is not installed; the text says how to get it.
    """
    try:
        return _imported()
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise ValueError(
            "reasoning-gym is not installed: install rolemesh's extra 'tasks' "
            '(`pip install "rolemesh[tasks]"`)'
        ) from error


def check_task(task: str) -> None:
    """Refuses a task that cannot make prompts here.

    Raises:
        ValueError: The task needs pycosat, which is not installed.
    """
    if task in TASKS_OF_PYCOSAT and not _has_pycosat():
        raise ValueError(f"data.task is {task!r}, which needs pycosat: {_REMEDY}")


def score(completion: str, entry: Mapping[str, Any]) -> float:
    """The score of a completion by the scorer of the task that made the prompt, 0 to 1.

    A completion that a scorer would evaluate, and that is more than a list of values or a formula,
    is scored as an empty one.

    Args:
        completion: What the policy wrote, without spaces around it.
        entry: As the task made it: "answer" is a text, "metadata" names the task.

    Raises:
        ValueError: There is no such task, or its scorer would evaluate a text of the entry that is
            no list and no formula.
    """
    metadata, answer = entry["metadata"], entry["answer"]
    task = metadata["source_dataset"]
    if task in _EVALUATE_LISTS:
        right = metadata.get("valid_answers") if task == "n_queens" else [answer]
        # Of these the scorer evaluates none.
        is_right = isinstance(right, list) and completion in right
        completion = completion if is_right or _is_literal(completion) else ""
    elif task in _EVALUATE_FORMULAS:
        completion = completion if _is_formula(completion) else ""
    evaluated = {
        "number_sorting": (answer, _is_literal),
        "polynomial_multiplication": (answer, _is_formula),
        "simple_integration": (metadata.get("integrand"), _is_formula),
        "intermediate_integration": (metadata.get("integrand"), _is_formula),
        "bitwise_arithmetic": (metadata.get("problem"), _is_formula),
    }
    if task in evaluated:
        text, is_harmless = evaluated[task]
        if not (isinstance(text, str) and is_harmless(text)):
            raise ValueError(
                f"a row of task {task!r} has {str(text)[:200]!r}, which its scorer would evaluate, "
                "but which is no list and no formula: give the row as the task made it"
            )
    return float(reasoning_gym().get_score_answer_fn(task)(completion, entry))


def _is_literal(text: str) -> bool:
    """Whether evaluating a text gives a list, number or text that stands there as it is."""
    try:
        ast.literal_eval(text[: _MOST_CHARACTERS + 1])
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return len(text) <= _MOST_CHARACTERS


def _is_formula(text: str) -> bool:
    """Whether a text is made of numbers, symbols, operators and functions of one number alone."""
    try:
        tree = ast.parse(text[: _MOST_CHARACTERS + 1], mode="eval")
        return len(text) <= _MOST_CHARACTERS and all(map(_is_of_formula, ast.walk(tree)))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _is_of_formula(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float) and not isinstance(value, bool)
        case ast.Name(id=name):
            return _SYMBOL.fullmatch(name) is not None and "__" not in name
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords):
            return name in _FUNCTIONS and len(arguments) == 1 and not keywords
    return isinstance(node, _FORMULA_NODES)


def _imported() -> ModuleType:
    if _has_pycosat() or "reasoning_gym" in sys.modules:
        return importlib.import_module("reasoning_gym")
    sys.modules["pycosat"] = _MissingPycosat("pycosat")
    try:
        return importlib.import_module("reasoning_gym")
    finally:
        # reasoning-gym keeps the stand-in; other importers learn that there is no pycosat.
        del sys.modules["pycosat"]


def _has_pycosat() -> bool:
    return importlib.util.find_spec("pycosat") is not None
