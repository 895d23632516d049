"""Secrets stay where they are needed: planted ones are looked for in all that a run leaves.

One run of a coordinator, with a judge that sends the token back and a service that is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from redis import Redis
from support import warm_processes
from support.commands import command_of
from support.mesh_runs import tiny_model, tiny_recipe
from support.reward_servers import RewardServer, reward_server

from rolemesh.coordinator.state.server.embedded import EmbeddedValkey

SECRETS = {
    name: f"planted-{name}-3f9c1d7a"
    for name in ("api-file", "api-variable", "store", "judge", "cloud", "hub", "url")
}
"""Each holds its own name, so that a finding says what leaked."""

VARIABLES = {
    "ROLEMESH_API_TOKEN": SECRETS["api-variable"],
    "JUDGE_TOKEN": SECRETS["judge"],
    "AWS_SECRET_ACCESS_KEY": SECRETS["cloud"],
    "HF_TOKEN": SECRETS["hub"],
}
"""In the shell of the user who starts the coordinator."""

OF_THE_USER = frozenset({"api-variable", "judge", "cloud", "hub"})
"""Those that stand in the environment of that user's own processes."""

TRACKER = """
class Keeper:
    def __init__(self, server):
        self.server = server
    def start(self, run, config):
        print("keeps", run.run_id, config)
    def log(self, step, scalars):
        raise RuntimeError(f"{self.server} does not answer")
    def finish(self, state):
        pass
"""
START_S, RUN_S = 60.0, 240.0
PROGRAM = (sys.executable, "-m", "rolemesh.coordinator.commands.cli")


def found_in(text: str | bytes) -> set[str]:
    """Names of the secrets in a text."""
    data = text.encode() if isinstance(text, str) else text
    return {name for name, secret in SECRETS.items() if secret.encode() in data}


