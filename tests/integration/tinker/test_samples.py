"""Samples over Tinker's protocol, of models that train on and of services that are killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from support.tinker_servers import (
    NAME,
    TinkerClient,
    TinkerModel,
    TinkerWorld,
    datum,
    refusal,
)
from support.tiny_models import END_ID, VOCAB_SIZE, tiny_tokenizer

from rolemesh.coordinator.run.services.launch import LaunchError

pytestmark = pytest.mark.asyncio(loop_scope="module")

NATS = 2e-5
"""Of a log-prob in float32, summed in another order; seen here: 2e-6."""

PROMPT = [5, 6, 7, 8]
FIRST = [5, 6, 7, 8, 9, 10]
SECOND = [9, 8, 7, 6, 30, 31, 2]


async def trained(model: TinkerModel, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        await model.gradient([datum(FIRST), datum(SECOND)])
        await model.step()


def tokens_of(sampled: Any) -> list[list[int]]:
    return [one["tokens"] for one in sampled["sequences"]]


async def scores(client: TinkerClient, sampler: str, prompt: list[int]) -> Any:
    """What the SDK's compute_logprobs gives."""
    sampled = await client.sample(sampler, prompt, max_tokens=1, prompt_logprobs=True)
    return sampled["prompt_logprobs"]


# --- what is drawn -------------------------------------------------------------------------


async def test_the_base_is_sampled_as_it_is(client: TinkerClient, base: Any) -> None:
    sampler = await client.sampler(base_model=NAME)
    sampled = await client.sample(
        sampler, PROMPT, 3, seed=4, prompt_logprobs=True, topk_prompt_logprobs=2
    )
    of_prompt = base(PROMPT)
    told = sampled["prompt_logprobs"]
    assert told[0] is None
    expected = of_prompt[np.arange(len(PROMPT) - 1), PROMPT[1:]]
    np.testing.assert_allclose(told[1:], expected, rtol=0, atol=NATS)
    likeliest = sampled["topk_prompt_logprobs"]
    assert likeliest[0] is None
    for place, pairs in enumerate(likeliest[1:]):
        ids = np.argsort(-of_prompt[place])[:2]
        assert [token for token, _ in pairs] == ids.tolist()
        np.testing.assert_allclose(
            [logprob for _, logprob in pairs], of_prompt[place][ids], rtol=0, atol=NATS
        )
    for sequence in sampled["sequences"]:
        tokens = sequence["tokens"]
        places = np.arange(len(PROMPT) - 1, len(PROMPT) + len(tokens) - 1)
        expected = base([*PROMPT, *tokens])[places, tokens]
        np.testing.assert_allclose(sequence["logprobs"], expected, rtol=0, atol=NATS)


async def test_log_probs_of_samples_are_those_of_the_same_tokens_as_a_prompt(
    client: TinkerClient,
) -> None:
    model = await client.create()
    await trained(model, 2)
    sampler = await model.sampler()
    for sequence in (await client.sample(sampler, PROMPT, 2, seed=4))["sequences"]:
        told = await scores(client, sampler, [*PROMPT, *sequence["tokens"]])
        np.testing.assert_allclose(told[len(PROMPT) :], sequence["logprobs"], rtol=0, atol=NATS)


async def test_a_sample_is_the_same_alone_and_beside_others(client: TinkerClient) -> None:
    model = await client.create()
    await trained(model)
    sampler = await model.sampler()
    alone = await client.sample(sampler, PROMPT, 2, seed=7)
    others: list[dict[str, Any]] = [
        {"prompt": [1, 2], "num": 2, "seed": 8},
        {"prompt": PROMPT, "num": 2, "seed": 9},
        # Of the same draw, also in the same generation.
        {"prompt": [30] * 20, "num": 2, "seed": 7},
        {"prompt": PROMPT, "num": 2, "seed": 7, "temperature": 0.5},
        {"prompt": PROMPT, "num": 4, "seed": 7},
    ]
    found = await asyncio.gather(
        *(client.sample(sampler, **other) for other in others[:3]),
        client.sample(sampler, PROMPT, 2, seed=7),
        *(client.sample(sampler, **other) for other in others[3:]),
    )
    beside = found[3]
    assert tokens_of(beside) == tokens_of(alone)
    for one, other in zip(beside["sequences"], alone["sequences"], strict=True):
        np.testing.assert_allclose(one["logprobs"], other["logprobs"], rtol=0, atol=NATS)
    # The first samples of four are those of two; each is another one, and so is each seed's.
    assert tokens_of(found[5])[:2] == tokens_of(alone)
    every = [tuple(one) for sampled in (found[5], found[1]) for one in tokens_of(sampled)]
    assert len(set(every)) == 6


