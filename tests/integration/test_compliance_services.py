"""Our own services keep the contract that outsiders are held to: every role, a process each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import warm_processes
from support.mesh_runs import tiny_recipe
from support.rollout_services import process_of
from support.tiny_models import write_tiny_classifier, write_tiny_llama

ROLES = ("reward", "cost", "reference", "teacher", "critic", "actor", "rollout")

SAYS_NOTHING = {
    "reward": {"reward.reference-refused"},
    "cost": {"reward.reference-refused"},
}
"""Checks that are about servers of another kind."""


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    recipe = tiny_recipe(write_tiny_llama(folder / "llama", max_position_embeddings=512))
    actor = recipe["actor"]
    # A new head answers 0 everywhere, of which nothing can be told.
    head = write_tiny_classifier(folder / "head", num_labels=1)
    return {
        **recipe,
        "cost": recipe["reward"],
        "teacher": recipe["reference"],
        "critic": {**recipe["critic"], "model": {"path": str(head), "compute_dtype": "float32"}},
        "rollout": {
            "model": {"path": actor["model"]["path"]},
            **{name: actor[name] for name in ("rollout", "data")},
        },
    }


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    folder = tmp_path_factory.mktemp("services")
    with ExitStack() as stack, ThreadPoolExecutor() as pool:

        def start(role: str) -> str:
            return stack.enter_context(process_of(role, folder))[0]

        yield dict(zip(ROLES, pool.map(start, ROLES), strict=True))


@pytest.mark.parametrize(
    "role",
    [
        # The code of cost is that of reward, and reference's one method is of actor's kind.
        pytest.param(role, marks=pytest.mark.slow if role in ("cost", "reference") else ())
        for role in ROLES
    ],
)
def test_our_service_of_each_role_passes_every_check(
    role: str, addresses: Mapping[str, str], specs: Mapping[str, Any], tmp_path: Path
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(specs[role]))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "rolemesh.coordinator.commands.cli", "compliance"),
            *(f"grpc://{addresses[role]}", "--role", role, "--spec", str(spec), "--json"),
        ],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, **warm_processes.commands()},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    findings = {line["check"]: line for line in lines if line["type"] == "check"}
    assert len(findings) > 30
    other = {name for name, line in findings.items() if line["outcome"] != "holds"}
    assert other == SAYS_NOTHING.get(role, set()), [findings[name] for name in other]
    assert lines[-1]["type"] == "verdict"
