"""Loading a user's classes and functions: what ordinary modules may do, theirs may too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rolemesh.engine.granted.user_code import UserCodeError, load_named, raised_at

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


def test_an_error_is_told_with_the_line_of_the_user_s_file(tmp_path: Path) -> None:
    path = written(
        tmp_path / "game.py",
        "import json\n\ndef f():\n    def inner():\n        json.loads('{')\n    inner()\n",
    )
    with pytest.raises(ValueError, match="Expecting") as raised:
        load_named(f"{path}:f", "environment.environment")()
    # The first frame is that of this test, as ours would be.
    theirs = raised.value.with_traceback(raised.value.__traceback__.tb_next)
    assert raised_at(theirs) == f" (at {path}:5, in inner)"
    broken = written(tmp_path / "broken_game.py", "x = 1\ny = x / 0\n")
    with pytest.raises(UserCodeError, match=r"broken_game\.py:2, in <module>\): give"):
        load_named(f"{broken}:State", "environment.environment")
    assert raised_at(ValueError("never raised")) == ""


def test_a_name_without_a_file_is_an_entry_point_of_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "games_of_theirs.py", GAME.format(number=3))
    installed = tmp_path / "games-1.0.dist-info"
    written(installed / "METADATA", "Metadata-Version: 2.1\nName: games\nVersion: 1.0\n")
    written(
        installed / "entry_points.txt",
        "[rolemesh.code]\nguess = games_of_theirs:State\nbroken = games_of_theirs:Absent\n"
        "[console_scripts]\nother = games_of_theirs:State\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_named("guess", "environment.environment")().number == 3
    with pytest.raises(UserCodeError, match="entry point that cannot be loaded"):
        load_named("broken", "environment.environment")
    for absent in ("other", "os"):
        with pytest.raises(UserCodeError, match=r"no installed package .*rolemesh\.code"):
            load_named(absent, "environment.environment")
