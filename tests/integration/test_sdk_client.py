"""The SDK's client against a real CoordinatorService over a store."""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from support.planned_runs import EXPECTED, write_planned_run
from support.rest_servers import tokens_of
from support.stored_runs import QUICK, Coordinator, running_coordinator, store_of_a_run

from rolemesh.coordinator.api.doors.coordinator_service import serve_coordinator
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.sdk import AsyncClient, AsyncMesh, RetryPolicy, RunState
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunStream
from rolemesh.rpc.errors import (
    CallCancelledError,
    DeadlineError,
    ForbiddenError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
)
from rolemesh.v1 import coordinator_pb2 as pb
from rolemesh.v1 import experience_pb2


@pytest.fixture
async def store(tmp_path: Path) -> MemoryStateStore:
    return await store_of_a_run(tmp_path)


@pytest.fixture
async def coordinator(store: MemoryStateStore) -> AsyncIterator[Coordinator]:
    async with running_coordinator(store) as coordinator:
        yield coordinator


@pytest.fixture
async def client(coordinator: Coordinator) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(coordinator.address, retry=QUICK) as client:
        yield client


async def test_a_run_is_described_as_a_value(client: AsyncClient) -> None:
    run = await client.get_run("run")
    assert (run.run_id, run.state, run.num_steps) == ("run", RunState.RUNNING, 3)
    assert run.created_at == datetime.datetime(1970, 1, 1, 0, 0, 1, 500_000, datetime.UTC)
    assert [one.run_id for one in await client.list_runs()] == ["run"]
    with pytest.raises(AttributeError):
        run.step = 4  # type: ignore[misc]
    with pytest.raises(TypeError):
        run.metrics["reward/mean"] = 1.0  # type: ignore[index]


async def test_what_a_notebook_shows_is_escaped(client: AsyncClient) -> None:
    for shown in (await client.get_run("run"), await client.list_runs()):
        page = shown._repr_html_()
        assert "&lt;b&gt;quick&lt;/b&gt;" in page
        assert "<b>" not in page


async def test_wishes_are_set_and_the_run_comes_back_as_it_is_then(client: AsyncClient) -> None:
    assert (await client.pause_run("run")).state is RunState.PAUSING
    assert (await client.resume_run("run")).state is RunState.RUNNING
    await client.checkpoint_run("run")
    assert (await client.stop_run("run")).state is RunState.STOPPING


async def test_what_is_refused_is_one_error_with_its_reason(client: AsyncClient) -> None:
    with pytest.raises(NotFoundError) as missing:
        await client.get_run("other")
    assert missing.value.reason == "RUN_NOT_FOUND"
    with pytest.raises(PreconditionError) as refused:
        await client.create_run({"run": {}})
    assert refused.value.reason == "CREATION_UNAVAILABLE"
    with pytest.raises(PreconditionError) as driven:
        await client.attach("run")
    assert driven.value.reason == "RUN_NOT_EXTERNAL"
    with pytest.raises(ValueError, match="no time zone"):
        await client.get_device_use("run", datetime.datetime(2026, 1, 1))


async def test_nobody_there_is_unavailable_once_the_budget_is_used_up() -> None:
    policy = RetryPolicy(budget_s=0.2, first_s=0.01, longest_s=0.05)
    async with AsyncClient("127.0.0.1:1", retry=policy) as client:
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1 does not answer"):
            await client.get_run("run")


async def test_a_closed_client_says_so(coordinator: Coordinator) -> None:
    client = AsyncClient(coordinator.address)
    await client.close()
    with pytest.raises(CallCancelledError, match="closed"):
        await client.get_run("run")
    with pytest.raises(CallCancelledError, match="closed"):
        await anext(client.watch_run("run"))
    mesh = AsyncMesh({"actor": coordinator.address}, run_id="run")
    await mesh.close()
    with pytest.raises(CallCancelledError, match="closed"):
        await mesh["actor"].status()


async def test_a_call_survives_a_coordinator_that_starts_again(coordinator: Coordinator) -> None:
    async with AsyncClient(coordinator.address, retry=QUICK) as client:
        await client.get_run("run")
        await coordinator.stop()
        asking = asyncio.create_task(client.get_run("run"))
        await asyncio.sleep(0.1)
        assert not asking.done()
        await coordinator.start()
        assert (await asking).run_id == "run"


