"""Losses that clients of Tinker's protocol bring as graphs, which the service computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.loss_graphs import graph_of
from support.tinker_servers import (
    TinkerClient,
    TinkerModel,
    TinkerWorld,
    datum,
    logprobs,
    refusal,
    tensor,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

FIRST, SECOND = [5, 6, 7, 8, 9], [9, 8, 7]

ROUNDING = 1e-4
"""Relative, of sums of float32 terms in another order; 2e-6 was seen."""


def squares(logprobs: Any, weights: Any, shift: Any) -> Any:
    gap = logprobs + shift
    return (gap**2 * weights).sum(), {
        "custom/gap:mean": gap.mean(),
        "custom/tokens:sum": torch.ones_like(gap).sum(),
    }


def preferred(logprobs: Any, teacher: Any) -> Any:
    wanted = torch.softmax(teacher, dim=-1)
    return -(wanted * logprobs).sum(), {}


async def created(
    client: TinkerClient, loss: Callable[..., Any], number: int = 0, **ranks: int
) -> str:
    body = {
        "session_id": await client.begin(),
        "custom_loss_seq_id": number,
        "name": loss.__name__,
        "inputs": [{"name": name, "rank": rank} for name, rank in ranks.items()],
        "graph": {"format": 1, "nodes": graph_of(loss)},
    }
    loss_id: str = (await client.made("create_custom_loss", body))["loss_id"]
    return loss_id


def data_of_squares() -> list[dict[str, Any]]:
    data = [
        datum(FIRST, weights=[0.5, 1.0, 2.0, 0.25]),
        datum(SECOND, weights=[1.0, -1.0]),
    ]
    for one, shift in zip(data, (1.0, 2.5), strict=True):
        one["loss_fn_inputs"]["shift"] = tensor(shift)
    return data


async def gradient(model: TinkerModel, data: Any, loss_id: str) -> Any:
    return await model.gradient(data, "custom", loss_id=loss_id)  # type: ignore[arg-type]


async def test_a_graph_is_computed_and_learned_from(client: TinkerClient) -> None:
    model, other = await client.create(), await client.create()
    loss_id = await created(client, squares, logprobs=1, weights=1, shift=0)
    data = data_of_squares()
    made = await gradient(model, data, loss_id)
    found = logprobs(made)
    gaps = [found[0] + 1.0, found[1] + 2.5]
    weights = [np.array(one["loss_fn_inputs"]["weights"]["data"]) for one in data]
    expected = sum((w * gap**2).sum() for w, gap in zip(weights, gaps, strict=True))
    assert made["metrics"]["loss:sum"] == pytest.approx(expected, rel=ROUNDING)
    # Means are over data, as clients take them.
    mean = np.mean([gap.mean() for gap in gaps])
    assert made["metrics"]["custom/gap:mean"] == pytest.approx(mean, rel=ROUNDING)
    assert made["metrics"]["custom/tokens:sum"] == 6
    # The same gradient by the client's own part: log-probs, and weights made of them.
    pairs = zip((FIRST, SECOND), weights, gaps, strict=True)
    surrogate = [datum(tokens, weights=-2 * gap * w) for tokens, w, gap in pairs]
    await other.gradient(surrogate)
    steps = [await one.step() for one in (model, other)]
    assert steps[0]["grad_norm"] == pytest.approx(steps[1]["grad_norm"], rel=1e-3)
    after = [logprobs(await one.forward(surrogate)) for one in (model, other)]
    for ours, theirs, before in zip(*after, found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-3)
        assert np.abs(ours - before).max() > 0.01


async def test_a_graph_sees_several_targets_a_place(client: TinkerClient) -> None:
    model = await client.create()
    loss_id = await created(client, preferred, logprobs=2, teacher=2)
    teacher = np.array([[0.1, 2.0], [1.0, -1.0], [0.0, 0.0]])
    data = [datum([5, 6, 7], [[6, 9], [7, 10], [8, 11]], teacher=teacher)]
    made = await gradient(model, data, loss_id)
    (found,) = logprobs(made)
    wanted = np.exp(teacher) / np.exp(teacher).sum(-1, keepdims=True)
    assert made["metrics"]["loss:sum"] == pytest.approx(-(wanted * found).sum(), rel=ROUNDING)
    await model.step()


async def test_a_killed_service_makes_the_same_gradient_again(
    client: TinkerClient, world: TinkerWorld
) -> None:
    adapters = []
    for is_killed in (False, True):
        model = await client.create(seed=3)
        loss_id = await created(client, squares, logprobs=1, weights=1, shift=0)
        await gradient(model, data_of_squares(), loss_id)
        if is_killed:
            world.kill_actor()
        await model.step()
        adapters.append(world.adapter(await model.save("end")))
    assert adapters[0] == adapters[1]


async def test_a_graph_that_no_loss_may_be_is_refused(client: TinkerClient) -> None:
    body = {
        "session_id": await client.begin(),
        "custom_loss_seq_id": 0,
        "name": "bad",
        "inputs": [{"name": "logprobs", "rank": 1}],
    }
    nodes = graph_of(lambda logprobs: (logprobs.sum(), {}))
    nodes[1] = {**nodes[1], "op": "call_function", "target": "os.system", "args": ["true"]}
    with refusal(400, "bad: node 'sum_1' calls 'os.system', which no loss may here"):
        await client.call("create_custom_loss", {**body, "graph": {"nodes": nodes}})
    with refusal(400, "graph.format"):
        await client.call("create_custom_loss", {**body, "graph": {"format": 2, "nodes": nodes}})


async def test_data_that_a_graph_cannot_read_are_refused(
    client: TinkerClient, world: TinkerWorld
) -> None:
    model = await client.create()
    loss_id = await created(client, squares, logprobs=1, weights=1, shift=0)
    good = data_of_squares()
    lacking = [datum(FIRST, weights=[1.0] * 4)]
    long = [
        {**good[0], "loss_fn_inputs": {**good[0]["loss_fn_inputs"], "shift": tensor([1.0, 2.0])}}
    ]
    for data, message in (
        (lacking, r"data\.0\.loss_fn_inputs\.shift: none: the loss reads it"),
        (long, r"shift: \[2\]: the loss reads it in the shape \[\]"),
        ([datum([5, 6], [[6, 9], [7, 10]])], "the loss takes logprobs of rank 1"),
    ):
        with refusal(400, message):
            await gradient(model, data, loss_id)
    with refusal(400, "loss_id: .*other.*: this session has none of that id"):
        await gradient(model, good, "other")
    async with world.client() as stranger:
        theirs = await stranger.create()
        with refusal(400, "this session has none of that id"):
            await gradient(theirs, good, loss_id)

    def reaching(logprobs: Any, weights: Any, shift: Any) -> Any:
        return (logprobs[:3] * weights).sum(), {}

    wrong = await created(client, reaching, 1, logprobs=1, weights=1, shift=0)
    with refusal("user", "node 'mul' of the loss, operator.mul: The size of tensor a"):
        await gradient(model, good, wrong)
    # Calls behind one that failed go on.
    await gradient(model, good, loss_id)
    await model.step()
