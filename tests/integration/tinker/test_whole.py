"""Whole models that clients of Tinker's protocol train."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.torch
import torch
from support.tinker_servers import (
    NAME,
    TinkerClient,
    TinkerModel,
    TinkerWorld,
    datum,
    logprobs,
    refusal,
    server_of,
)

from rolemesh.coordinator.tinker.routes.app import make_app
from rolemesh.coordinator.tinker.routes.keys import Keys

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORLD = {"places": 2, "trains_whole": True}

NATS = 2e-5
"""Of a log-prob in float32, summed in another order; seen with adapters: 2e-6."""

TOKENS = [5, 6, 7, 8, 9, 10]


async def trained(model: TinkerModel, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        await model.gradient([datum(TOKENS)])
        await model.step(learning_rate=1e-3)


async def test_all_weights_are_trained_and_saved_as_others_load_them(
    client: TinkerClient, world: TinkerWorld
) -> None:
    model = await client.create(rank=0)
    told = await client.call("get_info", {"model_id": model.model_id})
    assert (told["is_lora"], told["lora_rank"]) == (False, None)
    before = world.base_logprobs()(TOKENS[:-1])
    first = await model.forward([datum(TOKENS)])
    places = np.arange(len(TOKENS) - 1)
    np.testing.assert_allclose(logprobs(first)[0], before[places, TOKENS[1:]], rtol=0, atol=NATS)
    await trained(model, 2)
    found = await model.forward([datum(TOKENS)])
    assert found["metrics"]["loss:sum"] < first["metrics"]["loss:sum"] - 1
    folder = world.files(await model.save("whole", for_sampler=True))
    after = world.base_logprobs(folder)(TOKENS[:-1])
    # The saved model is rounded to bfloat16, as its base is: 2^-9 of a weight, and so about that
    # much of a logit, which is below 10 here.
    np.testing.assert_allclose(logprobs(found)[0], after[places, TOKENS[1:]], rtol=0, atol=0.1)
    ours, base = (
        safetensors.torch.load_file(one / "model.safetensors") for one in (folder, world.model)
    )
    assert ours.keys() == base.keys()
    for name, values in ours.items():
        assert not torch.equal(values, base[name]), name


@pytest.mark.slow
async def test_training_goes_on_bit_for_bit_also_after_a_kill(
    client: TinkerClient, world: TinkerWorld
) -> None:
    model = await client.create(rank=0)
    await trained(model)
    state = await model.save("state")
    await trained(model, 2)
    expected = await model.forward([datum(TOKENS)])
    loaded = await client.load(state, optimizer=True)
    await loaded.gradient([datum(TOKENS)])
    world.kill_actor()
    await loaded.step(learning_rate=1e-3)
    world.kill_actor()
    await trained(loaded)
    assert await loaded.forward([datum(TOKENS)]) == expected
    await model.unload()
    # Without the optimizer: the weights, rounded as they were saved.
    fresh = await client.load(state, optimizer=False)
    told = await client.call("weights_info", {"tinker_path": state})
    assert (told["is_lora"], told["lora_rank"]) == (False, None)
    await trained(fresh, 2)
    assert await fresh.forward([datum(TOKENS)]) != expected


async def test_weights_are_sampled_as_they_are_and_as_they_were(client: TinkerClient) -> None:
    model = await client.create(rank=0)
    await trained(model)
    path = await model.save("early", for_sampler=True)
    of_now, of_path = await model.sampler(), await client.sampler(model_path=path)
    early = await client.sample(of_now, TOKENS, 2, seed=4, prompt_logprobs=True)
    await trained(model, 3)
    late = await client.sample(await model.sampler(), TOKENS, 2, seed=4, prompt_logprobs=True)
    then = await client.sample(of_path, TOKENS, 2, seed=4, prompt_logprobs=True)
    scores = [np.array(one["prompt_logprobs"][1:]) for one in (early, late, then)]
    # Rounded to bfloat16 where it was saved; three steps change it by more.
    np.testing.assert_allclose(scores[2], scores[0], rtol=0, atol=0.1)
    assert np.abs(scores[1] - scores[0]).max() > 0.2
    base = await client.sample(
        await client.sampler(base_model=NAME), TOKENS, seed=4, prompt_logprobs=True
    )
    assert np.abs(np.array(base["prompt_logprobs"][1:]) - scores[0]).max() > 0.1


async def test_what_is_of_the_other_kind_is_refused(
    client: TinkerClient, world: TinkerWorld
) -> None:
    with refusal(400, "lora_config.rank: 4: this server trains whole models: give 0"):
        await client.create(rank=4)
    path = await (await client.create(rank=0)).save("whole")
    # Another server of adapters, on the same folder.
    async with (
        server_of(world, folder=world.folder) as server,
        world.client(make_app(server, Keys())) as other,
    ):
        for asking in (other.load(path, optimizer=False), other.sampler(model_path=path)):
            with refusal(400, "it is a whole model: start the server with --whole"):
                await asking
