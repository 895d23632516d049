"""Training over Tinker's protocol: what a real server computes, in which order, and keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
from support.tinker_servers import (
    ADAM,
    Logprobs,
    RefusedError,
    TinkerClient,
    TinkerModel,
    TinkerWorld,
    datum,
    logprobs,
    refusal,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

NATS = 2e-5
"""Of a log-prob in float32, summed in another order; seen here: 2e-6."""

SUMMED = 5e-7
"""Of a weight: gradients of calls are added up, those of rows of one call are one product of
matrices. Seen: 6e-8, also with AVX2 alone. A step moves an entry by up to 1e-1."""

FIRST = [5, 6, 7, 8, 9, 10]
SECOND = [9, 8, 7, 6, 30, 31, 2]
THIRD = [4, 4, 200, 3]


def matrices(world: TinkerWorld, path: str) -> dict[str, npt.NDArray[np.float32]]:
    found: dict[str, npt.NDArray[np.float32]] = safetensors.numpy.load(world.adapter(path))
    return found


# --- losses --------------------------------------------------------------------------------


async def test_cross_entropy_is_that_of_the_model(client: TinkerClient, base: Logprobs) -> None:
    model = await client.create()
    weights = [[1.0, 0.5, 0.0, -2.0, 1e-3], [3.0, -1.0, 0.25]]
    others, wide = [9, 9, 0, 511, 7], [[6, 100], [7, 101], [8, 7], [0, 0], [511, 1]]
    wide_weights = np.linspace(-1, 1, 10).reshape(5, 2)
    calls: list[list[tuple[dict[str, Any], list[int], npt.ArrayLike, npt.ArrayLike]]] = [
        [
            (datum(FIRST, weights=weights[0]), FIRST[:-1], FIRST[1:], weights[0]),
            (datum(THIRD, weights=weights[1]), THIRD[:-1], THIRD[1:], weights[1]),
        ],
        # Without weights each token counts one.
        [(datum(FIRST), FIRST[:-1], FIRST[1:], np.ones(5))],
        [
            (datum(FIRST[:-1], others, weights=weights[0]), FIRST[:-1], others, weights[0]),
            (datum(SECOND), SECOND[:-1], SECOND[1:], np.ones(6)),
        ],
        [(datum(FIRST[:-1], wide, weights=wide_weights), FIRST[:-1], wide, wide_weights)],
        [(datum([5], [[6]], weights=[[2.0]]), [5], [[6]], [[2.0]])],
    ]
    for call in calls:
        data = [one for one, *_ in call]
        found, alone = await model.gradient(data), await model.forward(data)
        assert found == alone
        loss = 0.0
        for (_, tokens, targets, weight), told in zip(call, logprobs(found), strict=True):
            places = np.arange(len(tokens)).reshape(-1, *([1] * (np.ndim(targets) - 1)))
            expected = base(tokens)[places, np.asarray(targets)]
            np.testing.assert_allclose(told, expected, rtol=0, atol=NATS)
            loss -= float((np.asarray(weight) * expected).sum())
        num_nats = sum(float(np.abs(weight).sum()) for *_, weight in call)
        assert found["metrics"]["loss:sum"] == pytest.approx(loss, abs=NATS * (1 + num_nats))


def _clip(ratio: npt.NDArray[np.float64], low: float, high: float) -> npt.NDArray[np.float64]:
    return np.clip(ratio, low, high)


def _smaller(
    ratio: npt.NDArray[np.float64], advantages: npt.NDArray[np.float64], low: float, high: float
) -> float:
    return -float(np.minimum(ratio * advantages, _clip(ratio, low, high) * advantages).sum())


_FORMULAS: dict[str, Callable[[Any, Any, Any, Any], float]] = {
    "importance_sampling": lambda p, q, a, mask: -float((np.exp(p - q) * a).sum()),
    "ppo": lambda p, q, a, mask: _smaller(np.exp(p - q), a, 0.7, 1.2),
    "cispo": lambda p, q, a, mask: -float((_clip(np.exp(p - q), 0.0, 1.5) * p * a).sum()),
    "gspo": lambda p, q, a, mask: _smaller(
        np.full(len(p), np.exp(((p - q) * mask).sum() / mask.sum())), a, 1 - 3e-4, 1 + 4e-4
    ),
    "dro": lambda p, q, a, mask: float((-p * a + 0.1 / 2 * (p - q) ** 2).sum()),
}
_CONFIGS: dict[str, dict[str, float]] = {
    "ppo": {"clip_low_threshold": 0.7},
    "cispo": {"clip_high_threshold": 1.5},
    "dro": {"beta": 0.1},
}


@pytest.mark.parametrize("loss", _FORMULAS)
async def test_losses_with_advantages_are_their_formulas(
    client: TinkerClient, base: Logprobs, loss: str
) -> None:
    model = await client.create()
    draw = np.random.default_rng(3)
    data, expected = [], 0.0
    for tokens in (FIRST, SECOND):
        num = len(tokens) - 1
        policy = base(tokens[:-1])[np.arange(num), tokens[1:]]
        # Ratios from 0.5 to 2 and more, both inside and outside of all bounds.
        sampler = np.float32(policy + draw.normal(size=num) / 2)
        advantages = np.float32(draw.normal(size=num))
        mask = np.array([0, 1, 1, 1, 0.5, 0], dtype=np.float32)[:num]
        inputs: dict[str, npt.ArrayLike] = {"logprobs": sampler, "advantages": advantages}
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = mask
        data.append(datum(tokens, **inputs))
        expected += _FORMULAS[loss](policy, sampler, advantages, mask)
    found = await model.gradient(data, loss, **_CONFIGS.get(loss, {}))
    assert found["metrics"]["loss:sum"] == pytest.approx(expected, abs=20 * NATS)
    for told, tokens in zip(logprobs(found), (FIRST, SECOND), strict=True):
        policy = base(tokens[:-1])[np.arange(len(tokens) - 1), tokens[1:]]
        np.testing.assert_allclose(told, policy, rtol=0, atol=NATS)


@pytest.mark.parametrize("loss", _FORMULAS)
async def test_what_is_worth_more_becomes_likelier(client: TinkerClient, loss: str) -> None:
    model = await client.create()
    (sampler,) = logprobs(await model.forward([datum(FIRST)]))
    data = [datum(FIRST, logprobs=sampler, advantages=[1, 1, 0, -1, -1])]
    await model.gradient(data, loss)
    await model.step(learning_rate=1e-3)
    (after,) = logprobs(await model.forward([datum(FIRST)]))
    assert (after - sampler)[:2].mean() > 0 > (after - sampler)[3:].mean()


# --- the optimizer -------------------------------------------------------------------------


async def test_steps_use_the_numbers_of_their_call(
    client: TinkerClient, world: TinkerWorld
) -> None:
    model = await client.create()
    saved = [matrices(world, await model.save("start", for_sampler=True))]
    numbers = [
        {"learning_rate": 0.0, "weight_decay": 0.5},
        {"learning_rate": 1e-2, "weight_decay": 0.5, "beta1": 0.5, "beta2": 0.8},
        {"learning_rate": 1e-2, "beta1": 0.0, "beta2": 0.0, "eps": 1.0, "grad_clip_norm": 1e-3},
    ]
    for step in numbers:
        await model.gradient([datum(FIRST), datum(SECOND)])
        await model.step(**step)
        saved.append(matrices(world, await model.save(f"s{len(saved)}", for_sampler=True)))
    first, second = ([name for name in saved[0] if f"lora_{one}" in name] for one in "AB")
    assert first
    assert second
    for name, values in saved[0].items():
        np.testing.assert_array_equal(saved[1][name], values)
    # B begins with zeros, and the gradient of A is a product with B: A decays, and nothing else.
    # The gradient g is the same in both steps: the moments are 0.1 g and 0.05 g^2, and then these.
    mean = (0.5 * 0.1 + 0.5) / (1 - 0.5**2)
    square = (0.8 * 0.05 + 0.2) / (1 - 0.8**2)
    for name in first:
        np.testing.assert_allclose(saved[2][name], saved[0][name] * (1 - 1e-2 * 0.5), rtol=1e-5)
    for name in second:
        assert not saved[0][name].any()
        np.testing.assert_allclose(np.abs(saved[2][name]), 1e-2 * mean / square**0.5, rtol=1e-4)
    # Beside an eps of 1 the gradients are small: the way is their norm times the learning rate.
    moved = np.concatenate([(saved[3][name] - saved[2][name]).ravel() for name in saved[0]])
    assert np.linalg.norm(moved) == pytest.approx(1e-2 * 1e-3, rel=1e-2)


async def test_gradients_of_calls_add_up(client: TinkerClient, world: TinkerWorld) -> None:
    data = [datum(FIRST), datum(SECOND, weights=[0.5] * 6), datum(THIRD)]
    ends = []
    for chunks in ([data], [data[:1], data[1:]], [[one] for one in data]):
        model = await client.create()
        for rate in (1.0, 0.3):
            for chunk in chunks:
                await model.gradient(chunk)
            # Beside so large an eps a step is as large as its gradient. Without, the rounding of a
            # gradient near zero would be as much of a step as all of a large one.
            await model.step(learning_rate=rate, eps=1.0, grad_clip_norm=1.0)
        ends.append(matrices(world, await model.save("end")))
        await model.unload()
    for other in ends[1:]:
        for name, values in ends[0].items():
            np.testing.assert_allclose(other[name], values, rtol=0, atol=SUMMED)


# --- order ---------------------------------------------------------------------------------


def calls_of(model: TinkerModel) -> list[tuple[str, dict[str, Any]]]:
    """Five calls that give other weights in any other order."""
    return [
        ("forward_backward", model.gradient_body([datum(FIRST)])),
        ("optim_step", model.numbered(adam_params=ADAM)),
        ("forward_backward", model.gradient_body([datum(SECOND)])),
        ("optim_step", model.numbered(adam_params={**ADAM, "learning_rate": 2e-3})),
        ("save_weights", model.numbered(path="end")),
    ]


async def test_calls_are_made_in_the_order_of_their_numbers(
    client: TinkerClient, world: TinkerWorld
) -> None:
    ends = []
    for arrival in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [1, 0, 3, 2, 4]):
        model = await client.create()
        calls = calls_of(model)
        promised = [await client.call(*calls[at]) for at in arrival]
        found = {at: await client.result(one) for at, one in zip(arrival, promised, strict=True)}
        ends.append(world.adapter(found[4]["path"]))
        await model.unload()
    assert ends[0] == ends[1] == ends[2]


async def test_a_call_that_is_sent_again_is_made_once(
    client: TinkerClient, world: TinkerWorld
) -> None:
    ends = []
    for times in (1, 2):
        model = await client.create()
        for route, body in calls_of(model):
            promised = [await client.call(route, body) for _ in range(times)]
            assert len({one["request_id"] for one in promised}) == 1
            found = await client.result(promised[0])
            # Also by a client that lost the answer.
            assert (await client.call(route, body))["request_id"] == promised[0]["request_id"]
        ends.append(world.adapter(found["path"]))
        await model.unload()
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    "wrong",
    [
        ("forward_backward", {"data": [datum(FIRST, weights=[float("nan")] * 5)]}),
        ("forward_backward", {"data": [datum(FIRST)], "loss": "mse"}),
        ("optim_step", {"adam_params": {**ADAM, "beta1": 1.5}}),
        ("save_weights", {"path": "../end"}),
        ("load_weights", {"path": "tinker://none/weights/none"}),
    ],
    ids=lambda wrong: wrong[0],
)
async def test_a_call_that_is_refused_holds_no_other_up(
    client: TinkerClient, wrong: tuple[str, dict[str, Any]]
) -> None:
    model = await client.create()
    route, fields = wrong
    body = (
        model.gradient_body(**fields) if route == "forward_backward" else model.numbered(**fields)
    )
    with pytest.raises(RefusedError) as refused:
        await client.call(route, body)
    assert refused.value.status in (400, 404)
    async with asyncio.timeout(30):
        await model.gradient([datum(FIRST)])


@pytest.mark.parametrize("num_steps", [0, 1])
async def test_a_call_that_fails_leaves_gradients_of_others_alone(
    client: TinkerClient, world: TinkerWorld, num_steps: int
) -> None:
    # The first is refused before the service computes, the second one when it has.
    wrong = [[datum([5, 5000, 7])], [datum([5, 6, 7], weights=[1e30, 1e38])]]
    ends = []
    for fails in (False, True):
        model = await client.create()
        for step in range(num_steps + 1):
            await model.gradient([datum(FIRST)])
            for one in wrong if fails and step == num_steps else ():
                with refusal("user", "(vocabulary has 512|loss is inf)"):
                    await model.gradient(one)
            await model.gradient([datum(SECOND)])
            await model.step()
        ends.append(world.adapter(await model.save("end")))
        await model.unload()
    assert ends[0] == ends[1]


async def test_a_step_without_a_gradient_fails_and_changes_nothing(client: TinkerClient) -> None:
    model = await client.create()
    before = await model.forward([datum(FIRST)])
    with refusal("user", "no gradient was accumulated"):
        await model.step()
    assert await model.forward([datum(FIRST)]) == before


# --- saved weights -------------------------------------------------------------------------


async def trained(model: TinkerModel, num_steps: int) -> None:
    for _ in range(num_steps):
        await model.gradient([datum(FIRST), datum(SECOND)])
        await model.step()


async def test_training_goes_on_from_saved_weights_with_the_same_bits(
    client: TinkerClient, world: TinkerWorld
) -> None:
    model = await client.create()
    await trained(model, 2)
    middle = await model.save("middle")
    forward = await model.forward([datum(FIRST)])
    await trained(model, 2)
    end = world.adapter(await model.save("end"))

    other = await client.load(middle, optimizer=True)
    assert await other.forward([datum(FIRST)]) == forward
    await trained(other, 2)
    assert world.adapter(await other.save("end")) == end
    await other.unload()

    # Without the optimizer the weights are the same, and its moments begin anew.
    other = await client.load(middle, optimizer=False)
    assert await other.forward([datum(FIRST)]) == forward
    await trained(other, 2)
    assert world.adapter(await other.save("end")) != end
    await other.unload()


async def test_a_model_takes_saved_weights_in_its_turn(
    client: TinkerClient, world: TinkerWorld
) -> None:
    model = await client.create()
    await trained(model, 1)
    middle = await model.save("middle")
    await trained(model, 1)
    end, sampler = world.adapter(await model.save("end")), await model.sampler()
    sampled = await client.sample(sampler, [5, 6, 7], seed=3, prompt_logprobs=True)
    # None of them waits for the one before; there is a gradient that the load drops.
    calls = [
        ("forward_backward", model.gradient_body([datum(THIRD)])),
        ("load_weights", model.numbered(path=middle, optimizer=True)),
        ("forward_backward", model.gradient_body([datum(FIRST), datum(SECOND)])),
        ("optim_step", model.numbered(adam_params=ADAM)),
        ("save_weights", model.numbered(path="again")),
    ]
    promised = [await client.call(*call) for call in calls]
    found = [await client.result(one) for one in promised]
    assert world.adapter(found[-1]["path"]) == end
    # As many steps as when the sampler was made, and other weights, which are not those it samples.
    await model.load(middle, optimizer=False)
    for _ in range(2):
        await model.gradient([datum(THIRD)])
        await model.step()
    again = await client.sample(sampler, [5, 6, 7], prompt_logprobs=True)
    np.testing.assert_allclose(
        np.float64(again["prompt_logprobs"][1:]),
        np.float64(sampled["prompt_logprobs"][1:]),
        atol=NATS,
    )


async def test_what_a_load_brought_is_said_of_what_is_saved_after_it(
    client: TinkerClient, world: TinkerWorld
) -> None:
    small, large = await client.create(rank=2), await client.create(rank=4)
    path = await small.save("small")
    # The save is there before the load is made.
    calls = [
        ("load_weights", large.numbered(path=path)),
        ("save_weights", large.numbered(path="again")),
    ]
    promised = [await client.call(*call) for call in calls]
    saved = [await client.result(one) for one in promised][-1]["path"]
    assert (await client.call("weights_info", {"tinker_path": saved}))["lora_rank"] == 2
    again = await client.load(saved, optimizer=True)
    assert await again.forward([datum(FIRST)]) == await small.forward([datum(FIRST)])
    for model in (small, large, again):
        await model.unload()


async def test_a_state_is_not_saved_without_its_gradients(
    client: TinkerClient, world: TinkerWorld
) -> None:
    model = await client.create()
    await model.gradient([datum(FIRST)])
    with refusal("user", "call optim_step before save_state"):
        await model.save("half")
    # Samplers need none, and the gradients are there still.
    assert (await client.sample(await model.sampler(), [5, 6, 7]))["sequences"]
    await model.step()
    await model.save("half")
    assert not list(world.folder.rglob("*.new"))
    await model.unload()
