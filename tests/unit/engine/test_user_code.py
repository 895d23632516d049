"""Loading a user's classes and functions: what ordinary modules may do, theirs may too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rolemesh.engine.user_code import UserCodeError, load_named

GAME = """
from __future__ import annotations

from dataclasses import dataclass

@dataclass
class State:
    number: int = {number}
"""


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_may_define_dataclasses_with_annotations_as_text(tmp_path: Path) -> None:
    path = written(tmp_path / "game.py", GAME.format(number=7))
    assert load_named(f"{path}:State", "environment.environment")().number == 7


def test_files_of_one_name_in_two_folders_stay_apart(tmp_path: Path) -> None:
    paths = [
        written(tmp_path / str(number) / "game.py", GAME.format(number=number)) for number in (1, 2)
    ]
    first, second = (load_named(f"{path}:State", "environment.environment") for path in paths)
    assert (first().number, second().number) == (1, 2)
    assert sys.modules[first.__module__].State is first
    assert sys.modules[second.__module__].State is second


def test_a_file_that_fails_leaves_no_half_module(tmp_path: Path) -> None:
    path = written(tmp_path / "broken_game.py", "1 / 0")
    with pytest.raises(UserCodeError, match="ZeroDivisionError"):
        load_named(f"{path}:State", "environment.environment")
    assert not [name for name in sys.modules if "broken_game" in name]
