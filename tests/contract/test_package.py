"""Wheel and sdist hold what an index should serve, and nothing else; `make dist` builds them."""

from __future__ import annotations

import email.message
import email.parser
import hashlib
import os
import stat
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = [sys.executable, str(REPOSITORY / "requirements" / "build_dist.py")]
FOLDERS = {
    *("coordinator", "engine", "services"),
    *("src/rolemesh/quickstart", "src/rolemesh/rpc", "src/rolemesh/v1"),
}
EXTRAS = {"cpu", "gpu", "gpu-cuda12", "tasks", "otel", "wandb", "mlflow", "trackio", "swanlab"}
HEAVY = ("torch", "vllm", "transformers")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of distributions."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([*BUILD, str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    (found,) = built.glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def metadata(unpacked: Path) -> email.message.Message:
    (file,) = unpacked.glob("rolemesh-*.dist-info/METADATA")
    return email.parser.Parser().parsestr(file.read_text())


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def files_of_packages() -> set[str]:
    """Every file in our packages, as a wheel names it."""
    found = {"rolemesh/__init__.py", "rolemesh/__main__.py", "rolemesh/py.typed"}
    for folder in FOLDERS:
        root = REPOSITORY / folder
        found |= {
            f"rolemesh/{root.name}/{path.relative_to(root).as_posix()}"
            for path in root.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
    return found


@pytest.mark.slow
def test_two_builds_have_the_same_bytes(built: Path, tmp_path: Path) -> None:
    """Also where the clock and the modes of new files differ."""
    subprocess.run(
        [*BUILD, str(tmp_path)], env={**os.environ, "TZ": "Asia/Tokyo"}, umask=0o077, check=True
    )
    assert len(digests(built)) == 2
    assert digests(built) == digests(tmp_path)


def test_the_wheel_holds_every_file_of_our_packages_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    ours = {entry.filename for entry in entries if ".dist-info/" not in entry.filename}
    assert ours == files_of_packages()
    for example in (
        *(
            "engine/layout/ranks.py",
            "services/runtime/process.py",
            "coordinator/dashboard/index.html",
        ),
        *("v1/trainer_pb2.py", "v1/trainer_pb2.pyi", "v1/trainer_pb2_grpc.py"),
    ):
        assert f"rolemesh/{example}" in ours
    assert not [entry for entry in entries if stat.S_ISLNK(entry.external_attr >> 16)]


def test_the_sdist_holds_sources_and_no_leftovers(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    names = {member.name.partition("/")[2] for member in members if member.isfile()}
    assert {name.split("/")[0] for name in names} == {
        *("LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"),
        *("protos", "src"),
    }
    contracts = (REPOSITORY / "protos").rglob("*.proto")
    assert {path.relative_to(REPOSITORY).as_posix() for path in contracts} < names
    sources = {name for name in names if name.startswith("src/rolemesh/")}
    assert sources == {f"src/{name}" for name in files_of_packages()}


def test_the_sdist_gives_the_same_wheel(sdist: Path, unpacked: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        # We made it a moment ago; the argument `filter` came with 3.11.4, and Debian 12 has 3.11.2.
        archive.extractall(tmp_path)
    (source,) = tmp_path.iterdir()
    program = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run(
        [sys.executable, "-c", program], cwd=source, capture_output=True, umask=0o022, check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "again")
    assert digests(tmp_path / "again") == digests(unpacked)


def test_the_index_is_told_of_licence_python_and_page(metadata: email.message.Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == "<3.15,>=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (REPOSITORY / "README.md").read_text()


def test_the_extras_are_the_documented_ones(metadata: email.message.Message) -> None:
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS


def test_nobody_is_made_to_install_tools_or_torch(metadata: email.message.Message) -> None:
    wanted = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    always = {one.name for one in wanted if one.marker is None}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    tools = {Requirement(text).name for text in project["dependency-groups"]["dev"]}
    extras = project["project"]["optional-dependencies"]
    # Tests send traces too.
    tools -= {Requirement(text).name for text in extras["otel"]}
    assert {"pytest", "ruff", "mypy"} < tools
    assert tools.isdisjoint(one.name for one in wanted)
    assert always == {Requirement(text).name for text in project["project"]["dependencies"]}
    assert always.isdisjoint(Requirement(text).name for text in extras["cpu"])


def test_the_wheel_is_imported_and_called_without_torch(unpacked: Path) -> None:
    program = (
        "import contextlib, sys\n"
        "import rolemesh.coordinator.sdk, rolemesh.coordinator.run.session\n"
        "from rolemesh.coordinator.commands.cli import main\n"
        "sys.argv = ['rolemesh', '--help']\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "print(rolemesh.__file__)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        check=True,
    )
    *shown, place, heavy = done.stdout.splitlines()
    assert any("Makes a run of a recipe." in line for line in shown)
    assert Path(place) == unpacked / "rolemesh" / "__init__.py"
    assert heavy == "[]"
