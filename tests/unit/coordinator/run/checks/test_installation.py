"""An environment without torch says how to get what a role needs."""

from __future__ import annotations

import importlib.util

import pytest
from typer.testing import CliRunner

from rolemesh.coordinator.commands.cli import app
from rolemesh.coordinator.run.checks.installation import check_roles_run


@pytest.fixture
def _no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find(name)
    )


@pytest.mark.usefixtures("_no_torch")
def test_the_extras_are_named() -> None:
    with pytest.raises(ValueError, match=r"need torch.*rolemesh\[gpu\].*rolemesh\[cpu\] with"):
        check_roles_run()


@pytest.mark.usefixtures("_no_torch")
@pytest.mark.parametrize(
    "arguments", [["serve", "actor"], ["train", "recipes/quickstart-ppo.yaml"]], ids=lambda a: a[0]
)
def test_what_starts_a_role_refuses_before_anything_else(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.chdir(pytestconfig.rootpath)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: services need torch, which is not installed here: ")
