"""reasoning-gym without pycosat: one task is refused by name, all others work."""

from __future__ import annotations

import subprocess
import sys

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