async def test_samples_without_a_seed_differ(client: TinkerClient) -> None:
    sampler = await client.sampler(base_model=NAME)
    found = await asyncio.gather(*(client.sample(sampler, PROMPT, 2) for _ in range(3)))
    every = {tuple(one) for sampled in found for one in tokens_of(sampled)}
    # Two of six are equal with a probability below 1e-15: 8 tokens of about 6 nats each.
    assert len(every) == 6


async def test_stops_end_a_sample(client: TinkerClient) -> None:
    sampler = await client.sampler(base_model=NAME)
    tokenizer = tiny_tokenizer(VOCAB_SIZE)
    free = (await client.sample(sampler, PROMPT, seed=5))["sequences"][0]
    assert (free["stop_reason"], len(free["tokens"])) == ("length", 8)
    tokens = free["tokens"]
    text = tokenizer.decode(tokens[3])
    for stop in ([tokens[3]], [511, tokens[3]], text, [text, "no such text"]):
        cut = (await client.sample(sampler, PROMPT, seed=5, stop=stop))["sequences"][0]
        assert cut["stop_reason"] == "stop"
        assert cut["tokens"] == tokens[: len(cut["tokens"])]
        assert len(cut["logprobs"]) == len(cut["tokens"]) <= 4
        if isinstance(stop, list) and isinstance(stop[0], int):
            assert cut["tokens"][-1] == tokens[3]
        else:
            assert text in tokenizer.decode(cut["tokens"])


async def test_a_sample_ends_where_the_text_or_the_model_does(client: TinkerClient) -> None:
    model = await client.create()
    for _ in range(8):
        await model.gradient([datum([*PROMPT, END_ID], weights=[0, 0, 0, 1])])
        await model.step(learning_rate=2e-2)
    sampler = await model.sampler()
    sequence = (await client.sample(sampler, PROMPT, temperature=0))["sequences"][0]
    assert (sequence["tokens"], sequence["stop_reason"]) == ([END_ID], "stop")
    # Without a number of its own a sample goes on to the model's.
    sampler = await client.sampler(base_model=NAME)
    sequence = (await client.sample(sampler, [5] * 100, max_tokens=None))["sequences"][0]
    assert (len(sequence["tokens"]), sequence["stop_reason"]) == (28, "length")


