"""Resolves the compose files with the real Docker Compose, as it would before it starts them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.compose_program import compose_binary

REPOSITORY = Path(__file__).resolve().parents[2]
BASE_FILE = REPOSITORY / "docker-compose.yml"
OUTSIDE_FILE = REPOSITORY / "deploy" / "compose.outside.yaml"

IMAGES = {
    "ROLEMESH_IMAGE": "rolemesh:test",
    "ROLEMESH_COORDINATOR_IMAGE": "rolemesh:coordinator-test",
    "ROLEMESH_STORE_PASSWORD_FILE": "/home/me/rolemesh/.secrets/store-password",
}
"""What `make images` writes into .env."""


def gpu_file(num_gpus: int) -> Path:
    return REPOSITORY / "deploy" / f"compose.gpu-{num_gpus}.yaml"


def compose(
    *files: Path,
    variables: Mapping[str, str] | None = None,
    profiles: Sequence[str] = ("*",),
    arguments: Sequence[str] = ("config", "--format", "json"),
) -> subprocess.CompletedProcess[str]:
    """Runs compose with no variable but the given ones, whatever the shell and .env have set.

    Variables are IMAGES unless others are given.
    """
    command = [compose_binary(), "--env-file", os.devnull]
    for profile in profiles:
        command += ["--profile", profile]
    for file in files:
        command += ["--file", str(file)]
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        [*command, *arguments],
        cwd=REPOSITORY,
        env=environment | dict(IMAGES if variables is None else variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def resolve(
    *files: Path, variables: Mapping[str, str] | None = None, profiles: Sequence[str] = ("*",)
) -> dict[str, Any]:
    """The resolved files; variables are given beside IMAGES."""
    completed = compose(*files, variables=IMAGES | dict(variables or {}), profiles=profiles)
    assert completed.returncode == 0, completed.stderr
    assert "variable is not set" not in completed.stderr, completed.stderr
    config: dict[str, Any] = json.loads(completed.stdout)
    return config


def mounts(service: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    """Target to (source, whether it can be written)."""
    return {
        volume["target"]: (volume.get("source", ""), not volume.get("read_only", False))
        for volume in service.get("volumes", [])
    }
