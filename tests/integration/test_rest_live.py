"""REST of a live mesh: the OpenAPI document against a run of real services, then its wishes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from support.mesh_runs import CliRun, tiny_model, tiny_recipe

START_S = 120.0
"""Five processes that import torch on a busy machine with two cores."""

STEPS = 100_000
"""More than are made before the test ends the run."""

# A paused run has no events to send and a stopped one takes its server along: both come afterwards.
CONFIG = """
seed = 5
max-stream-events = 5
request-timeout = 20
[generation]
max-examples = 5
[parameters]
run_id = "{run_id}"
log = "actor"
[[operations]]
include-operation-id = "watch_run"
checks.positive_data_acceptance.expected-statuses = ["2xx", "404", "410"]
[[operations]]
include-operation-id = "pause_run"
enabled = false
[[operations]]
include-operation-id = "stop_run"
enabled = false
"""


@pytest.mark.slow
def test_the_document_holds_for_a_live_mesh(tmp_path: Path) -> None:
    recipe = tiny_recipe(tiny_model(tmp_path / "model"), run__steps=STEPS)
    run = CliRun(recipe, tmp_path)
    try:
        run.wait_until(lambda: bool(run.url), START_S)
        right = run.authorization
        with httpx.Client(base_url=f"{run.url}api/v1/", timeout=10, headers=right) as client:
            (known,) = client.get("runs").json()["runs"]
            place = f"runs/{known['run_id']}"

            def is_(state: str) -> bool:
                return bool(client.get(place).json()["state"] == state)

            run.wait_until(lambda: client.get(place).json()["step"] > 1, START_S)
            (tmp_path / "schemathesis.toml").write_text(CONFIG.format(run_id=known["run_id"]))
            checked = subprocess.run(
                [sys.executable, "-m", "schemathesis.cli", "run", f"{run.url}openapi.json",
                 "--checks=all", f"--header=Authorization: {right['authorization']}"],
                cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
            )  # fmt: skip
            assert checked.returncode == 0, checked.stdout
            assert is_("running")

            client.post(f"{place}/pause").raise_for_status()
            run.wait_until(lambda: is_("paused"), START_S)
            held = client.get(place).json()["step"]
            client.post(f"{place}/resume").raise_for_status()
            run.wait_until(lambda: client.get(place).json()["step"] > held, START_S)
            client.post(f"{place}/stop").raise_for_status()
        assert run.wait(START_S) == 0
    finally:
        run.close()