async def test_a_deadline_of_the_client_ends_a_call_and_is_not_repeated(
    store: MemoryStateStore,
) -> None:
    class Slow(StoreOperations):
        calls = 0

        async def get_run(self, run_id: str) -> pb.Run:
            self.calls += 1
            await asyncio.sleep(60)
            return await super().get_run(run_id)

    slow = Slow(store)
    server, port = await serve_coordinator(slow)
    async with AsyncClient(f"127.0.0.1:{port}", deadline_s=1.0, retry=QUICK) as client:
        with pytest.raises(DeadlineError):
            await client.get_run("run")
    await server.stop(None)
    assert slow.calls == 1
    with pytest.raises(ValueError, match="deadline_s is 0"):
        AsyncClient("127.0.0.1:1", deadline_s=0)


async def test_metrics_of_many_pages_are_one_table(
    store: MemoryStateStore, client: AsyncClient
) -> None:
    for step in range(1, 2_501):
        extra = {"held_out/score": step / 2} if step % 100 == 0 else {}
        await store.append_metrics("run", {"step": step, "reward/mean": step * 0.5, **extra})
    table = await client.get_metrics("run")
    np.testing.assert_array_equal(table.steps, np.arange(1, 2_501))
    np.testing.assert_array_equal(table["reward/mean"], table.steps * 0.5)
    scored = ~np.isnan(table["held_out/score"])
    np.testing.assert_array_equal(table.steps[scored], np.arange(100, 2_501, 100))
    assert "2500" in table._repr_html_()

    few = await client.get_metrics("run", ["reward/*"], from_step=2_000)
    assert list(few) == ["reward/mean"]
    assert few.steps[0] == 2_000
    thin = await client.get_metrics("run", thin_to=10)
    assert len(thin.steps) <= 10
    assert thin.steps[-1] == 2_500


async def test_samples_device_use_and_graphs_come_as_arrays_and_values(
    store: MemoryStateStore, client: AsyncClient
) -> None:
    sample = pb.Sample(row=3, prompt="<i>", completion="5", token_ids=[7, 8], logprobs=[-1, -0.5])
    sample.reward_parts["python/acc"] = 0.5
    await store.append_entry(
        "run",
        RunStream.SAMPLES,
        pb.ListSamplesResponse(step=2, samples=[sample]).SerializeToString(),
    )
    series = pb.DeviceUseSeries(
        service="actor", device="cpu", busy=[0.25], memory_bytes=[5], memory_total_bytes=9
    )
    series.times.add().FromSeconds(100)
    await store.append_entry(
        "run",
        RunStream.DEVICES,
        pb.GetDeviceUseResponse(devices=[series]).SerializeToString(),
    )
    samples = await client.list_samples("run")
    assert (samples.step, samples.kept_steps, samples.rows[0].row) == (2, (2,), 3)
    assert samples.rows[0].token_ids.dtype == np.int64
    np.testing.assert_allclose(samples.rows[0].logprobs, [-1, -0.5])
    assert samples.rows[0].reward_parts == {"python/acc": 0.5}
    assert samples.rows[0].to_message() == sample
    assert "&lt;i&gt;" in samples._repr_html_()
    (device,) = await client.get_device_use("run")
    assert (device.service, device.busy.tolist(), device.times.tolist()) == ("actor", [0.25], [100])
    for seconds, found in ((99.5, 1), (100.5, 0)):
        since = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
        assert len(await client.get_device_use("run", since)) == found
    assert (await client.get_expert_loads("run")).roles == {}
    layers = [
        experience_pb2.LayerLoads(layer=layer, choices=choices)
        for layer, choices in ((1, [6, 2, 4]), (3, [0, 0, 0]))
    ]
    told = pb.GetExpertLoadsResponse(step=2, roles=[pb.RoleLoads(role="actor", layers=layers)])
    await store.append_entry("run", RunStream.EXPERTS, told.SerializeToString(), step=2)
    loads = await client.get_expert_loads("run", 2)
    assert (loads.step, loads.kept_steps, list(loads.roles)) == (2, (2,), ["actor"])
    actor = loads.roles["actor"]
    assert actor.layers.tolist() == [1, 3]
    assert actor.choices.tolist() == [[6, 2, 4], [0, 0, 0]]
    assert actor.load[0].tolist() == [1.5, 0.5, 1.0]
    assert np.isnan(actor.load[1]).all()
    assert "step 2, actor" in loads._repr_html_()
    with pytest.raises(NotFoundError) as missing:
        await client.get_expert_loads("run", 3)
    assert missing.value.reason == "STEP_NOT_FOUND"
    with pytest.raises(NotFoundError) as missing:
        await client.get_dataflow("run")
    assert missing.value.reason == "STEP_NOT_FOUND"
    assert await client.list_alerts("run") == []
    assert await client.list_services() == []


