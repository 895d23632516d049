"""The wheel that `make dist` writes, in a new environment far from the repository, trains.

Its dependencies are those of this environment, linked: a second copy of torch and vLLM is 3 GB and
needs a network. pip still looks whether they are what the wheel asks for. rolemesh itself comes
from the wheel alone: this environment's own is behind a link, which Python does not follow.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from safetensors.torch import load_file

REPOSITORY = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
STEPS = 4
"""What `rolemesh init --tiny` asks for; a recipe of its own that says another number fails here."""

pytestmark = pytest.mark.slow


def run(*command: str | Path, folder: Path) -> str:
    """What a command says that ends well, started where nothing leads to the repository."""
    # PYTHONPATH would bring the repository's rolemesh in before the wheel's; what tests set for
    # services of ours would grant these more than a user's have.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ROLEMESH"))}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a new environment that has the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    build = REPOSITORY / "requirements" / "build_dist.py"
    run(sys.executable, build, folder / "dist", folder=folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    # Without pip, which would take half of the time: ours installs there as well.
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env", folder=folder)
    packages = sysconfig.get_path("purelib", vars={"base": str(folder / "env")})
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index"]
    assert f"Successfully installed rolemesh-{VERSION}" in run(*pip, wheel, folder=folder)
    return python.parent


def of_readme(language: str, index: int = 0) -> str:
    """A code block of the README's section on data and reward."""
    section = (REPOSITORY / "README.md").read_text().partition("## Your data, your reward")[2]
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[index]


def test_what_the_readme_says_of_a_wheel_trains_to_its_end(installed: Path, tmp_path: Path) -> None:
    said = run(
        installed / "python",
        "-c",
        "import rolemesh, importlib.metadata as m; print(rolemesh.__file__, m.version('rolemesh'))",
        folder=tmp_path,
    )
    place, version = said.split()
    assert Path(place).is_relative_to(installed.parent / "lib")
    assert version == VERSION

    (tmp_path / "my.jsonl").write_text(of_readme("json"))
    (tmp_path / "rewards.py").write_text(of_readme("python"))
    commands = [line.split("#")[0].split() for line in of_readme("sh", 1).splitlines()]
    assert [words[1] for words in commands] == ["init", "check", "train"]
    # What is new is compiled first, which on a busy machine takes longer than a look may take.
    commands[1] += ["--timeout", "200"]
    for _, *words in commands:
        run(installed / "rolemesh", *words, folder=tmp_path)

    (made,) = (tmp_path / "runs").iterdir()
    steps = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    # Of 3 prompts with 4 completions each, 4 rows make an optimizer step. Whether these move a
    # weight is chance: a random model hardly ever writes the number that earns a reward.
    versions = [(one["step"], one["policy_version/max"]) for one in steps]
    assert versions == [(step, 3 * (step - 1)) for step in range(1, STEPS + 1)]
    summary = json.loads((made / "summary.json").read_text())
    assert summary["state"] == "succeeded"
    assert summary["versions"].keys() == {"coordinator", "actor", "reward"}
    assert {of["rolemesh"] for of in summary["versions"].values()} == {VERSION}
    trained, first = shapes_in(made / "model"), shapes_in(tmp_path / ".models" / "tiny")
    assert trained == first


def shapes_in(model: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each weight of a folder, all of whose numbers are finite."""
    weights = load_file(model / "model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())
    return {name: tuple(weight.shape) for name, weight in weights.items()}
