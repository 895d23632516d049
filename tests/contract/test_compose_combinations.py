"""Tests of every documented combination of compose files, against reviewed results.

compose/cpu.yaml is docker-compose.yml alone, resolved. Every other combination is kept as its
difference from that. After a change that is meant, write them again and read the difference:

    PYTHONPATH=tests .venv/bin/python tests/contract/test_compose_combinations.py
"""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
from support.compose_files import BASE_FILE, IMAGES, OUTSIDE_FILE, compose, gpu_file

REVIEWED = Path(__file__).with_name("compose")

TOKEN = {"ROLEMESH_API_TOKEN_FILE": "/home/me/.rolemesh-token"}

COMBINATIONS: dict[str, tuple[tuple[Path, ...], tuple[str, ...], dict[str, str]]] = {
    "cpu": ((BASE_FILE,), (), {}),
    "every-role": ((BASE_FILE,), ("teacher", "cost", "rollout"), {}),
    "monitoring": ((BASE_FILE,), ("monitoring",), {**TOKEN, "ROLEMESH_API_HOST": "0.0.0.0"}),
    "outside": ((BASE_FILE, OUTSIDE_FILE), (), TOKEN),
    "gpu-1": ((BASE_FILE, gpu_file(1)), (), {}),
    "gpu-2": ((BASE_FILE, gpu_file(2)), (), {}),
    "gpu-4": ((BASE_FILE, gpu_file(4)), (), {}),
    "gpu-8": ((BASE_FILE, gpu_file(8)), (), {}),
    "gpu-4-outside": ((BASE_FILE, gpu_file(4), OUTSIDE_FILE), (), TOKEN),
}
"""Files, profiles and variables, by name."""


def resolved(name: str) -> list[str]:
    files, profiles, variables = COMBINATIONS[name]
    completed = compose(
        *files,
        profiles=profiles,
        variables=IMAGES | variables,
        arguments=("config", "--no-path-resolution"),
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.splitlines(keepends=True)


def as_reviewed(name: str) -> tuple[Path, str]:
    """The file that holds a combination, and what it has to hold."""
    if name == "cpu":
        return REVIEWED / "cpu.yaml", "".join(resolved("cpu"))
    lines = difflib.unified_diff(resolved("cpu"), resolved(name), "cpu", name)
    return REVIEWED / f"{name}.diff", "".join(lines)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_combination_is_what_was_reviewed(name: str) -> None:
    path, text = as_reviewed(name)
    assert text == path.read_text(), f"if this is meant, run python {Path(__file__).name}"


def test_every_reviewed_file_belongs_to_a_combination() -> None:
    assert {path.stem for path in REVIEWED.iterdir()} == set(COMBINATIONS)


if __name__ == "__main__":
    REVIEWED.mkdir(exist_ok=True)
    for combination in COMBINATIONS:
        written, content = as_reviewed(combination)
        written.write_text(content)