async def test_a_plan_comes_beside_what_steps_took(
    store: MemoryStateStore, client: AsyncClient
) -> None:
    assert await client.get_plan("run") is None
    await write_planned_run(store, "planned")
    plan = await client.get_plan("planned")
    assert plan is not None
    assert plan.error == pytest.approx(0.2)
    assert [task.name for task in plan.tasks] == list(EXPECTED)
    for task in plan.tasks:
        predicted, measured = EXPECTED[task.name]
        assert task.measured_s == pytest.approx(measured)
        assert (task.error is None) == (predicted is None or measured is None)
    assert plan.tasks[0].error == pytest.approx(0.5)
    assert plan.pools[0].planned_roles == ("actor 1-1-2 fsdp 2",)
    assert "actor.generate" in plan._repr_html_()


@pytest.mark.parametrize("token", ["s3cret\n", "s3 cret", "gehe\u00edm"])
async def test_a_token_that_no_header_can_hold_is_refused_unshown(token: str) -> None:
    with pytest.raises(ValueError, match="strip") as refused:
        AsyncClient("127.0.0.1:50050", token=token)
    assert token.strip() not in str(refused.value)


async def test_a_path_given_as_text_is_no_recipe(client: AsyncClient) -> None:
    with pytest.raises(ValueError, match="Path"):
        await client.create_run("recipes/quickstart-ppo.yaml")


async def test_the_token_is_shown_where_the_coordinator_asks_for_one(
    store: MemoryStateStore,
) -> None:
    server, port = await serve_coordinator(StoreOperations(store), tokens=tokens_of("s3cret"))
    for token in (None, "other"):
        async with AsyncClient(f"127.0.0.1:{port}", token=token, retry=QUICK) as client:
            with pytest.raises(ForbiddenError):
                await client.get_run("run")
            with pytest.raises(ForbiddenError):
                await anext(client.watch_run("run"))
    async with AsyncClient(f"127.0.0.1:{port}", token="s3cret", retry=QUICK) as client:
        assert (await client.get_run("run")).run_id == "run"
        assert "s3cret" not in repr(client)
    await server.stop(None)


async def test_a_recipe_travels_as_text_file_or_fields(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    sent: list[pb.CreateRunRequest] = []

    class Recording(StoreOperations):
        async def create_run(self, run_id: str, recipe: str, overrides: object = ()) -> pb.Run:
            sent.append(pb.CreateRunRequest(run_id=run_id, recipe=recipe))
            return pb.Run(run_id=run_id, state=pb.RUN_STATE_STARTING)

    server, port = await serve_coordinator(Recording(coordinator.store))
    file = tmp_path / "recipe.yaml"
    file.write_text("run: {steps: 3}")
    async with AsyncClient(f"127.0.0.1:{port}", retry=QUICK) as client:
        assert (await client.create_run(file, run_id="mine")).run_id == "mine"
        made = await client.create_run("run: {steps: 3}", overrides=["run.steps=4"])
        await client.create_run({"run": {"steps": 3}})
    await server.stop(None)
    assert sent[0].recipe == sent[1].recipe == "run: {steps: 3}"
    assert json.loads(sent[2].recipe) == {"run": {"steps": 3}}
    assert made.run_id == sent[1].run_id
    assert sent[1].run_id != sent[2].run_id
