"""Tests that everything exists which the pages tell a user to type."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest

from rolemesh.coordinator.commands.cli import COMMANDS, load_command
from rolemesh.coordinator.recipe.loading import load_recipe

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])
QUICKSTART = REPOSITORY / "recipes" / "quickstart-ppo.yaml"


def shell_lines(page: Path) -> list[list[str]]:
    """The words of each line inside ```sh blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.strip()]
    return [shlex.split(line, comments=True) for line in lines]


@pytest.fixture(params=PAGES, ids=lambda page: page.name)
def page(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_every_rolemesh_command_and_option_exists(page: Path) -> None:
    for words in shell_lines(page):
        if words[0] != "rolemesh":
            continue
        assert words[1] in COMMANDS, words
        if words[1] == "serve":
            continue
        command = load_command(words[1])
        if hasattr(command, "commands"):
            assert words[2] in command.commands, words
            command = command.commands[words[2]]
        options = {name for option in command.params for name in option.opts}
        assert {word for word in words if word.startswith("--")} <= options, words


def test_every_make_target_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.MULTILINE))
    assert named <= targets


def test_every_override_is_a_field_of_the_recipe(page: Path) -> None:
    for words in shell_lines(page):
        overrides = [after for word, after in itertools.pairwise(words) if word == "--set"]
        load_recipe([QUICKSTART], overrides=overrides)


def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_path_in_backticks_exists(page: Path) -> None:
    folders = "coordinator|deploy|docs|engine|protos|recipes|requirements|services|src|tests"
    for path in re.findall(rf"`((?:{folders})/[\w./-]*)`", page.read_text()):
        if "yours" not in path:
            assert (REPOSITORY / path).exists(), path
