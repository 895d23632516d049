"""reasoning-gym: without pycosat one task alone is refused, and no scorer executes anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rolemesh.engine import reasoning_tasks

DRAW = """
import sys
sys.modules["pycosat"] = None  # as where it is not installed
from rolemesh.engine.data.reasoning_gym import load
from rolemesh.engine.specs import ReasoningGymSpec

print(len(load(ReasoningGymSpec(task={task!r}, train_size=3, held_out_size=2))[0]))
assert "pycosat" not in sys.modules, "the stand-in stayed: others would take it for pycosat"
"""


def draw(task: str) -> subprocess.CompletedProcess[str]:
    """Draws prompts in a process of its own: an import cannot be undone in this one."""
    return subprocess.run(
        [sys.executable, "-c", DRAW.format(task=task)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_task_that_needs_no_pycosat_is_drawn_without_it() -> None:
    completed = draw("chain_sum")
    assert completed.stdout == "3\n", completed.stderr


def test_the_task_of_pycosat_is_refused_by_name_with_the_remedy() -> None:
    completed = draw("zebra_puzzles")
    assert completed.returncode == 1
    last = completed.stderr.strip().splitlines()[-1]
    assert "data.task is 'zebra_puzzles', which needs pycosat" in last
    assert "pip install pycosat" in last


def test_a_mixture_of_the_library_that_draws_it_is_refused_too() -> None:
    """Composite and its like make their tasks by themselves, past our check."""
    code = (
        "import sys; sys.modules['pycosat'] = None\n"
        "from rolemesh.engine.reasoning_tasks import reasoning_gym\n"
        "reasoning_gym().create_dataset('zebra_puzzles', seed=1, size=1)[0]\n"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert completed.returncode == 1
    assert "pycosat is not installed, which zebra_puzzles needs" in completed.stderr


def test_a_missing_library_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['reasoning_gym'] = None\n"
        "from rolemesh.engine.reasoning_tasks import reasoning_gym\n"
        "reasoning_gym()\n"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert completed.returncode == 1
    assert "install rolemesh's extra 'tasks'" in completed.stderr


LISTS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
FORMULAS = ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24")


def entry_of(task: str) -> dict[str, Any]:
    """A row of a task as it comes out of our data, with its answer as text."""
    entry = reasoning_tasks.reasoning_gym().create_dataset(task, seed=3, size=1)[0]
    plain: dict[str, Any] = json.loads(json.dumps(entry, default=str))
    return {**plain, "answer": str(entry["answer"])}


def opens(path: Path) -> str:
    """A text that makes a file when it is evaluated, by Python or by sympy."""
    return f"sqrt.__globals__['__builtins__']['open']({str(path)!r}, 'w')"


@pytest.mark.parametrize("task", [*LISTS, *FORMULAS, "simple_integration"])
def test_no_completion_is_executed_by_a_scorer(task: str, tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    completion = opens(planted) if task not in LISTS else f"[open({str(planted)!r}, 'w')]"
    entry = entry_of(task)
    empty = reasoning_tasks.score("", entry)
    assert reasoning_tasks.score(completion, entry) == empty < 0.05
    if task in LISTS:
        # Not the answer of the row, though it is but for a space.
        reasoning_tasks.score(completion, {**entry, "answer": f" {completion}"})
    assert not planted.exists()


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("number_sorting", "answer"),
        ("polynomial_multiplication", "answer"),
        ("simple_integration", "integrand"),
        ("intermediate_integration", "integrand"),
        ("bitwise_arithmetic", "problem"),
    ],
)
def test_no_row_is_executed_by_a_scorer(task: str, name: str, tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    text = f"[open({str(planted)!r}, 'w')]" if task in ("number_sorting",) else opens(planted)
    if task == "bitwise_arithmetic":
        text = f"open({str(planted)!r}, 'w')"
    entry = entry_of(task)
    place = entry if name == "answer" else entry["metadata"]
    place[name] = text
    with pytest.raises(ValueError, match=f"a row of task '{task}'.*as the task made it"):
        reasoning_tasks.score("['1']" if task == "number_sorting" else "1", entry)
    assert not planted.exists()


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        *((task, 1.0) for task in (*LISTS, "number_sorting", "bitwise_arithmetic")),
        *((task, 1.0) for task in ("polynomial_multiplication", "simple_integration")),
        *((task, 1.0) for task in ("intermediate_integration", "chain_sum")),
    ],
)
def test_right_answers_score_as_the_library_says(task: str, expected: float) -> None:
    entry = entry_of(task)
    assert reasoning_tasks.score(entry["answer"], entry) == expected


def test_lists_and_formulas_of_a_completion_are_scored() -> None:
    spiral = entry_of("spiral_matrix")
    listed = str([int(number) for number in spiral["answer"].split()])
    assert reasoning_tasks.score(listed, spiral) == 0.1
    puzzle = entry_of("puzzle24")
    assert reasoning_tasks.score("(1 + 5) * 2 * 2", puzzle) == 1.0
    countdown = entry_of("countdown")
    numbers = " + ".join(map(str, countdown["metadata"]["numbers"]))
    assert reasoning_tasks.score(numbers, countdown) == 0.05
