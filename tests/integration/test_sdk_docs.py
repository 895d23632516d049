"""Every block of Python in docs/sdk.md runs, in order, against a coordinator and real services."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import warm_processes
from support.coordinator_doors import written
from support.mesh_runs import tiny_model, tiny_recipe

from rolemesh.rpc.members.authority import Authority

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "sdk.md"
ADDRESS = "127.0.0.1:50050"
"""What the page says; the test's coordinator has another port."""
START_TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 400


def blocks(language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL
    )


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[str]:
    """The address of `rolemesh coordinator`, in a process of its own."""
    environment = {**os.environ, **warm_processes.everything(), "PYTHONSAFEPATH": "1"}
    data = tmp_path / "data"
    with (tmp_path / "coordinator.out").open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "rolemesh.coordinator.commands.cli", "coordinator"),
                *("--data", str(data), "--port", "0", "--http-port", "0"),
                *("--folder", str(tmp_path)),
            ],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    place = data / "coordinator.json"
    deadline = time.monotonic() + START_TIMEOUT_S
    while not place.exists():
        assert process.poll() is None, (tmp_path / "coordinator.out").read_text()
        assert time.monotonic() < deadline, "the coordinator did not start"
        time.sleep(0.05)
    yield json.loads(place.read_text())["address"]
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    finally:
        process.kill()


def write_recipes(folder: Path) -> None:
    """The recipes that the page names, each with a tiny model in the place of its own."""
    model = tiny_model(folder / "model")
    (folder / "recipes").mkdir()
    quick: dict[str, Any] = tiny_recipe(model, run__steps=9)
    (folder / "recipes" / "quickstart-ppo.yaml").write_text(yaml.safe_dump(quick))
    (shown,) = blocks("yaml")
    own = yaml.safe_load(shown)
    own["actor"]["model"] = {"path": str(model), "compute_dtype": "float32"}
    own["actor"]["data"] |= {"train_size": 16, "held_out_size": 4}
    own["services"] = {"actor": {"threads": 1}}
    (folder / "own.yaml").write_text(yaml.safe_dump(own))
    (folder / "certs").mkdir()
    driver = Authority.make().issue("client/drive")
    written(driver, folder / "certs" / "client-drive.pem")
    (folder / "certs" / "authority.crt").write_bytes(driver.authority)


@pytest.mark.timeout(RUN_TIMEOUT_S)
def test_the_page_runs_as_it_stands(coordinator: str, tmp_path: Path) -> None:
    write_recipes(tmp_path)
    program = "\n\n".join(blocks("python")).replace(ADDRESS, coordinator)
    (tmp_path / "page.py").write_text(program)
    ended = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_TIMEOUT_S,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    lines = ended.stdout.splitlines()
    assert [line.split()[0] for line in lines[:2]] != []
    assert any(line.startswith("held out:") for line in lines)
    assert "stopped" in lines
    assert any(line.startswith("RUN_NOT_FOUND - ") for line in lines)
    # An event loop of its own per thread is what grpc.aio can do, but not without a word.
    assert "Traceback" not in ended.stderr, ended.stderr
