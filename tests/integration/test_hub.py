"""`rolemesh coordinator` as a process: it makes runs over gRPC, and a new one goes on after it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from support import warm_processes
from support.fake_roles import FakeMesh, fake_mesh, fake_recipe, until

from rolemesh.coordinator.state.redis import RedisStateStore
from rolemesh.coordinator.state.server.embedded import EmbeddedValkey
from rolemesh.coordinator.state.store import RunStream
from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.errors import (
    CapacityError,
    InvalidRequestError,
    PreconditionError,
    RolemeshError,
)
from rolemesh.v1 import coordinator_pb2, coordinator_pb2_grpc

Stub = coordinator_pb2_grpc.CoordinatorServiceStub
STOPPED = coordinator_pb2.RUN_STATE_STOPPED
SUCCEEDED = coordinator_pb2.RUN_STATE_SUCCEEDED
TOKEN = "s3cret"

UPDATES = 2
"""Updates of the policy in each step of the fake recipe."""


class Coordinator:
    """A coordinator's process, and a client of it."""

    def __init__(self, process: asyncio.subprocess.Process, facts: dict[str, Any]) -> None:
        self.process = process
        self.address: str = facts["address"]
        self.url: str = facts["url"]

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[Stub]:
        async with open_channel(self.address) as channel:
            yield Stub(channel)

    async def create(self, run_id: str, recipe: str, *overrides: str) -> coordinator_pb2.Run:
        request = coordinator_pb2.CreateRunRequest(
            run_id=run_id, recipe=recipe, overrides=overrides
        )
        async with self.stub() as stub:
            return (await stub.CreateRun(request, metadata=AUTHORIZED)).run

    async def run(self, run_id: str) -> coordinator_pb2.Run:
        request = coordinator_pb2.GetRunRequest(run_id=run_id)
        async with self.stub() as stub:
            return (await stub.GetRun(request, metadata=AUTHORIZED)).run

    async def resume_run(self, run_id: str, *overrides: str) -> coordinator_pb2.Run:
        request = coordinator_pb2.ResumeRunRequest(run_id=run_id, overrides=overrides)
        async with self.stub() as stub:
            return (await stub.ResumeRun(request, metadata=AUTHORIZED)).run

    async def stop_run(self, run_id: str) -> None:
        request = coordinator_pb2.StopRunRequest(run_id=run_id)
        async with self.stub() as stub:
            await stub.StopRun(request, metadata=AUTHORIZED)

    async def watch(
        self, run_id: str, after: str = "", *, at_most: int = 0
    ) -> list[coordinator_pb2.RunEvent]:
        """Events to the end of the run, or the first so many."""
        request = coordinator_pb2.WatchRunRequest(run_id=run_id, after_event_id=after)
        events: list[coordinator_pb2.RunEvent] = []
        async with self.stub() as stub:
            async for message in stub.WatchRun(request, metadata=AUTHORIZED):
                events.append(message.event)
                if len(events) == at_most:
                    break
        return events


AUTHORIZED = (("authorization", f"Bearer {TOKEN}"),)


