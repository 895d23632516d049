"""The command line imports what the command called needs, and its help nothing of that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolemesh.coordinator import commands
from rolemesh.coordinator.commands.cli import COMMANDS, app, load_command

HEAVY = ("redis", "numpy", "grpc", "fastapi", "starlette", "uvicorn", "opentelemetry", "pydantic")
NO_COMMANDS = {
    *("cli", "cluster_options", "console", "device_settings", "diagnosis", "ending", "findings"),
    *("given_inputs", "gpu_findings", "hub", "model_card", "new_recipe", "options"),
    *("compare_page", "memory_question", "pace", "placing", "plot", "processes", "publishing"),
    "recipe_checks",
    *("remote_run", "run_process", "summary"),
}
"""Modules beside the commands."""


def test_help_imports_no_command() -> None:
    program = (
        "import contextlib, json, sys\n"
        "from rolemesh.coordinator.commands.cli import main\n"
        "sys.argv = ['rolemesh', '--help']\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "print()\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    *shown, modules = done.stdout.splitlines()
    loaded = json.loads(modules)
    assert any("Makes a run of a recipe." in line for line in shown)
    assert [name for name in HEAVY if name in loaded] == []
    ours = [name for name in loaded if name.split(".")[0] == "rolemesh"]
    rooms = ["rolemesh", "rolemesh.coordinator", "rolemesh.coordinator.commands"]
    assert ours == [*rooms, "rolemesh.coordinator.commands.cli"]


def test_every_module_of_a_command_is_listed() -> None:
    (folder,) = commands.__path__
    modules = {path.stem for path in Path(folder).glob("*.py")} - {"__init__"}
    assert modules - NO_COMMANDS == {name.replace("-", "_") for name in COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_the_command_says_of_itself(name: str) -> None:
    first_paragraph = load_command(name).help.split("\n\n")[0]
    assert " ".join(first_paragraph.split()) == COMMANDS[name]


def test_a_misspelt_command_is_refused_with_the_nearest_name() -> None:
    done = CliRunner().invoke(app, ["statsu"])
    assert done.exit_code == 2
    assert "No such command 'statsu'. Did you mean 'status'?" in done.output


def test_arguments_reach_the_command_called() -> None:
    done = CliRunner().invoke(app, ["serve", "critc"])
    assert done.exit_code == 2
    assert "did you mean critic?" in done.output


def test_train_without_a_recipe_says_what_to_give(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["train"])
    assert done.exit_code == 2
    assert "RECIPE is missing: give a YAML file, or --resume with a run's folder" in done.output


def test_resume_of_what_is_no_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["train", "--resume", "nothing"])
    assert done.exit_code == 2
    assert "'nothing' is neither a folder nor the id of a run" in done.output
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(app, ["train", "--resume", "empty"])
    assert done.exit_code == 2
    assert "empty holds no run that could be resumed" in done.output


def test_checkpoints_of_what_is_no_run_says_so(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["checkpoints", str(tmp_path)])
    assert done.exit_code == 2
    assert "holds no run: name the folder of one" in done.output
