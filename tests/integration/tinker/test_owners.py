"""Places, owners and saved weights of a server of Tinker's protocol."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import safetensors.numpy
from support.tinker_servers import (
    LONGEST,
    NAME,
    TinkerClient,
    TinkerModel,
    TinkerWorld,
    datum,
    owners_app,
    refusal,
    server_of,
)
from transformers import AutoTokenizer

from rolemesh.coordinator.tinker.routes.app import make_app
from rolemesh.coordinator.tinker.routes.keys import Keys

pytestmark = pytest.mark.asyncio(loop_scope="module")

PLACES = 3
WORLD = {"places": PLACES}
TOKENS = [5, 6, 7, 8]


async def test_no_more_models_are_held_than_there_are_places(client: TinkerClient) -> None:
    models = [await client.create() for _ in range(PLACES)]
    with refusal("user", rf"all {PLACES} places are taken by .* models and .* samplers: "):
        await client.create()
    with refusal("user", f"all {PLACES} places are taken"):
        await client.sample(await client.sampler(base_model=NAME), TOKENS)
    # A model that samples its own weights needs no other place.
    await client.sample(await models[0].sampler(), TOKENS)
    await models[1].unload()
    await client.sample(await client.sampler(base_model=NAME), TOKENS)
    # That sampler gives way to a model.
    other = await client.create()
    assert (await other.forward([datum(TOKENS)]))["metrics"]


async def test_a_place_is_free_once_its_model_has_ended(client: TinkerClient) -> None:
    models = [await client.create() for _ in range(PLACES)]
    created, *_ = await asyncio.gather(
        client.create(), *(model.unload() for model in models), return_exceptions=True
    )
    # Whichever came first: the place is there, or all of them are taken.
    assert isinstance(created, TinkerModel) or "places are taken" in str(created)
    for _ in range(PLACES - 1):
        await client.create()


async def test_a_model_says_what_it_is(client: TinkerClient, world: TinkerWorld) -> None:
    model = await client.create(rank=3, train_mlp=False)
    told = await client.call("get_info", {"model_id": model.model_id})
    assert (told["model_id"], told["model_name"], told["lora_rank"]) == (model.model_id, NAME, 3)
    assert AutoTokenizer.from_pretrained(told["model_data"]["tokenizer_id"]).decode([45]) == "J"
    # An adapter of what was asked for, and of nothing else.
    path = await model.save("attention", for_sampler=True)
    matrices = safetensors.numpy.load(world.adapter(path))
    assert {name.split(".")[-3] for name in matrices} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert {min(one.shape) for one in matrices.values()} == {3}
    assert (await client.call("weights_info", {"tinker_path": path}))["base_model"] == NAME
    (served,) = (await client.call("get_server_capabilities", method="GET"))["supported_models"]
    assert (served["model_name"], served["max_context_length"]) == (NAME, LONGEST)


async def test_another_server_on_the_same_folder_has_what_was_saved(
    client: TinkerClient, world: TinkerWorld
) -> None:
    model = await client.create()
    await model.gradient([datum(TOKENS)])
    await model.step()
    path, expected = await model.save("kept"), await model.forward([datum(TOKENS)])
    async with (
        server_of(world, folder=world.folder) as server,
        world.client(make_app(server, Keys())) as later,
    ):
        loaded = await later.load(path, optimizer=True)
        assert await loaded.forward([datum(TOKENS)]) == expected
    async with (
        server_of(world, folder=world.folder, name="another-base") as server,
        world.client(make_app(server, Keys())) as other,
    ):
        for asking in (other.load(path, optimizer=False), other.sampler(model_path=path)):
            with refusal(400, f"it has weights of {NAME}, and this server has another-base"):
                await asking


# --- owners --------------------------------------------------------------------------------


async def test_without_a_key_of_somebody_nothing_is_served(world: TinkerWorld) -> None:
    for key in ("", "tml-" + "c" * 16):
        async with world.client(owners_app(world), key) as nobody:
            for route, method in (("create_session", "POST"), ("healthz", "GET")):
                with refusal(401, "this API key is nobody's here"):
                    await nobody.call(route, method=method)


async def test_what_is_anothers_is_not_there(ann: TinkerClient, bob: TinkerClient) -> None:
    model = await ann.create()
    path, sampler = await model.save("mine"), await model.sampler()
    promised = await ann.call("forward", model.gradient_body([datum(TOKENS)], forward_only=True))
    await bob.begin()
    theirs = TinkerModel(bob, model.model_id)
    loading = {"session_id": bob.session_id, "model_seq_id": 0, "path": path}
    creating = {"base_model": NAME, "lora_config": {"rank": 1}, "model_seq_id": 5}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("forward_backward", theirs.gradient_body([datum(TOKENS)])),
        ("optim_step", theirs.numbered(adam_params={})),
        ("save_weights", theirs.numbered(path="theirs")),
        ("load_weights", theirs.numbered(path=path)),
        ("load_weights", loading),
        ("get_info", {"model_id": model.model_id}),
        ("unload_model", {"model_id": model.model_id}),
        ("create_model", {**creating, "session_id": ann.session_id}),
        ("weights_info", {"tinker_path": path}),
        ("asample", bob.sample_body(sampler, TOKENS)),
        (f"sessions/{ann.session_id}/finish", {}),
    ]
    for route, body in calls:
        with refusal(404):
            await bob.call(route, body)
    for found in ("retrieve_future", "session_heartbeat"):
        body = {"request_id": promised["request_id"], "session_id": ann.session_id}
        with refusal(410):
            await bob.call(found, body)
    with refusal(404):
        await bob.call(f"samplers/{sampler}", method="GET")
    # Nothing of it has changed for its owner, whose calls go on at the next number.
    await ann.result(promised)
    await model.gradient([datum(TOKENS)])
    await model.step()


async def test_saved_weights_are_published_and_withdrawn(
    ann: TinkerClient, bob: TinkerClient
) -> None:
    model = await ann.create(rank=3)
    path = await model.save("shared")
    route = f"training_runs/{model.model_id}/checkpoints/weights/shared"
    with refusal(404):
        await bob.call(f"{route}/publish")
    await ann.call(f"{route}/publish")
    assert (await bob.call("weights_info", {"tinker_path": path}))["lora_rank"] == 3
    loaded = await bob.load(path, optimizer=True)
    assert await loaded.forward([datum(TOKENS)]) == await model.forward([datum(TOKENS)])
    for call, method in ((route, "DELETE"), (f"{route}/publish", "DELETE")):
        with refusal(404, "another owner's"):
            await bob.call(call, method=method)
    # Its own list does not have them.
    assert (await bob.call("checkpoints", method="GET"))["checkpoints"] == []
    await ann.call(f"{route}/publish", method="DELETE")
    with refusal(404):
        await bob.call("weights_info", {"tinker_path": path})


async def test_saved_weights_are_listed_kept_for_a_while_and_removed(ann: TinkerClient) -> None:
    model = await ann.create(rank=3)
    paths = [
        await model.save("a", user_metadata={"note": "first"}),
        await model.save("b", for_sampler=True, ttl_seconds=3600),
    ]
    await model.sampler()  # not listed: it has no name
    run = f"training_runs/{model.model_id}"
    listed = (await ann.call(f"{run}/checkpoints", method="GET"))["checkpoints"]
    assert sorted(one["tinker_path"] for one in listed) == sorted(paths)
    b, a = sorted(listed, key=lambda one: str(one["checkpoint_id"]))
    assert (b["checkpoint_id"], a["checkpoint_id"]) == ("sampler_weights/b", "weights/a")
    assert (b["checkpoint_type"], a["checkpoint_type"]) == ("sampler", "training")
    assert (a["expires_at"], a["public"]) == (None, False)
    assert a["time"] < b["expires_at"]
    assert a["size_bytes"] > b["size_bytes"] > 1000
    told = await ann.call(run, method="GET")
    assert (told["base_model"], told["lora_rank"], told["model_owner"]) == (NAME, 3, "ann")
    assert told["last_checkpoint"]["tinker_path"] == paths[0]
    assert told["last_sampler_checkpoint"]["tinker_path"] == paths[1]
    every = await ann.call("training_runs?limit=1", method="GET")
    assert len(every["training_runs"]) == 1 <= every["cursor"]["total_count"]

    with refusal(400):
        await ann.call(f"{run}/checkpoints/weights/a/ttl", {"ttl_seconds": -1}, method="PUT")
    await ann.call(f"{run}/checkpoints/weights/a/ttl", {"ttl_seconds": 0.01}, method="PUT")
    await asyncio.sleep(0.02)
    await ann.call(f"{run}/checkpoints/sampler_weights/b", method="DELETE")
    assert (await ann.call(f"{run}/checkpoints", method="GET"))["checkpoints"] == []
    for call in (
        ann.load(paths[0], optimizer=True),
        ann.sampler(model_path=paths[1]),
        ann.call(f"{run}/checkpoints/sampler_weights/b", method="DELETE"),
        ann.call(f"{run}/checkpoints/other/b", method="DELETE"),
    ):
        with refusal(404, "no such weights"):
            await call
    # The names are free again.
    await model.save("a")