@asynccontextmanager
async def coordinator(
    folder: Path, *arguments: str, is_warm: bool = True, **variables: str
) -> AsyncIterator[Coordinator]:
    """Forked from a warm process, as are its runs, but where `is_warm` is False."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ROLEMESH_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rolemesh.coordinator.commands.cli", "coordinator", "--json"),
        *("--data", "data", "--port", "0", "--http-port", "0"),
        *("--folder", "/", "--allow-host", "127.0.0.1", *arguments),
        cwd=folder,
        env={
            **environment,
            "ROLEMESH_API_TOKEN": TOKEN,
            **(warm_processes.commands() if is_warm else {}),
            **variables,
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield Coordinator(process, json.loads(await process.stdout.readline()))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def recipe_for(mesh: FakeMesh, **run: Any) -> str:
    services = {role: {"address": address} for role, address in mesh.addresses.items()}
    recipe = fake_recipe(services=services, evaluation={"num_prompts": 0}, **run)
    values = recipe.model_dump(mode="json")
    # The coordinator gives its own.
    del values["store"]
    return yaml.safe_dump(values)


async def until_calls(mesh: FakeMesh, number: int) -> None:
    """Returns once the run has made so many more calls."""
    before = len(mesh.calls)
    await until(lambda: len(mesh.calls) > before + number)


def pid_of(run_id: str, folder: Path) -> int:
    """Process that makes a run."""
    place = folder / "data" / "runs" / run_id / "process.json"
    return int(json.loads(place.read_text())["pid"])


def slow_steps(service: str, method: str) -> float:
    return 0.05 if method == "Update" else 0.0


@pytest.mark.slow
async def test_a_watch_through_a_coordinator_that_is_killed_misses_and_repeats_nothing(
    tmp_path: Path,
) -> None:
    async with (
        fake_mesh(delay=slow_steps) as mesh,
        EmbeddedValkey(tmp_path / "valkey") as server,
    ):
        outlives = ("--store-url", server.url)
        recipe = recipe_for(mesh, steps=10_000)
        async with coordinator(tmp_path, *outlives) as first:
            made = await first.create("watched", recipe)
            assert made.state == coordinator_pb2.RUN_STATE_STARTING
            # A repeat is the same run.
            assert (await first.create("watched", recipe)).created_at == made.created_at
            seen = await first.watch("watched", at_most=12)
        # It was told to end, and the run goes on without it; the next one is killed.
        await until_calls(mesh, 50)
        async with coordinator(tmp_path, *outlives) as killed:
            seen += await killed.watch("watched", seen[-1].event_id, at_most=5)
            killed.process.kill()
            await killed.process.wait()
        await until_calls(mesh, 50)
        async with coordinator(tmp_path, *outlives) as second:
            assert (await second.create("watched", recipe)).created_at == made.created_at
            with pytest.raises(PreconditionError) as other:
                await second.create("watched", recipe, "run.steps=1")
            assert other.value.reason == "RUN_EXISTS"
            rest = asyncio.create_task(second.watch("watched", seen[-1].event_id))
            await asyncio.sleep(0.5)
            await second.stop_run("watched")
            seen += await rest
            assert (await second.run("watched")).state == STOPPED
        store = RedisStateStore(server.url)
        told = await store.read_entries("watched", RunStream.EVENTS, limit=100_000)
        await store.close()
    assert [event.event_id for event in seen] == [entry.entry_id for entry in told]
    steps = [event.step for event in seen if event.HasField("step_made")]
    assert steps == list(range(1, steps[-1] + 1))
    states = [event.state.state for event in seen if event.HasField("state")]
    assert states[0] == coordinator_pb2.RUN_STATE_STARTING
    assert states[-1] == STOPPED
    assert (tmp_path / "data/runs/watched/model/weight.json").is_file()


async def test_recipes_are_refused_and_runs_that_cannot_begin_fail_with_their_last_words(
    tmp_path: Path,
) -> None:
    # Fields of recipes that are set for this coordinator count, but for what is its own.
    variables = {"ROLEMESH_RUN__SEED": "77", "ROLEMESH_STORE__TYPE": "memory"}
    one_run = ("--max-runs", "1", "--code-root", str(tmp_path))
    async with fake_mesh() as mesh, coordinator(tmp_path, *one_run, **variables) as hub:
        recipe = recipe_for(mesh, steps=10_000)
        for text, override, named in (
            (recipe, "run.stepz=3", "stepz"),
            ("run: [", "run.steps=3", "recipe:1"),
            (recipe, "algorithm.type=absent", "absent"),
        ):
            with pytest.raises(InvalidRequestError, match=named) as refused:
                await hub.create("refused", text, override)
            assert refused.value.reason == "RECIPE_INVALID"
        for run_id in ("", "../up", ".hidden", "a/b", "x" * 129):
            with pytest.raises(InvalidRequestError) as refused:
                await hub.create(run_id, recipe)
            assert refused.value.reason == "RUN_ID_INVALID"
        # Only the run's own process runs the code of others: it finds none, and ends.
        custom = '{type: custom, function: "absent.py:absent"}'
        await hub.create("doomed", recipe, f"algorithm={custom}")
        last = (await hub.watch("doomed"))[-1]
        assert last.state.state == coordinator_pb2.RUN_STATE_FAILED
        assert "ended with exit code 2" in last.state.failure
        assert "absent.py" in last.state.failure
        assert (await hub.run("doomed")).failure == last.state.failure

        await hub.create("going", recipe)
        await hub.watch("going", at_most=5)
        with pytest.raises(CapacityError, match="1 runs go on") as full:
            await hub.create("too-many", recipe)
        assert full.value.reason == "TOO_MANY_RUNS"
        async with hub.stub() as stub:
            with pytest.raises(RolemeshError) as stranger:
                await stub.ListRuns(coordinator_pb2.ListRunsRequest())
        assert stranger.value.reason == "TOKEN_MISSING"
        async with httpx.AsyncClient(headers=dict(AUTHORIZED), base_url=hub.url) as client:
            listed = (await client.get("api/v1/runs")).json()
            code = ["reward.source=python:subprocess:getoutput"]
            wish = {"run_id": "stranger", "recipe": recipe, "overrides": code}
            refusal = await client.post("api/v1/runs", json=wish)
            assert (refusal.status_code, refusal.json()["reason"]) == (403, "NOT_GRANTED")
        assert [run["run_id"] for run in listed["runs"]] == ["going", "doomed"]
        # With the embedded store, the runs end in order before the coordinator does.
        pid = pid_of("going", tmp_path)
        hub.process.send_signal(signal.SIGTERM)
        assert await hub.process.wait() == 0
        assert not psutil.pid_exists(pid)
    summary = json.loads((tmp_path / "data/runs/going/summary.json").read_text())
    assert summary["state"] == "stopped"
    assert (summary["steps"] >= 1, summary["seed"]) == (True, 77)


async def test_a_coordinator_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        # A fork inherits from the warm process what it ignores.
        async with coordinator(tmp_path, is_warm=False) as hub:
            hub.process.send_signal(signal.SIGHUP)
            with pytest.raises(RolemeshError) as missing:
                await hub.run("absent")
            assert missing.value.reason == "RUN_NOT_FOUND"
            hub.process.send_signal(signal.SIGTERM)
            assert await hub.process.wait() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


async def wait_for_step(hub: Coordinator, run_id: str, step: int) -> None:
    while (await hub.run(run_id)).step < step:  # noqa: ASYNC110 - the step is in another process
        await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_run_whose_process_is_killed_goes_on_from_its_newest_step(tmp_path: Path) -> None:
    num_steps = 30
    async with fake_mesh(delay=slow_steps, has_cuts=True) as mesh, coordinator(tmp_path) as hub:
        await hub.create("killed", recipe_for(mesh, steps=num_steps))
        watch = asyncio.create_task(hub.watch("killed"))
        for step in (3, 8):
            await wait_for_step(hub, "killed", step)
            os.kill(pid_of("killed", tmp_path), signal.SIGKILL)
        events = await watch
        run = await hub.run("killed")
        # Each update is made once.
        assert mesh.roles["actor"].policy_version == UPDATES * num_steps
    assert run.state == coordinator_pb2.RUN_STATE_SUCCEEDED
    assert run.recoveries == 2
    resumed = [event.resumed for event in events if event.HasField("resumed")]
    assert [one.where.startswith("its journal") for one in resumed] == [True, True]
    assert resumed[0].step >= 3
    # Every step was kept: each is told of at most once, in order. A kill between the step's record
    # and its event leaves the record alone.
    made = [event.step for event in events if event.HasField("step_made")]
    assert made == sorted(set(made))
    assert set(range(1, num_steps + 1)) - set(made) <= {one.step for one in resumed}
    told = [event.state.failure for event in events if event.state.failure]
    assert [("was killed by SIGKILL; it is started again" in text) for text in told] == [True, True]
    summary = json.loads((tmp_path / "data/runs/killed/summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("succeeded", num_steps)


@pytest.mark.slow
async def test_a_later_coordinator_goes_on_with_runs_that_died_with_the_host(
    tmp_path: Path,
) -> None:
    async with fake_mesh(delay=slow_steps, has_cuts=True) as mesh:
        # Its embedded store keeps the journal on disk; coordinator, store and run die at once.
        # A fork of the warm process would outlive the process in front of it.
        async with coordinator(tmp_path, is_warm=False) as first:
            await first.create("survivor", recipe_for(mesh, steps=20))
            await wait_for_step(first, "survivor", 3)
            dying = [psutil.Process(first.process.pid)]
            dying += dying[0].children(recursive=True)
            for process in dying:
                process.suspend()
            for process in dying:
                process.kill()
            await first.process.wait()
        async with coordinator(tmp_path) as second:
            events = await second.watch("survivor")
            run = await second.run("survivor")
        assert mesh.roles["actor"].policy_version == UPDATES * 20
    assert run.state == coordinator_pb2.RUN_STATE_SUCCEEDED
    assert any(event.HasField("resumed") for event in events)
    made = [event.step for event in events if event.HasField("step_made")]
    assert made[-1] == 20


@pytest.mark.slow
async def test_a_stopped_run_goes_on_by_wish_and_further_than_it_was_to(tmp_path: Path) -> None:
    async with fake_mesh(delay=slow_steps, has_cuts=True) as mesh, coordinator(tmp_path) as hub:
        await hub.create("stopped", recipe_for(mesh, steps=10_000))
        await wait_for_step(hub, "stopped", 2)
        await hub.stop_run("stopped")
        before = await hub.watch("stopped")
        assert before[-1].state.state == STOPPED
        reached = before[-1].step
        with pytest.raises(InvalidRequestError, match=r"run\.seed") as refused:
            await hub.resume_run("stopped", "run.seed=99")
        assert refused.value.reason == "RECIPE_INVALID"
        assert (await hub.run("stopped")).state == STOPPED
        run = await hub.resume_run("stopped", f"run.steps={reached + 5}")
        assert run.state == coordinator_pb2.RUN_STATE_STARTING
        assert run.num_steps == reached + 5
        # A watch from the start passes the end that was none, and comes to the real one.
        events = await hub.watch("stopped")
        ends = [event for event in events if event.state.state in (STOPPED, SUCCEEDED)]
        assert [end.state.state for end in ends] == [STOPPED, SUCCEEDED]
        made = [event.step for event in events if event.HasField("step_made")]
        assert made == list(range(1, reached + 6))
        assert mesh.roles["actor"].policy_version == UPDATES * (reached + 5)
        with pytest.raises(PreconditionError) as over:
            await hub.resume_run("stopped")
        assert over.value.reason == "RUN_ENDED"


def write_recipe(folder: Path, recipe: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(recipe)


@asynccontextmanager
async def training_there(
    hub: Coordinator, folder: Path, recipe: str, *arguments: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`rolemesh train --coordinator` in a folder of its own."""
    write_recipe(folder, recipe)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rolemesh.coordinator.commands.cli", "train", "recipe.yaml"),
        *("--coordinator", hub.address, *arguments),
        cwd=folder,
        env={**os.environ, "ROLEMESH_API_TOKEN": TOKEN, **warm_processes.commands()},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_train_has_a_coordinator_make_the_run_and_follows_it(tmp_path: Path) -> None:
    granted = ("--code-root", str(tmp_path))
    async with fake_mesh() as mesh, coordinator(tmp_path, *granted) as hub:
        recipe = recipe_for(mesh, steps=3)
        here, relative = tmp_path / "here", "models/mine"
        arguments = ("--run-id", "sent", "--set", f"actor.model.path={relative}", "--json")
        async with training_there(hub, here, recipe, *arguments) as process:
            written, wrong = await process.communicate()
        assert process.returncode == 0, wrong.decode()
        lines = [json.loads(line) for line in written.decode().splitlines()]
        steps = [line["metrics"] for line in lines if line["type"] == "step"]
        folder = tmp_path / "data/runs/sent"
        made = (folder / "metrics.jsonl").read_text().splitlines()
        assert steps == [json.loads(line) for line in made]
        assert lines[-1]["state"] == "succeeded"
        assert (lines[-1]["steps"], lines[-1]["directory"]) == (3, str(folder))
        # Counted from where it was sent.
        used = yaml.safe_load((folder / "config.yaml").read_text())
        assert used["actor"]["model"]["path"] == str(here / relative)
        # Sent again it is the same run, told of from its beginning; another recipe is refused.
        async with training_there(hub, here, recipe, *arguments) as process:
            again, _ = await process.communicate()
        assert again.decode().count('"type": "step"') == 3
        for given, told in (
            (("--run-id", "sent"), "exists already, with another recipe"),
            (("--out", "x"), "--out: the coordinator at"),
            (("--set", "custom=1"), "custom"),
        ):
            async with training_there(hub, here, recipe, *given) as process:
                _, wrong = await process.communicate()
            assert (process.returncode, told in wrong.decode()) == (2, True), wrong.decode()
        custom = 'algorithm={type: custom, function: "absent.py:absent"}'
        async with training_there(hub, here, recipe, "--set", custom) as process:
            _, wrong = await process.communicate()
        assert process.returncode == 1
        assert f"{here / 'absent.py'}" in wrong.decode()