@contextlib.contextmanager
def hub(folder: Path, store_url: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A coordinator, and its URL."""
    process = subprocess.Popen(
        [
            *(*PROGRAM, "coordinator", "--json"),
            *("--data", "data", "--port", "0", "--http-port", "0", "--store-url", store_url),
            *("--store-password-file", "../store-password", "--token-file", "../token"),
            *("--folder", "..", "--code-root", ".", "--variable", "JUDGE_TOKEN"),
            *("--allow-host", "127.0.0.1"),
        ],
        cwd=folder,
        env={**os.environ, **VARIABLES, **warm_processes.services()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=(folder / "stderr.log").open("wb"),
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())["url"]
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.wait(30)
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def leaks_of(process: psutil.Process) -> dict[str, set[str]]:
    """Secrets in a process's command line, and in its environment but for those it needs."""
    line = process.cmdline()
    environment = Path(f"/proc/{process.pid}/environ").read_bytes()
    name = " ".join(line)
    allowed: frozenset[str] = frozenset()
    if "rolemesh.coordinator.commands.cli" in name:
        allowed = OF_THE_USER
    elif "rolemesh.coordinator.trackers.child" in name:
        allowed = OF_THE_USER - {"api-variable"}
    elif "rolemesh.services.reward" in name:
        allowed = frozenset({"judge"})
    return {
        f"command line of {name}": found_in(name),
        f"environment of {name}": found_in(environment) - allowed,
    }


def answers(client: httpx.Client, run_id: str) -> dict[str, set[str]]:
    """Secrets in what every page and every route of a run answers."""
    paths = client.get("openapi.json").json()["paths"]
    asked = ["", "openapi.json", "metrics", *(path for path in paths if "get" in paths[path])]
    found = {}
    for path in asked:
        place = path.removeprefix("/").replace("{run_id}", run_id)
        for name, value in {
            "role": "reward",
            "name": "reward",
            "log": "reward",
            "step": "1",
        }.items():
            place = place.replace(f"{{{name}}}", value)
        body = b""
        # Streams of events do not end by themselves.
        with contextlib.suppress(httpx.ReadTimeout), client.stream("GET", place) as answer:
            for piece in answer.iter_bytes():
                body += piece
        found[f"GET {place}"] = found_in(body)
        assert body or place.startswith("healthz"), place
    return found


def wait_for(client: httpx.Client, run_id: str, condition: Any, limit_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + limit_s
    while True:
        run: dict[str, Any] = client.get(f"api/v1/runs/{run_id}").json()
        if condition(run):
            return run
        assert run["state"] not in ("failed", "stopped"), run
        assert time.monotonic() < deadline, run
        time.sleep(0.1)


@contextlib.contextmanager
def store(folder: Path) -> Iterator[tuple[EmbeddedValkey, Callable[..., Any]]]:
    """A server with a user who has a password, and a way to send it commands as its owner."""
    with asyncio.Runner() as runner:
        valkey = EmbeddedValkey(folder)
        runner.run(valkey.start())
        with Redis.from_url(valkey.url) as admin:
            admin.execute_command(
                "ACL", "SETUSER", "mesh", "on", f">{SECRETS['store']}", "~*", "+@all"
            )
            yield valkey, admin.execute_command
        runner.run(valkey.stop())


@pytest.fixture
def judge() -> Iterator[RewardServer]:
    with reward_server() as server:
        yield server


def test_planted_secrets_are_nowhere_but_where_they_are_needed(
    tmp_path: Path, judge: RewardServer
) -> None:
    (tmp_path / "store-password").write_text(SECRETS["store"])
    (tmp_path / "token").write_text(SECRETS["api-file"])
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "keeper.py").write_text(TRACKER)
    judge.faults = ["echo"]
    source = {
        "type": "openrlhf",
        "urls": [f"{judge.url}/get_reward"],
        "token_variable": "JUDGE_TOKEN",
        "tries": 1,
        "on_failure": {"type": "value", "value": 0.0},
    }
    server = f"http://me:{SECRETS['url']}@127.0.0.1:9/"
    recipe = tiny_recipe(
        tiny_model(tmp_path / "model"),
        run__steps=4,
        reward__source=source,
        trackers=[{"type": "custom", "tracker": "keeper.py:Keeper", "options": {"server": server}}],
    )
    leaks: dict[str, set[str]] = {}
    with store(tmp_path / "store") as (valkey, ask):
        with (
            hub(folder, f"unix://mesh@{valkey.socket}") as (process, url),
            httpx.Client(
                base_url=url,
                headers={"authorization": f"Bearer {SECRETS['api-file']}"},
                timeout=httpx.Timeout(30.0, read=1.5),
            ) as client,
        ):
            refused = client.post(
                "api/v1/runs",
                json={
                    "run_id": "refused",
                    "recipe": yaml.safe_dump({**recipe, "reward": server}),
                    "overrides": [f"critic.model.path={server}"],
                },
            )
            assert refused.status_code == 400
            leaks["refusal"] = found_in(refused.content)
            made = client.post(
                "api/v1/runs", json={"run_id": "planted", "recipe": yaml.safe_dump(recipe)}
            )
            assert made.status_code in (200, 201), made.text
            wait_for(client, "planted", lambda run: int(run["step"]) >= 1, START_S + RUN_S)
            family = psutil.Process(process.pid).children(recursive=True)
            seen = [psutil.Process(process.pid), psutil.Process(valkey.pid), *family]
            for one in seen:
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    leaks |= leaks_of(one)
            for part in ("services.reward", "services.actor", "trackers.child", "commands.cli"):
                assert any(part in name for name in leaks), part
            (victim,) = [one for one in family if "rolemesh.services.critic" in command_of(one)]
            victim.send_signal(signal.SIGKILL)
            run = wait_for(client, "planted", lambda run: run["state"] == "succeeded", RUN_S)
            assert run["recoveries"] == 1
            leaks |= answers(client, "planted")
        ask("CONFIG", "SET", "rdbcompression", "no")
        for key in ask("KEYS", "*"):
            leaks[f"store: {key!r}"] = found_in(ask("DUMP", key))
    doctor = subprocess.run(
        [*PROGRAM, "doctor", "data/runs/planted/recipe.yaml"],
        cwd=folder,
        env={**os.environ, **VARIABLES},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    leaks["doctor"] = found_in(doctor.stdout)
    for file in [one for one in folder.rglob("*") if one.is_file()]:
        # The recipe itself, which its owner alone may read.
        is_private = file.stat().st_mode & 0o077 == 0
        leaks[str(file.relative_to(folder))] = found_in(file.read_bytes()) - (
            {"url"} if is_private else set()
        )
    told = (folder / "data/runs/planted/logs/reward.log").read_text()
    assert "not with Bearer ***" in told, "the judge sent the token back, and that was told"
    assert {name: found for name, found in leaks.items() if found} == {}
