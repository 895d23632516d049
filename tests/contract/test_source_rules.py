"""Rules of our source: what arrives is never run, and rooms stay small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
OURS = ("coordinator", "engine", "services", "src/rolemesh/rpc", "src/rolemesh/quickstart")
SHOWN = (*OURS, "examples", "recipes", "docs")
RULES = ("S102", "S301", "S302", "S307", "S602", "S605", "TID251")
"""exec, pickle, marshal, eval, two ways to a shell, and the modules that pyproject.toml bans."""


def trees(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    """Each file of Python, parsed; generated code is left out."""
    found = 0
    for folder in folders:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            found += 1
            yield path.relative_to(REPOSITORY), ast.parse(path.read_text())
    assert found > 1


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Calls, by the last part of what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func
            yield (
                name.attr
                if isinstance(name, ast.Attribute)
                else name.id
                if isinstance(name, ast.Name)
                else "",
                node,
            )


# --- ruff -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("import pickle\npickle.loads(data)", "S301"),
        ("import pickle\npickle.loads(data)", "TID251"),
        ("import cloudpickle", "TID251"),
        ("from multiprocessing.reduction import ForkingPickler\nimport dill", "TID251"),
        ("import marshal\nmarshal.loads(data)", "S302"),
        ("eval(data)", "S307"),
        ("exec(data)", "S102"),
        ("import subprocess\nsubprocess.run(data, shell=True)", "S602"),
        ("import os\nos.system(data)", "S605"),
        ("import torch\ntorch.load(data, weights_only=True)", "TID251"),
        ("from torch import load", "TID251"),
        ("import torch\ntorch.jit.load(data)", "TID251"),
        ("import torch.distributed.checkpoint as dcp", "TID251"),
        ("from torch import distributed\ndistributed.broadcast_object_list([data])", "TID251"),
        ("import numpy as np\nnp.load(data, allow_pickle=True)", "TID251"),
    ],
)
def test_code_that_runs_what_arrives_does_not_pass_lint(code: str, rule: str) -> None:
    completed = subprocess.run(
        [
            *(Path(sys.executable).with_name("ruff"), "check", "--output-format", "concise"),
            *("--stdin-filename", "services/x.py", "-"),
        ],
        input=f"data = b''\n{code}\n",
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert completed.returncode == 1
    assert f" {rule} " in completed.stdout


def test_no_file_of_ours_is_let_off_these_rules() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["ruff"]
    assert settings["extend-exclude"] == ["src/rolemesh/v1"]
    assert not any(rule in settings["lint"]["ignore"] for rule in RULES)
    let_off = settings["lint"]["per-file-ignores"]
    assert not any(rule in RULES for rules in let_off.values() for rule in rules)
    silenced = re.compile(rf"# *(ruff|noqa)\b(?!: *[A-Z]+\d)|noqa:.*\b({'|'.join(RULES)})\b")
    for path in (one for folder in SHOWN for one in (REPOSITORY / folder).rglob("*.py")):
        assert not silenced.search(path.read_text()), path


# --- what ruff does not know ------------------------------------------------------------------


def narrows(test: ast.expr) -> bool:
    """Whether an assertion only tells the type checker what the code above has made sure of."""
    if isinstance(test, ast.Compare):
        (operator,) = test.ops
        (right,) = test.comparators
        return isinstance(operator, ast.IsNot) and isinstance(right, ast.Constant)
    return isinstance(test, ast.Call) and ast.unparse(test.func) == "isinstance"


def test_no_assertion_checks_what_arrives() -> None:
    """`python -O` leaves assertions out, and then what they checked passes."""
    checks = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path, tree in trees(*OURS)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert) and not narrows(node.test)
    ]
    assert checks == [], "raise an error that names field, value and remedy"


LOADERS = ("from_pretrained", "from_config", "EngineArgs", "AsyncEngineArgs", "LLM")
"""What makes a model or a tokenizer, by its class or by the code of a folder."""

OF_OURS = ("DecoderShape.from_config", "Model.from_config", "cls.from_config")


def test_every_model_and_tokenizer_is_made_without_the_code_of_its_folder() -> None:
    found = 0
    for path, tree in trees(*OURS):
        for name, call in calls(tree):
            if name not in LOADERS or ast.unparse(call.func) in OF_OURS:
                continue
            found += 1
            given = {word.arg: word.value for word in call.keywords}
            place = f"{path}:{call.lineno}"
            trust = given.get("trust_remote_code")
            # Left out, transformers asks on standard input, and a "y" there runs the code.
            assert isinstance(trust, ast.Constant), place
            assert trust.value is False, place
            if name == "from_pretrained":
                assert ast.unparse(given["local_files_only"]) == "True", place
    assert found > 10


def test_nothing_of_ours_trusts_remote_code() -> None:
    trusting = re.compile(
        r"trust[_-]remote[_-]code[\"']?\s*[=:]\s*(?![Ff]alse)\w+|VLLM_ALLOW_INSECURE"
    )
    for folder in (*SHOWN, "deploy"):
        for path in (REPOSITORY / folder).rglob("*"):
            if path.suffix in (".py", ".yaml", ".sh", ".md", ".toml"):
                assert not trusting.search(path.read_text()), path


# --- rooms ------------------------------------------------------------------------------------


def test_no_room_has_more_than_a_dozen_files_and_each_says_its_idea() -> None:
    rooms: dict[Path, list[Path]] = {}
    for path, tree in trees(*OURS):
        if path.name != "__init__.py":
            rooms.setdefault(path.parent, []).append(path)
        else:
            assert ast.get_docstring(tree), f"{path} does not say what its room is for"
    # One file for each command is what a reader looks for.
    del rooms[Path("coordinator/commands")]
    assert not {f"{room}: {len(files)}" for room, files in rooms.items() if len(files) > 12}