@pytest.mark.slow
async def test_an_interrupt_stops_the_run_and_a_second_one_leaves_it(tmp_path: Path) -> None:
    async with fake_mesh() as mesh, coordinator(tmp_path) as hub:
        recipe = recipe_for(mesh, steps=10_000)
        async with training_there(hub, tmp_path / "a", recipe, "--run-id", "one") as process:
            await until_calls(mesh, 50)
            process.send_signal(signal.SIGINT)
            written, _ = await process.communicate()
        assert process.returncode == 130
        assert (await hub.run("one")).state == STOPPED
        assert "one stopped after" in written.decode()
        assert "ask again to leave it" in written.decode()
        gate = mesh.roles["actor"].gates["Update"] = asyncio.Event()
        async with training_there(hub, tmp_path / "b", recipe, "--run-id", "two") as process:
            await until(lambda: "actor.Update" in mesh.running)
            process.send_signal(signal.SIGINT)
            assert process.stdout is not None
            await process.stdout.readuntil(b"ask again to leave it")
            process.send_signal(signal.SIGINT)
            _, wrong = await process.communicate()
        assert process.returncode == 130
        assert "two is left to its coordinator" in wrong.decode()
        assert (await hub.run("two")).state == coordinator_pb2.RUN_STATE_STOPPING
        gate.set()
        await hub.watch("two")
        assert (await hub.run("two")).state == STOPPED
