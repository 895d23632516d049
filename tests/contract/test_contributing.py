"""What CONTRIBUTING shows is true: its commands exist, its example runs, and its test can fail."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "CONTRIBUTING.md"


def blocks(language: str) -> list[str]:
    """The code blocks of the page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def run_example(folder: Path, code: str) -> int:
    """Runs the page's tests on some code; gives how many there are."""
    file = folder / "example.py"
    file.write_text(code + blocks("python")[1])
    tests = [f for name, f in runpy.run_path(str(file)).items() if name.startswith("test_")]
    for test in tests:
        test()
    return len(tests)


def test_the_example_passes_its_tests(tmp_path: Path) -> None:
    assert run_example(tmp_path, blocks("python")[0]) == 2


@pytest.mark.parametrize(
    ("right", "wrong"),
    [(".clamp_min(1)", ""), (".clamp_min(1)", ".sum()"), ("!= len", "< len"), ('"give ', '"see ')],
)
def test_the_tests_fail_where_the_example_is_broken(right: str, wrong: str, tmp_path: Path) -> None:
    code, _ = blocks("python")
    assert right in code
    with pytest.raises((AssertionError, pytest.fail.Exception, RuntimeError)):
        run_example(tmp_path, code.replace(right, wrong))


@pytest.mark.parametrize(("block", "place"), [(0, "engine/x.py"), (1, "tests/test_x.py")])
def test_the_example_is_in_form(block: int, place: str) -> None:
    # Of a block that stands in a page there is no docstring of a file, nor the other block's name.
    rules = ["check", "--extend-ignore=D100,F821"]
    for command in (rules, ["format", "--check"]):
        done = subprocess.run(
            [Path(sys.executable).with_name("ruff"), *command, "--stdin-filename", place, "-"],
            input=blocks("python")[block],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout


def test_its_commands_and_links_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:`|^)make ([a-z -]+?)(?:`| {2,}| ARGS)", PAGE.read_text(), re.MULTILINE)
    assert {word for words in named for word in words.split()} <= targets
    assert len(named) > 5
    for link in re.findall(r"\]\(([^)#]+)", PAGE.read_text()):
        assert (REPOSITORY / link).exists(), link
    for path in re.findall(r"\b((?:tests|docs|protos)/[\w./-]*\w)", PAGE.read_text()):
        assert (REPOSITORY / path).exists(), path
