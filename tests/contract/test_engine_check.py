"""Tests of what scripts say where a Docker engine is missing, silent or too old."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CHECK = REPOSITORY / "deploy" / "check_engine.sh"
BUILD = REPOSITORY / "deploy" / "build_images.sh"
SBOM = REPOSITORY / "deploy" / "sbom.sh"
TOOLS = ("sh", "sort", "head", "dirname", "tr")
"""What the scripts call besides docker."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The whole search path of the scripts: no docker of this machine is on it."""
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None, tool
        (tmp_path / tool).symlink_to(found)
    return tmp_path


def fake_docker(folder: Path, script: str) -> Path:
    """A docker that runs a script and notes its arguments; returns the file with the notes."""
    notes = folder / "calls"
    program = folder / "docker"
    program.write_text(f'#!/bin/sh\necho "$@" >> "{notes}"\n{script}\n')
    program.chmod(0o755)
    return notes


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(command),
        env={**os.environ, "PATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_machine_without_docker_is_told_what_to_install(folder: Path) -> None:
    completed = run(folder, str(CHECK))
    assert completed.returncode == 1
    expected = "There is no docker here: install Docker Engine 20.10 or newer.\n"
    assert completed.stderr == expected


def test_an_engine_that_does_not_answer_is_told_with_dockers_own_words(folder: Path) -> None:
    fake_docker(folder, 'echo "Cannot connect to the Docker daemon" >&2; exit 1')
    completed = run(folder, str(CHECK))
    assert completed.returncode == 1
    assert completed.stderr.startswith("No Docker engine answers: start it, or set DOCKER_HOST.")
    assert "Cannot connect to the Docker daemon" in completed.stderr


@pytest.mark.parametrize("version", ["1.13.1", "19.03.15", "20.9.0"])
def test_an_engine_that_is_too_old_is_named_with_what_is_needed(folder: Path, version: str) -> None:
    fake_docker(folder, f"echo {version}")
    completed = run(folder, str(CHECK))
    assert completed.returncode == 1
    expected = f"The Docker engine is {version}: rolemesh needs 20.10 or newer.\n"
    assert completed.stderr == expected


@pytest.mark.parametrize("version", ["20.10", "20.10.24+dfsg1", "25.0.3", "29.0.0-rc.1"])
def test_an_engine_that_is_new_enough_passes_in_silence(folder: Path, version: str) -> None:
    fake_docker(folder, f"echo {version}")
    completed = run(folder, str(CHECK))
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout + completed.stderr == ""


def test_images_for_an_unknown_device_are_refused_before_docker_is_asked(folder: Path) -> None:
    notes = fake_docker(folder, "echo 25.0.3")
    completed = run(folder, str(BUILD), "tpu", "--network=host")
    assert completed.returncode == 1
    assert completed.stderr == "build_images.sh: device is 'tpu': give cpu or gpu\n"
    assert not notes.exists()


def test_images_are_not_built_without_an_engine(folder: Path) -> None:
    notes = fake_docker(folder, 'echo "no socket" >&2; exit 1')
    completed = run(folder, str(BUILD), "cpu")
    assert completed.returncode == 1
    assert "No Docker engine answers" in completed.stderr
    assert "build" not in notes.read_text()


def test_what_is_in_an_image_that_is_not_here_cannot_be_listed(folder: Path) -> None:
    fake_docker(folder, "exit 1")
    completed = run(folder, str(SBOM), "rolemesh:nowhere", "python3")
    assert completed.returncode == 1
    assert completed.stderr == (
        "There is no image rolemesh:nowhere here: build it with make images, or pull it.\n"
    )
