"""`rolemesh tinker` as a process, and what it refuses to serve."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from support import warm_processes
from support.commands import command_of
from support.mesh_runs import tiny_model
from support.tinker_servers import LONGEST, tiny_recipe_of
from typer.testing import CliRunner

from rolemesh.coordinator.commands.tinker import app

KEY = "tml-" + "a" * 16


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tiny_recipe_of(tiny_model(folder / "base"))))
    return path


def actor_of(server: subprocess.Popen[str]) -> psutil.Process:
    (found,) = (
        one
        for one in psutil.Process(server.pid).children()
        if "rolemesh.services.actor" in command_of(one)
    )
    return found


def result(http: httpx.Client, promised: httpx.Response) -> Any:
    """What was promised, once it is there."""
    while True:
        found = http.post("retrieve_future", json=promised.json()).raise_for_status().json()
        if found.get("type") != "try_again":
            return found


def test_it_serves_until_it_is_interrupted(recipe: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({KEY: "ann"}))
    words = [
        *(sys.executable, "-m", "rolemesh.coordinator.commands.cli", "tinker", str(recipe)),
        *("--port", "0", "--json", "--out", "out", "--keys", str(keys), "--name", "my/base"),
    ]
    errors = tmp_path / "errors.log"
    with (
        errors.open("w") as log,
        subprocess.Popen(
            words,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **warm_processes.services()},
            # The test may run where SIGINT is ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        ) as server,
    ):
        try:
            assert server.stdout is not None
            told = json.loads(server.stdout.readline())
            assert (told["type"], told["model"]) == ("serving", "my/base")
            with httpx.Client(
                base_url=f"{told['url']}/api/v1/", headers={"X-API-Key": KEY}, timeout=60
            ) as http:
                capabilities = http.get("get_server_capabilities").json()
                assert capabilities["supported_models"][0]["max_context_length"] == LONGEST
                assert http.get("healthz", headers={"X-API-Key": "other"}).status_code == 401
                session_id = http.post("create_session", json={}).json()["session_id"]
                asked = {"model_seq_id": 0, "base_model": "my/base", "lora_config": {"rank": 2}}
                promised = http.post("create_model", json={"session_id": session_id, **asked})
                made = result(http, promised)
                assert made["model_id"] == f"{session_id}:train:0"
                # A killed service is started again, and the output stays one object a line.
                actor = actor_of(server)
                os.kill(warm_processes.forked(actor.pid), signal.SIGKILL)
                event = json.loads(server.stdout.readline())
                assert event["type"] == "event"
                assert "SIGKILL" in event["text"] or "exit code" in event["text"]
                stopped = {"model_id": made["model_id"]}
                promised = http.post("unload_model", json=stopped)
                assert result(http, promised) == {"type": "unload_model", **stopped}
                # A poll is held when the server ends.
                sampler = http.post(
                    "create_sampling_session",
                    json={"session_id": session_id, "sampling_session_seq_id": 0}
                    | {"base_model": "my/base"},
                ).json()["sampling_session_id"]
                target = {"type": "sampling_session", "sampling_session_id": sampler}
                polling = threading.Thread(
                    target=http.post,
                    args=("retrieve_futures",),
                    kwargs={"json": {"target": target}},
                )
                polling.start()
                time.sleep(0.5)
                children = psutil.Process(server.pid).children(recursive=True)
                server.send_signal(signal.SIGINT)
                assert server.wait(60) == 0
                polling.join()
            assert errors.read_text().count("Traceback") == 0
            assert not [one for one in children if one.is_running()]
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("change", "flags", "message", "code"),
    [
        (None, ["--host", "0.0.0.0"], "--host is 0.0.0.0, which others reach", 2),
        (None, ["--keys", "none.json"], "none.json cannot be read", 2),
        (None, ["--port", "{taken}"], "ddress already in use", 1),
        (None, ["--places", "1"], "--places is 1, and a model and a sampler", 2),
        (
            lambda actor: actor["rollout"].update(type="vllm"),
            ["--whole", "--places", "2"],
            "vllm, which samples one model: leave --places out",
            2,
        ),
        (lambda actor: actor.pop("rollout"), [], "no actor with a sampler", 2),
        (
            lambda actor: actor["model"].update(adapter={"type": "lora"}),
            [],
            "each client chooses its own: leave it out",
            2,
        ),
        (lambda actor: actor["model"].update(path="none"), [], "model.path is none: no model", 2),
    ],
)
def test_what_cannot_be_served_is_refused(
    recipe: Path,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], Any] | None,
    flags: list[str],
    message: str,
    code: int,
) -> None:
    whole = yaml.safe_load(recipe.read_text())
    if change is not None:
        change(whole["actor"])
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(whole))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = [word.format(taken=port) for word in flags]
        done = CliRunner().invoke(app, [str(path), "--out", str(tmp_path / "out"), *words])
    assert done.exit_code == code, done.output
    assert message in done.output
    assert not isinstance(done.exception, Exception)
