"""Tests of a hub whose callers hang up, whose store fails and whose runs die.

integration/ has the rest.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.fake_recipes import PPO_ROLES, fake_recipe
from support.fake_roles import until

from rolemesh.coordinator.commands.hub import hub as hub_module
from rolemesh.coordinator.commands.hub.hub import MAX_RESTARTS, Hub
from rolemesh.coordinator.recipe.sections.api_section import ApiSpec
from rolemesh.coordinator.state.errors import StoreUnavailableError
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState, RunStream
from rolemesh.engine.granted.grants import Grant
from rolemesh.rpc.errors import (
    CapacityError,
    ForbiddenError,
    InvalidRequestError,
    PreconditionError,
    RolemeshError,
)
from rolemesh.v1 import coordinator_pb2

GRANT = Grant(folders=(Path("/"),), hosts=("127.0.0.1",))
"""All that the recipes of these tests name."""

ENDS_AT_ONCE = "import sys; sys.exit(2)"
IS_KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
GOES_ON = "import time; time.sleep(60)"


class FlakyStore(MemoryStateStore):
    """Fails or waits where the test wants it."""

    url = "redis://127.0.0.1:1/0"

    def __init__(self) -> None:
        super().__init__()
        self.failures_to_come: dict[str, int] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    def _fail(self, method: str) -> None:
        if self.failures_to_come.get(method, 0):
            self.failures_to_come[method] -= 1
            raise StoreUnavailableError(self.url, ConnectionError("gone"))

    async def append_entry(self, *arguments: Any, **named: Any) -> str:
        await self.gate.wait()
        self._fail("append_entry")
        return await super().append_entry(*arguments, **named)

    async def next_epoch(self, run_id: str, *, at_least: int = 1) -> int:
        self._fail("next_epoch")
        return await super().next_epoch(run_id, at_least=at_least)


def recipe(**run: Any) -> str:
    services = {role: {"address": "127.0.0.1:1"} for role in PPO_ROLES}
    values = fake_recipe(services=services, **run).model_dump(mode="json")
    del values["store"]
    return yaml.safe_dump(values)


@pytest.fixture
async def store() -> FlakyStore:
    return FlakyStore()


class Spawned(list[str]):
    """Runs that got a process, in order, and what that process does instead of `train`."""

    def __init__(self) -> None:
        super().__init__()
        self.program = ENDS_AT_ONCE
        self.commands: list[list[str]] = []
        self.children: list[Any] = []
        self.on_start: Callable[[str], None] = lambda run_id: None


@pytest.fixture
async def spawned(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Spawned]:
    spawned = Spawned()
    started = subprocess.Popen

    def popen(command: list[str], **settings: Any) -> Any:
        spawned.append(command[command.index("--run-id") + 1])
        spawned.commands.append(command)
        spawned.on_start(spawned[-1])
        spawned.children.append(started([command[0], "-c", spawned.program], **settings))
        return spawned.children[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(hub_module, "_POLL_S", 0.01)
    yield spawned
    for child in spawned.children:
        child.kill()
        child.wait()


@pytest.fixture
async def hub(store: FlakyStore, spawned: Spawned, tmp_path: Path) -> AsyncIterator[Hub]:
    hub = Hub(store, tmp_path, outlives=True, max_runs=4, api=ApiSpec(), grant=GRANT)
    yield hub
    await hub.close()


def begun(folder: Path) -> None:
    """Leaves what a run leaves that has got as far as services."""
    shutil.copyfile(folder / "recipe.yaml", folder / "config.yaml")
    (folder / "run.json").write_text(json.dumps({"run_id": folder.name}))


async def failed_run(hub: Hub, store: FlakyStore, folder: Path) -> None:
    """Makes a run that began, and failed by its own word."""
    await hub.create_run(folder.name, recipe(), ())
    await until(lambda: store._runs[folder.name].state is RunState.FAILED)
    begun(folder)


async def test_a_run_begins_although_its_creator_hung_up(
    hub: Hub, store: FlakyStore, spawned: Spawned
) -> None:
    store.gate.clear()
    creating = asyncio.create_task(hub.create_run("run-1", recipe(), ()))
    await until(lambda: "run-1" in store._runs)
    creating.cancel()
    await asyncio.wait({creating})
    store.gate.set()
    await until(lambda: spawned == ["run-1"])


async def test_a_repeat_begins_the_run_that_a_failing_store_kept_from_beginning(
    hub: Hub, store: FlakyStore, spawned: Spawned
) -> None:
    store.failures_to_come["append_entry"] = 1
    with pytest.raises(StoreUnavailableError):
        await hub.create_run("run-1", recipe(), ())
    assert (await store.get_run("run-1")).state is RunState.STARTING
    for _ in range(2):
        await hub.create_run("run-1", recipe(), ())
    assert spawned == ["run-1"]


async def test_the_end_of_a_run_is_written_down_once_the_store_is_back(
    hub: Hub, store: FlakyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "_STORE_PAUSE_S", 0.01, raising=False)
    store.failures_to_come["next_epoch"] = 3
    await hub.create_run("run-1", recipe(), ())
    await until(lambda: store._runs["run-1"].state is RunState.FAILED)
    assert "exit code 2" in store._runs["run-1"].failure


async def test_a_recipe_nested_too_deep_is_refused(hub: Hub) -> None:
    deep = "run: " + "[" * 3000 + "]" * 3000
    with pytest.raises(InvalidRequestError, match="nests more than 50 levels") as refused:
        await hub.create_run("run-1", deep, ())
    assert refused.value.reason == "RECIPE_INVALID"


async def test_what_may_hold_a_password_is_read_by_the_owner_alone(
    hub: Hub, tmp_path: Path
) -> None:
    await hub.create_run("run-1", recipe(), ())
    for name in ("request.json", "recipe.yaml"):
        assert (tmp_path / "runs/run-1" / name).stat().st_mode & 0o077 == 0


async def test_a_run_that_dies_each_time_is_started_again_three_times(
    hub: Hub, store: FlakyStore, spawned: Spawned, tmp_path: Path
) -> None:
    spawned.program = IS_KILLED
    await hub.create_run("run-1", recipe(), ())
    await until(lambda: store._runs["run-1"].state is RunState.FAILED)
    assert len(spawned) == 1 + MAX_RESTARTS
    assert "was killed by SIGKILL; it was started again 3 times" in store._runs["run-1"].failure
    # It never got as far as services, so there was nothing to go on from.
    assert not any("--resume" in command for command in spawned.commands)


async def test_a_step_between_two_deaths_counts_anew(
    hub: Hub, store: FlakyStore, spawned: Spawned, tmp_path: Path
) -> None:
    folder = tmp_path / "runs/run-1"

    def make_steps(run_id: str) -> None:
        if len(spawned) == 1:
            begun(folder)
        if len(spawned) in (3, 4):
            record = store._runs[run_id]
            store._runs[run_id] = dataclasses.replace(record, step=record.step + 1)

    spawned.program, spawned.on_start = IS_KILLED, make_steps
    await hub.create_run("run-1", recipe(), ())
    await until(lambda: store._runs["run-1"].state is RunState.FAILED)
    # The first start, three and three after the third and the fourth have made a step.
    assert len(spawned) == 4 + MAX_RESTARTS
    assert [command[-2:] == ["--resume", str(folder)] for command in spawned.commands] == [
        False,
        *(True for _ in spawned[1:]),
    ]
    events = [
        coordinator_pb2.RunEvent.FromString(entry.payload)
        for entry in await store.read_entries("run-1", RunStream.EVENTS)
    ]
    recovering = [
        event.state.failure
        for event in events
        if event.state.state == coordinator_pb2.RUN_STATE_RECOVERING
    ]
    assert len(recovering) == len(spawned) - 1
    # No process has come so far as to say that the recovery had an end.
    assert store._runs["run-1"].recoveries == 1
    assert "was killed by SIGKILL; it is started again" in recovering[0]


async def test_a_run_that_was_asked_to_stop_is_not_started_again(
    hub: Hub, store: FlakyStore, spawned: Spawned
) -> None:
    spawned.program = GOES_ON
    await hub.create_run("run-1", recipe(), ())
    await store.update_run("run-1", stop_requested=True)
    spawned.children[0].kill()
    await until(lambda: store._runs["run-1"].state is RunState.FAILED)
    assert len(spawned) == 1


async def test_a_later_hub_starts_gone_runs_again_as_far_as_there_is_room(
    hub: Hub, store: FlakyStore, spawned: Spawned, tmp_path: Path
) -> None:
    spawned.program = GOES_ON
    for run_id in ("older", "newer", "goes-on"):
        await hub.create_run(run_id, recipe(), ())
        begun(tmp_path / "runs" / run_id)
    await hub.close()
    for child in spawned.children[:2]:
        child.kill()
        child.wait()
    store.url = "redis://127.0.0.1:2/0"
    later = Hub(
        store,
        tmp_path,
        outlives=True,
        max_runs=2,
        api=ApiSpec(http_port=None, token_file=tmp_path / "token"),
        grant=GRANT,
    )
    (tmp_path / "token").write_text("s3cret")
    await later.adopt()
    assert spawned[3:] == ["older"]
    assert store._runs["goes-on"].state is RunState.STARTING
    waiting = store._runs["newer"]
    assert waiting.state is RunState.RECOVERING
    assert "waits until another run has ended" in waiting.activity
    with pytest.raises(CapacityError):
        await later.create_run("more", recipe(), ())
    # Store and token may have changed since the run began.
    resolved = yaml.safe_load((tmp_path / "runs/older/recipe.yaml").read_text())
    assert resolved["store"]["url"] == store.url
    assert resolved["api"]["token_file"] == str(tmp_path / "token")
    await store.update_run("goes-on", state=RunState.SUCCEEDED)
    spawned.children[2].kill()
    await until(lambda: spawned[4:] == ["newer"])
    await later.close()


async def test_a_failed_run_is_started_again_by_wish_with_another_recipe(
    hub: Hub, store: FlakyStore, spawned: Spawned, tmp_path: Path
) -> None:
    folder = tmp_path / "runs/run-1"
    await failed_run(hub, store, folder)
    with pytest.raises(InvalidRequestError, match=r"run\.seed was 0, is 7") as refused:
        await hub.resume_run("run-1", ("run.seed=7",))
    assert refused.value.reason == "RECIPE_INVALID"
    assert store._runs["run-1"].state is RunState.FAILED
    spawned.program = GOES_ON
    for _ in range(2):
        # A repeat changes nothing.
        await hub.resume_run("run-1", ("run.steps=40",))
    assert len(spawned) == 2
    assert spawned.commands[-1][-2:] == ["--resume", str(folder)]
    record = store._runs["run-1"]
    assert (record.state, record.failure, record.num_steps) == (RunState.STARTING, "", 40)
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["run"]["steps"] == 40
    with pytest.raises(PreconditionError) as other:
        await hub.resume_run("run-1", ("run.steps=50",))
    assert other.value.reason == "RUN_NOT_ENDED"


async def test_a_wish_to_resume_is_refused_where_it_cannot_be_fulfilled(
    hub: Hub, store: FlakyStore, spawned: Spawned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await failed_run(hub, store, tmp_path / "runs/run-1")

    async def reason() -> str:
        with pytest.raises(RolemeshError) as refused:
            await hub.resume_run("run-1", ())
        return refused.value.reason

    spawned.program = GOES_ON
    for run_id in "abcd":
        await hub.create_run(run_id, recipe(), ())
    assert await reason() == "TOO_MANY_RUNS"
    await store.update_run("run-1", directory="/elsewhere")
    assert await reason() == "RESUME_UNAVAILABLE"
    # A run ends before its process does.
    monkeypatch.setattr(hub_module, "_LAST_WORDS_S", 0.03)
    await store.update_run("a", state=RunState.STOPPED)
    with pytest.raises(RolemeshError) as ending:
        await hub.resume_run("a", ())
    assert ending.value.reason == "RUN_IS_ENDING"


CLASSIFIER = '{type: classifier, model: {path: "/etc"}}'
REFUSED: Mapping[str, tuple[str, str]] = {
    "code": ("reward.source=python:subprocess:getoutput", "reward.source.function"),
    "code of a loss": ("algorithm.policy_loss=python:os:system", "algorithm.policy_loss.function"),
    "code of a curriculum": (
        "actor.data.curriculum={type: python, function: 'os:walk'}",
        "actor.data.curriculum.function",
    ),
    "code of an environment": (
        "actor.environment={type: python, environment: 'os:DirEntry'}",
        "actor.environment.environment",
    ),
    "code of a tracker": (
        "trackers=[{type: custom, tracker: 'os:PathLike'}]",
        "trackers.0.tracker",
    ),
    "code of an algorithm": (
        "algorithm={type: custom, function: '/tmp/theirs.py:ppo'}",
        "algorithm.function",
    ),
    "model": (f"reward.source={CLASSIFIER}", "reward.source.model.path"),
    "data": ("actor.data.path=/etc/passwd", "actor.data.path"),
    "way up": ("actor.data.path=/models/../etc/passwd", "actor.data.path"),
    "metadata of a cloud": (
        "reward.source=http://169.254.169.254/latest/get_reward",
        "reward.source.urls.0",
    ),
    "loopback": ("reward.source=http://127.0.0.5:6379/get_reward", "reward.source.urls.0"),
    "judge": ("reward.source=grpc://10.0.0.1:50051", "reward.source.urls.0"),
    "service": ("services.critic.address=192.168.0.1:22", "services.critic.address"),
    "traces": ("tracing.endpoint=http://10.0.0.1:4317", "tracing.endpoint"),
    "tracker": (
        "trackers=[{type: mlflow, tracking_uri: 'https://93.184.216.34'}]",
        "trackers.0.tracking_uri",
    ),
    "secret": (
        "reward.source={type: openrlhf, urls: 'https://93.184.216.34/r', token_variable: MY_TOKEN}",
        "reward.source.urls.0",
    ),
    "variable": (
        "reward.source={type: openrlhf, urls: 'http://127.0.0.1/r', token_variable: MY_TOKEN}",
        "reward.source.token_variable",
    ),
    "variable of a function": (
        "reward.source={type: python, function: 'mine', environment: [MY_TOKEN]}",
        "reward.source.environment.0",
    ),
    "network of a function": (
        "reward.source={type: python, function: 'mine', network: true}",
        "reward.source.network",
    ),
}


@pytest.mark.parametrize(("override", "field"), REFUSED.values(), ids=REFUSED)
async def test_a_recipe_names_nothing_that_the_owner_has_not_granted(
    store: FlakyStore, spawned: Spawned, tmp_path: Path, override: str, field: str
) -> None:
    grant = Grant(folders=(Path("/models"), Path("/data")), hosts=("127.0.0.1",))
    hub = Hub(store, tmp_path, outlives=True, max_runs=4, api=ApiSpec(), grant=grant)
    with pytest.raises(ForbiddenError) as refused:
        await hub.create_run("run-1", recipe(), (override,))
    assert refused.value.reason == "NOT_GRANTED"
    assert f"{field} is " in refused.value.message
    assert "start it with --" in refused.value.message
    assert store._runs == {}
    # Nor does a run that is resumed.
    await hub.create_run("run-2", recipe(), ())
    await until(lambda: store._runs["run-2"].state is RunState.FAILED)
    with pytest.raises(ForbiddenError):
        await hub.resume_run("run-2", (override,))
    assert spawned == ["run-2"]
    await hub.close()


async def test_what_the_owner_has_granted_is_taken(
    store: FlakyStore, spawned: Spawned, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def judge(completions): ...")
    grant = Grant(
        folders=(Path("/models"), Path("/data")),
        code_roots=(tmp_path,),
        hosts=("127.0.0.1",),
        variables=("JUDGE_TOKEN",),
    )
    hub = Hub(store, tmp_path, outlives=True, max_runs=4, api=ApiSpec(), grant=grant)
    source = {
        "type": "weighted_sum",
        "rewards": [
            f"python:{tmp_path}/mine.py:judge",
            {
                "source": {
                    "type": "openrlhf",
                    "urls": "http://127.0.0.1:8000/r",
                    "token_variable": "JUDGE_TOKEN",
                }
            },
        ],
    }
    await hub.create_run("run-1", recipe(), (f"reward.source={json.dumps(source)}",))
    assert spawned == ["run-1"]
    await hub.close()