async def test_temperature_zero_is_greedy(client: TinkerClient, base: Any) -> None:
    sampler = await client.sampler(base_model=NAME)
    expected: list[int] = []
    for _ in range(8):
        expected.append(int(base([*PROMPT, *expected])[-1].argmax()))
    for asked in ({"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6}):
        assert tokens_of(await client.sample(sampler, PROMPT, **asked)) == [expected], asked


# --- whose weights -------------------------------------------------------------------------


async def test_a_sampler_keeps_its_weights_while_the_model_trains_on(
    client: TinkerClient,
) -> None:
    model = await client.create()
    await trained(model)
    old, path = await model.sampler(), await model.save("old", for_sampler=True)
    before = await scores(client, old, FIRST)
    await model.gradient([datum(FIRST), datum(SECOND)])

    async def draws(sampler: str) -> list[list[list[int]]]:
        # Each of another temperature: they are sampled one after the other.
        calls = [client.sample(sampler, FIRST, seed=n, temperature=1 + n / 8) for n in range(4)]
        return [tokens_of(one) for one in await asyncio.gather(*calls)]

    drawn = await draws(old)
    # The step falls between them.
    again, _ = await asyncio.gather(draws(old), model.step())
    assert again == drawn
    new, of_path = await model.sampler(), await client.sampler(model_path=path)
    for sampler in (old, of_path):
        np.testing.assert_allclose(
            np.float64((await scores(client, sampler, FIRST))[1:]),
            np.float64(before[1:]),
            rtol=0,
            atol=NATS,
        )
        # A seed draws the same, whatever it is that has the weights by now.
        assert await draws(sampler) == drawn
    of_new = await scores(client, new, FIRST)
    assert np.abs(np.subtract(of_new[1:], before[1:])).max() > 100 * NATS
    # Samples name their weights themselves, too.
    body = client.sample_body("", FIRST, max_tokens=1, prompt_logprobs=True)
    del body["sampling_session_id"], body["seq_id"]
    found = await client.made("asample", {**body, "model_path": path})
    np.testing.assert_allclose(found["prompt_logprobs"][1:], before[1:], rtol=0, atol=NATS)
    # And outlive their model.
    await model.unload()
    after = await scores(client, new, FIRST)
    np.testing.assert_allclose(after[1:], of_new[1:], rtol=0, atol=NATS)
    assert (await client.call(f"samplers/{of_path}", method="GET"))["model_path"] == path


async def test_weights_that_were_written_over_are_sampled(client: TinkerClient) -> None:
    model = await client.create()
    path = await model.save("same", for_sampler=True)
    before = await scores(client, await client.sampler(model_path=path), FIRST)
    await trained(model)
    with refusal("user", "path: same: it is saved already"):
        await model.save("same", for_sampler=True)
    assert await model.save("same", for_sampler=True, overwrite=True) == path
    after = await scores(client, await client.sampler(model_path=path), FIRST)
    expected = await scores(client, await model.sampler(), FIRST)
    np.testing.assert_allclose(after[1:], expected[1:], rtol=0, atol=NATS)
    assert np.abs(np.subtract(after[1:], before[1:])).max() > 100 * NATS


# --- several clients, and kills ------------------------------------------------------------


async def made_run(
    world: TinkerWorld, seed: int, kill: Callable[[int, str], None] = lambda step, where: None
) -> tuple[bytes, list[list[list[int]]]]:
    """Trains and samples in turn: the saved adapter, and what was sampled."""
    async with world.client() as client:
        model = await client.create(seed=seed, rank=2 + seed)
        sampled: list[list[list[int]]] = []
        for step in range(3):
            bodies = [
                ("forward_backward", model.gradient_body([datum(FIRST), datum([9, 8, 7 + step])])),
                ("forward_backward", model.gradient_body([datum(SECOND, weights=[0.5] * 6)])),
                ("optim_step", model.numbered(adam_params={"learning_rate": 1e-2})),
            ]
            promised = [await client.call(*one) for one in bodies[:2]]
            kill(step, "within")
            await client.result(promised[1])
            kill(step, "between")
            promised.append(await client.call(*bodies[2]))
            await client.result(promised[2])
            sampler = await model.sampler()
            kill(step, "sampling")
            found = await asyncio.gather(
                client.sample(sampler, PROMPT, 2, seed=3), client.sample(sampler, SECOND, 2)
            )
            sampled.extend(map(tokens_of, found))
        return world.adapter(await model.save("end")), sampled


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(world: TinkerWorld) -> tuple[bytes, list[list[list[int]]]]:
    return await made_run(world, seed=1)


async def test_clients_at_once_get_what_each_gets_alone(
    world: TinkerWorld, undisturbed: Any
) -> None:
    other = await made_run(world, seed=2)
    assert other != undisturbed
    together = await asyncio.gather(made_run(world, seed=1), made_run(world, seed=2))
    assert list(together) == [undisturbed, other]


async def test_a_killed_service_changes_no_bit(world: TinkerWorld, undisturbed: Any) -> None:
    at = [(0, "within"), (1, "between"), (2, "sampling")]
    kills = 0

    def kill(step: int, where: str) -> None:
        nonlocal kills
        if (step, where) in at:
            kills += 1
            world.kill_actor()

    assert await made_run(world, seed=1, kill=kill) == undisturbed
    assert kills == len(at)


async def test_models_and_samplers_of_all_clients_come_back(
    world: TinkerWorld, client: TinkerClient
) -> None:
    model, of_base = await client.create(), await client.sampler(base_model=NAME)
    await trained(model)
    before = [await scores(client, of_base, FIRST), (await model.forward([datum(FIRST)]))]
    world.kill_actor()
    after = await asyncio.gather(scores(client, of_base, FIRST), model.forward([datum(FIRST)]))
    assert list(after) == before


async def test_a_service_that_does_not_start_at_once_is_tried_again(
    world: TinkerWorld, client: TinkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await client.create()
    await trained(model)
    expected = await model.forward([datum(FIRST)])
    restart, failures = world.place._launcher.restart, iter([True] * 4)

    async def failing(service: str) -> str:
        if next(failures, False):
            raise LaunchError("while starting: killed")
        return await restart(service)

    monkeypatch.setattr(world.place._launcher, "restart", failing)
    world.kill_actor()
    # Three starts fail for the first call, and one for the second.
    with refusal("server", "while starting: killed"):
        await model.forward([datum(FIRST)])
    assert await model.forward([datum(FIRST)]) == expected
