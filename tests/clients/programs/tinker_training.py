"""Training with Tinker's SDK: tinker_training.py WHAT prints what it saw as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tinker
from tinker import types
from tinker_recorder import base_of, datum, logprobs, recorded

RATE = types.AdamParams(learning_rate=1e-2)
STEPS = 30
TEXTS = [[5, 60, 170, 8, 290, 10, 400, 33, 21, 7], [9, 81, 7, 256, 5, 311, 12, 77]]
DATA = [datum(text, weights=[1.0] * (len(text) - 1)) for text in TEXTS]
BETA = 0.1


def supervised(service: Any) -> dict[str, Any]:
    """Two texts, learned by heart."""
    client = _created(service)
    losses = []
    for _ in range(STEPS):
        gradient = client.forward_backward(DATA, "cross_entropy")
        step = client.optim_step(RATE)
        losses.append(gradient.result().metrics["loss:sum"])
        norm = step.result().metrics["grad_norm"]
    info = client.get_info()
    return {
        "num_tokens": sum(len(text) - 1 for text in TEXTS),
        "losses": losses,
        "grad_norm": norm,
        "info": [info.model_name, info.is_lora, info.lora_rank],
        "tokenizer": client.get_tokenizer().decode(TEXTS[0]),
        "console": client.get_console_url(),
        "telemetry": client.get_telemetry() is None,
    }


def losses(service: Any) -> dict[str, Any]:
    """Each loss, as it is reported and by its formula from the log-probs that came with it."""
    client = _created(service)
    p = [np.array(one) for one in logprobs(client.forward(DATA, "cross_entropy").result())]
    noise = np.random.default_rng(1)
    q = [one + noise.uniform(-0.5, 0.5, len(one)).astype(np.float32) for one in p]
    advantages = [noise.uniform(-1, 1, len(one)).astype(np.float32) for one in p]
    data = [
        datum(text, logprobs=each.tolist(), advantages=good.tolist())
        for text, each, good in zip(TEXTS, q, advantages, strict=True)
    ]
    bounds = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    formulas = {
        "importance_sampling": (None, lambda r, p, q, a: -r * a),
        "ppo": (bounds, lambda r, p, q, a: -np.minimum(r * a, np.clip(r, 0.9, 1.1) * a)),
        "cispo": (bounds, lambda r, p, q, a: -np.clip(r, 0.9, 1.1) * p * a),
        "gspo": (None, lambda r, p, q, a: -_clipped(np.exp((p - q).mean()), a)),
        "dro": ({"beta": BETA}, lambda r, p, q, a: -p * a + BETA / 2 * (p - q) ** 2),
    }
    seen = {}
    for name, (config, formula) in formulas.items():
        made = client.forward(data, name, config).result()
        terms = [
            formula(np.exp(x - y), x, y, a).sum() for x, y, a in zip(p, q, advantages, strict=True)
        ]
        seen[name] = [made.metrics["loss:sum"], float(sum(terms))]
    two = np.stack([DATA[0].loss_fn_inputs["target_tokens"].data, [3] * (len(TEXTS[0]) - 1)], 1)
    wide = types.Datum(
        model_input=DATA[0].model_input,
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(two.astype(np.int64)),
            "weights": types.TensorData.from_numpy(np.full(two.shape, 0.5, dtype=np.float32)),
        },
    )
    made = client.forward_backward([wide], "cross_entropy").result()
    each = np.array(dict(made.loss_fn_outputs[0])["logprobs"].data).reshape(two.shape)
    seen["two targets"] = [made.metrics["loss:sum"], float(-each.sum() / 2)]
    seen["own"] = [float(each[:, 0].sum()), float(p[0].sum())]
    return seen


def resumed(service: Any) -> dict[str, Any]:
    """Goes on from saved weights, with and without the optimizer, in new clients and in one."""
    client = _created(service)
    _train(client, 3)
    path = client.save_state("third", ttl_seconds=3600, user_metadata={"step": "3"}).result().path
    saved = _scores(client)
    _train(client, 2)
    whole = service.create_training_client_from_state_with_optimizer(path)
    seen = {"path": path, "saved": saved, "went_on": _scores(client), "found": _scores(whole)}
    _train(whole, 2)
    fresh = service.create_training_client_from_state(path)
    seen |= {"resumed": _scores(whole), "fresh_found": _scores(fresh)}
    _train(fresh, 2)
    client.load_state_with_optimizer(path).result()
    _train(client, 2)
    seen |= {"fresh": _scores(fresh), "loaded": _scores(client)}
    client.load_state(path).result()
    seen["loaded_fresh"] = _scores(client)
    return seen


def asynchronous(service: Any) -> dict[str, Any]:
    """All that there is for programs with an event loop."""
    return asyncio.run(_asynchronous(service))


async def _asynchronous(service: Any) -> dict[str, Any]:
    capabilities = await service.get_server_capabilities_async()
    base = capabilities.supported_models[0].model_name
    client = await service.create_lora_training_client_async(base_model=base, rank=4, seed=1)
    first = logprobs(await (await client.forward_async(DATA, "cross_entropy")).result_async())
    gradient = await client.forward_backward_async(DATA, "cross_entropy")
    step = await client.optim_step_async(RATE)
    loss = (await gradient).metrics["loss:sum"]
    await step
    path = (await (await client.save_state_async("one"))).path
    scores = logprobs(await client.forward(DATA, "cross_entropy"))
    whole = await service.create_training_client_from_state_with_optimizer_async(path)
    fresh = await service.create_training_client_from_state_async(path)
    await (await client.load_state_with_optimizer_async(path))
    await (await client.load_state_async(path))
    again = [logprobs(await one.forward(DATA, "cross_entropy")) for one in (whole, fresh, client)]
    info = await client.get_info_async()
    return {
        "first": first,
        "loss": loss,
        "scores": scores,
        "again": again,
        "rank": info.lora_rank,
    }


def custom(service: Any) -> dict[str, Any]:
    """A loss of the client's own, as a function and traced; this needs torch."""
    client = _created(service)

    def squares(data: Any, found: Any) -> Any:
        loss = sum(((one + 1.0) ** 2).sum() for one in found)
        return loss, {"squares": float(loss)}

    def traced(logprobs: Any, weights: Any) -> Any:
        return ((logprobs + 1.0) ** 2 * weights).sum(), {}

    handle = service.create_custom_loss(traced, {"logprobs": 1, "weights": 1}).result()
    seen = []
    for loss in [squares] * 10 + [handle] * 10:
        made = client.forward_backward_custom(DATA, loss)
        client.optim_step(RATE).result()
        seen.append(sum((x + 1) ** 2 for one in logprobs(made.result()) for x in one))
    return {"losses": seen, **asyncio.run(_custom(client, squares))}


async def _custom(client: Any, loss: Any) -> dict[str, Any]:
    made = await (await client.forward_backward_custom_async(DATA, loss))
    return {"metric": made.metrics["squares"], "scores": logprobs(made)}


def _created(service: Any) -> Any:
    return service.create_lora_training_client(base_model=base_of(service), rank=4, seed=1)


def _train(client: Any, steps: int) -> None:
    for _ in range(steps):
        client.forward_backward(DATA, "cross_entropy")
        client.optim_step(RATE).result()


def _scores(client: Any) -> list[list[float]]:
    return logprobs(client.forward(DATA, "cross_entropy").result())


def _clipped(ratio: Any, advantages: Any) -> Any:
    return np.minimum(ratio * advantages, np.clip(ratio, 1 - 3e-4, 1 + 4e-4) * advantages)


WHATS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "supervised": supervised,
    "losses": losses,
    "resumed": resumed,
    "asynchronous": asynchronous,
    "custom": custom,
}

if __name__ == "__main__":
    # Its models end with the block; otherwise they keep their places for five minutes.
    with tinker.ServiceClient() as client, recorded() as called:
        saw = WHATS[sys.argv[1]](client)
    print(json.dumps({**saw, "called": sorted(called)}))
