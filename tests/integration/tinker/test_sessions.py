"""Sessions of a server of Tinker's protocol: what is known of them, their files, their ends."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from support.tinker_servers import (
    ANN,
    NAME,
    TinkerClient,
    TinkerModel,
    TinkerWorld,
    datum,
    owners_app,
    refusal,
    server_of,
)

from rolemesh.coordinator.tinker import tenants
from rolemesh.coordinator.tinker.routes.app import make_app
from rolemesh.coordinator.tinker.routes.keys import Keys

pytestmark = pytest.mark.asyncio(loop_scope="module")

PLACES = 3
WORLD = {"places": PLACES}
TOKENS = [5, 6, 7, 8]


async def trained(client: TinkerClient) -> TinkerModel:
    model = await client.create(rank=2)
    await model.gradient([datum(TOKENS)])
    await model.step()
    return model


# --- what is known of them -------------------------------------------------------------------


async def test_sessions_are_listed_and_looked_for_also_once_they_have_ended(
    ann: TinkerClient, bob: TinkerClient
) -> None:
    body = {"tags": [], "display_name": "Night run 7", "user_metadata": {"task": "sums"}}
    ann.session_id = (await ann.call("create_session", body))["session_id"]
    model = await trained(ann)
    sampler = await ann.sampler(base_model=NAME)
    await model.save("kept")
    told = await ann.call(f"sessions/{ann.session_id}?access_scope=owned", method="GET")
    assert told == {
        "training_run_ids": [model.model_id],
        "sampler_ids": [sampler],
        "user_metadata": {"task": "sums"},
        "display_name": "Night run 7",
    }
    await ann.call(f"sessions/{ann.session_id}/project", {"project_id": "p"}, method="PUT")
    first = ann.session_id
    await ann.finish()
    await ann.begin()
    listed = (await ann.call("sessions?limit=2", method="GET"))["sessions"]
    assert listed == [ann.session_id, first]

    async def found(**asked: Any) -> list[str]:
        answer = await ann.call("sessions/search", asked)
        return [one["session_id"] for one in answer["sessions"]]

    for asked in (
        {"display_name": "RUN night"},
        {"session_id": first},
        {"display_name": "none", "session_id": first},
        {"user_metadata": {"task": "sums"}},
        {"project_ids": ["p"]},
        {"statuses": [{"type": "client_finished", "reasons": ["success"]}]},
    ):
        assert await found(**asked) == [first], asked
    for asked in (
        {"display_name": "night 8"},
        {"user_metadata": {"task": "sums", "other": "x"}},
        {"project_ids": ["q"]},
        {"statuses": [{"type": "client_finished", "reasons": ["errored"]}]},
    ):
        assert await found(**asked) == [], asked
    assert await found(statuses=[{"type": "active"}]) == [ann.session_id]
    (one,) = (await ann.call("sessions/search", {"session_id": first}))["sessions"]
    assert (one["owner"], one["project_id"], one["checkpoints_count"]) == ("ann", "p", 1)
    # Page by page.
    page = await ann.call("sessions/search", {"limit": 1})
    assert [one["session_id"] for one in page["sessions"]] == [ann.session_id]
    page = await ann.call("sessions/search", {"limit": 1, "cursor": page["next_cursor"]})
    assert [one["session_id"] for one in page["sessions"]] == [first]
    assert page["next_cursor"] is None
    # Nobody else's.
    assert (await bob.call("sessions", method="GET"))["sessions"] == []
    with refusal(404):
        await bob.call(f"sessions/{first}", method="GET")


# --- files and copies ------------------------------------------------------------------------


async def test_an_adapter_is_downloaded_without_a_key(
    ann: TinkerClient, world: TinkerWorld
) -> None:
    model = await trained(ann)
    path = (await ann.made("save_weights_external", model.numbered(path="out")))["path"]
    assert path == f"tinker://{model.model_id}/external_weights/out"
    run = f"training_runs/{model.model_id}/checkpoints"
    (listed,) = (await ann.call(run, method="GET"))["checkpoints"]
    assert (listed["checkpoint_type"], listed["tinker_path"]) == ("external", path)
    offered = await ann.call(f"{run}/external_weights/out/external_weights_urls", method="GET")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(owners_app(world))) as http:
        files = {name: (await http.get(url)).content for name, url in offered["urls"].items()}
        assert json.loads(files["adapter_config.json"])["r"] == 2
        assert files["adapter_model.safetensors"] == world.adapter(path, "ann")
        url = offered["urls"]["adapter_config.json"]
        for wrong in (url.replace("adapter_config.json", "about.json"), f"{url[:-30]}x{url[-29:]}"):
            assert (await http.get(wrong)).status_code == 404
        # Those of another kind come as an archive, too.
        await model.save("state")
        archive = await ann.call(f"{run}/weights/state/archive", method="GET")
        got = await http.get(archive["url"])
    with tarfile.open(fileobj=io.BytesIO(got.content)) as tar:
        member = tar.extractfile("adapter_model.safetensors")
        assert member is not None
        assert member.read() == files["adapter_model.safetensors"]
    with refusal(400, "files are not encrypted"):
        await ann.call(
            "save_weights_external", model.numbered(path="x", age_encryption_recipients=["age1"])
        )
    # Its matrices can be loaded again, and its optimizer is not there.
    loaded = await ann.load(path, optimizer=False)
    assert await loaded.forward([datum(TOKENS)]) == await model.forward([datum(TOKENS)])
    with refusal(400, "it has no optimizer"):
        await ann.load(path, optimizer=True)


async def test_weights_are_copied_to_a_session_and_to_a_project(ann: TinkerClient) -> None:
    model = await trained(ann)
    path, expected = await model.save("state"), await model.forward([datum(TOKENS)])
    number = ann.next_model()
    to_session = {"session_id": ann.session_id, "model_seq_id": number, "source_path": path}
    copied = (await ann.call("copy_weights", to_session))["tinker_path"]
    assert copied == f"tinker://{ann.session_id}:train:{number}/weights/state"
    to_project = {"destination_project_id": "archive", "source_path": path, "ttl_seconds": 3600}
    archived = (await ann.call("copy_weights", to_project))["tinker_path"]
    (one,) = (await ann.call("sessions/search", {"project_ids": ["archive"]}))["sessions"]
    assert archived.startswith(f"tinker://{one['session_id']}:train:0/")
    await ann.call(f"training_runs/{model.model_id}/checkpoints/weights/state", method="DELETE")
    for each in (copied, archived):
        loaded = await ann.load(each, optimizer=True)
        assert await loaded.forward([datum(TOKENS)]) == expected
        await loaded.unload()
    with refusal(404, "no such weights"):
        await ann.call("copy_weights", to_session)
    with refusal(400, "give destination_project_id, or session_id and model_seq_id"):
        await ann.call("copy_weights", {"source_path": copied})


async def test_weights_are_read_by_a_key_that_was_lent(
    ann: TinkerClient, bob: TinkerClient
) -> None:
    model = await trained(ann)
    path, expected = await model.save("lent"), await model.forward([datum(TOKENS)])
    loading = {"session_id": await bob.begin(), "path": path, "optimizer": True}
    copying = {"destination_project_id": "mine", "source_path": path}
    with refusal(404):
        await bob.call("load_weights", {**loading, "model_seq_id": 0})
    with refusal(404):
        await bob.call("copy_weights", copying)
    with refusal(401):
        await bob.call("copy_weights", {**copying, "weights_access_token": "tml-" + "c" * 16})
    lent = {"weights_access_token": ANN}
    made = await bob.made("load_weights", {**loading, **lent, "model_seq_id": bob.next_model()})
    assert await TinkerModel(bob, made["model_id"]).forward([datum(TOKENS)]) == expected
    copied = (await bob.call("copy_weights", {**copying, **lent}))["tinker_path"]
    # The copy is his own.
    await ann.call(f"training_runs/{model.model_id}/checkpoints/weights/lent", method="DELETE")
    loaded = await bob.load(copied, optimizer=True)
    assert await loaded.forward([datum(TOKENS)]) == expected


# --- samples of one client -------------------------------------------------------------------


async def test_samples_are_told_of_together(client: TinkerClient) -> None:
    sampler = await client.sampler(base_model=NAME)
    target = {"type": "sampling_session", "sampling_session_id": sampler}
    promised = [
        (await client.call("asample", client.sample_body(sampler, TOKENS, seed=at)))["request_id"]
        for at in range(5)
    ]
    told, cursor = list[str](), 0
    while len(told) < len(promised):
        body = {"target": target, "prev_cursor": cursor, "retrieved_request_ids": told}
        answer = await client.call("retrieve_futures", body)
        assert {one["state"] for one in answer["completions"]} == {"finished"}
        told += [one["request_id"] for one in answer["completions"]]
        cursor = answer["cursor"]
    assert sorted(told) == sorted(promised)
    body = {"target": target, "prev_cursor": cursor, "timeout": 0}
    assert await client.call("retrieve_futures", body) == {"completions": [], "cursor": cursor}
    with refusal(404):
        await client.call("retrieve_futures", {"target": {**target, "sampling_session_id": "x"}})


async def test_copies_of_a_sampling_client_have_numbers_of_their_own(client: TinkerClient) -> None:
    sampler = await client.sampler(base_model=NAME)
    joining = {"sampling_session_id": sampler}
    numbers = [
        (await client.call("join_sampling_session", joining))["client_counter"] for _ in range(2)
    ]
    assert numbers == [1, 2]
    body = client.sample_body(sampler, TOKENS, seed=1)
    promised = await client.call("asample", {**body, "seq_id": 2_000_000_000})
    await client.result(promised)
    for number, expected in ((0, []), (2, [promised["request_id"]])):
        target = {"sampling_session_id": sampler, "cloned_sampler_id": number}
        answer = await client.call("retrieve_futures", {"target": target, "timeout": 0})
        assert [one["request_id"] for one in answer["completions"]] == expected


async def test_samples_that_nobody_wants_are_not_drawn(client: TinkerClient) -> None:
    sampler = await client.sampler(base_model=NAME)
    promised = [
        await client.call("asample", client.sample_body(sampler, TOKENS, seed=at, max_tokens=60))
        for at in range(4)
    ]
    for one in promised[1:3]:
        assert await client.call("cancel_future", {"request_id": one["request_id"]}) == {}
    for at, one in enumerate(promised):
        if at in (1, 2):
            with refusal("server", "given up"):
                await client.result(one)
        else:
            assert (await client.result(one))["sequences"]
    model = await client.create()
    training = await client.call("forward_backward", model.gradient_body([datum(TOKENS)]))
    with refusal(400, "samples alone"):
        await client.call("cancel_future", {"request_id": training["request_id"]})
    await client.result(training)


async def test_a_small_client_is_not_kept_waiting_by_a_large_one(
    ann: TinkerClient, bob: TinkerClient
) -> None:
    large, small = await ann.create(), await bob.create()
    long = [datum([*range(2, 120)])] * 8
    ended = list[str]()

    async def call(name: str, model: TinkerModel, data: list[dict[str, Any]]) -> None:
        promised = await model.client.call("forward_backward", model.gradient_body(data))

        async def wait() -> None:
            await model.client.result(promised)
            ended.append(name)

        waits.append(asyncio.create_task(wait()))

    waits = list[asyncio.Task[None]]()
    for _ in range(12):
        await call("large", large, long)
    for _ in range(3):
        await call("small", small, [datum(TOKENS)])
    await asyncio.gather(*waits)
    # One of the large ones was computed, one travelled, and each small one may find one before it.
    assert max(at for at, name in enumerate(ended) if name == "small") <= 7


# --- ends of sessions ----------------------------------------------------------------------


async def test_a_session_that_is_finished_leaves_nothing(client: TinkerClient) -> None:
    models = [await client.create() for _ in range(PLACES)]
    path = await models[0].save("kept")
    session_id = client.session_id
    await client.finish()
    with refusal(404):
        await models[0].forward([datum(TOKENS)])
    with refusal(410):
        await client.call("session_heartbeat", {"session_id": session_id})
    for _ in range(PLACES - 1):
        await client.create()
    # What was saved stays.
    assert (await client.load(path, optimizer=True)).model_id.startswith(client.session_id)


async def test_a_model_whose_session_ends_meanwhile_holds_no_place(client: TinkerClient) -> None:
    async def create() -> Any:
        return await client.call(
            "create_model",
            {
                "session_id": await client.begin(),
                "model_seq_id": 0,
                "base_model": NAME,
                "lora_config": {"rank": 1},
            },
        )

    promised = await create()
    await client.finish()
    with refusal("user", "session_id: .*has ended"):
        await client.result(promised)
    for _ in range(PLACES):
        await client.create()


async def test_a_session_of_a_silent_client_ends(world: TinkerWorld) -> None:
    silence_s = 1.5
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            server_of(world, folder=world.folder / "other", session_s=silence_s)
        )
        app = make_app(server, Keys())
        client = await stack.enter_async_context(world.client(app))
        silent = await stack.enter_async_context(world.client(app))
        heard, model = await client.create(), await silent.create()

        async def wait_for(condition: Callable[[], bool]) -> None:
            async with asyncio.timeout(30):
                while not condition():
                    await client.call("session_heartbeat", {"session_id": client.session_id})
                    await asyncio.sleep(0.05)

        await wait_for(lambda: model.model_id not in server.models.by_id)
        with refusal(404):
            await model.forward([datum(TOKENS)])
        silent.session_id = ""
        # Calls of its models keep a session, too.
        async with asyncio.timeout(30):
            for _ in range(20):
                await heard.forward([datum(TOKENS)])
                await asyncio.sleep(silence_s / 10)


async def test_a_silent_session_gives_way_to_another_one_of_its_owner(
    ann: TinkerClient, bob: TinkerClient, world: TinkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [await ann.create() for _ in range(PLACES)]
    path = await models[0].save("kept")
    session = world.server.sessions.get("ann", ann.session_id)
    session.heard_at -= tenants.GIVES_WAY_S - 10
    async with world.client(owners_app(world), ANN) as again:
        with refusal("user", "places are taken"):
            await again.create()
        session.heard_at -= 20
        # Another owner's work waits for no one, and nobody's waits for it.
        with refusal("user", "places are taken"):
            await bob.create()
        loaded = await again.load(path, optimizer=True)
        assert await loaded.forward([datum(TOKENS)])
        with refusal(404):
            await models[0].forward([datum(TOKENS)])
        ann.session_id = ""
