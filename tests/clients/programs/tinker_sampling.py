"""Samples and log-probs with Tinker's SDK: tinker_sampling.py WHAT prints what it saw as JSON."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import tinker
from tinker import types
from tinker_recorder import base_of, datum, prompt, recorded

TOKENS = [5, 60, 170, 8]
PARAMS = types.SamplingParams(max_tokens=12, temperature=1.0, seed=3)
GREEDY = types.SamplingParams(max_tokens=6, temperature=0.0)


def samples(service: Any) -> dict[str, Any]:
    """Samples of a model in training, of saved weights, and of the base."""
    client = _trained(service)
    named = client.save_weights_and_get_sampling_client("named")
    unnamed = client.save_weights_and_get_sampling_client()
    path = client.save_weights_for_sampler("kept", ttl_seconds=3600).result().path
    state = client.save_state("state").result().path
    samplers = {
        "named": named,
        "unnamed": unnamed,
        "path": service.create_sampling_client(model_path=path),
        "path_of_client": client.create_sampling_client(path),
        "state": service.create_sampling_client(model_path=state),
        "base": service.create_sampling_client(base_model=base_of(service)),
    }
    client.forward_backward([datum([7, 7, 7, 7])], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    return {
        "tokens": {name: _tokens(sampler) for name, sampler in samplers.items()},
        "later": _tokens(client.save_weights_and_get_sampling_client()),
        "unseeded": _unseeded(named),
    }


def scores(service: Any) -> dict[str, Any]:
    """Log-probs of prompts, and the likeliest tokens."""
    sampler = _trained(service).save_weights_and_get_sampling_client()
    (sequence,) = sampler.sample(prompt(TOKENS), 1, PARAMS).result().sequences
    whole = [*TOKENS, *sequence.tokens]
    made = sampler.sample(
        prompt(whole), 1, GREEDY, include_prompt_logprobs=True, topk_prompt_logprobs=3
    ).result()
    (greedy,) = sampler.sample(prompt(TOKENS), 1, GREEDY).result().sequences
    after = sampler.sample(
        prompt([*TOKENS, *greedy.tokens]),
        1,
        GREEDY,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=1,
    ).result()
    stop = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[greedy.tokens[2]])
    (stopped,) = sampler.sample(prompt(TOKENS), 1, stop).result().sequences
    return {
        "sampled": list(sequence.logprobs or []),
        "computed": sampler.compute_logprobs(prompt(whole)).result(),
        "last": sampler.compute_logprobs(prompt(whole), prompt_logprobs_last_n=2).result(),
        "prompt_logprobs": [_number(one) for one in made.prompt_logprobs],
        "top": made.topk_prompt_logprobs,
        "greedy": list(greedy.tokens),
        "likeliest": [place and place[0][0] for place in after.topk_prompt_logprobs][-6:],
        "stopped": [list(stopped.tokens), stopped.stop_reason],
        "reasons": [sequence.stop_reason, greedy.stop_reason],
    }


def handles(service: Any) -> dict[str, Any]:
    """What a sampling client is besides: copies, handles, its base, its tokenizer."""
    base = base_of(service)
    client = _trained(service)
    sampler = client.save_weights_and_get_sampling_client()
    shared = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle())
    path = client.save_weights_for_sampler("same").result().path
    copied = copy.copy(sampler)  # by its pickled form
    made = tinker.SamplingClient.create(service.holder, base_model=base).result()
    return {
        "bases": [one.get_base_model() for one in (sampler, shared, copied, made)],
        "base": base,
        "tokens": [_tokens(one) for one in (sampler, shared, copied)],
        "loaded": _tokens(service.create_sampling_client(model_path=path)),
        # From a folder of the base's name where the program runs.
        "text": sampler.get_tokenizer().decode(TOKENS),
        "telemetry": sampler.get_telemetry() is None,
    }


def asynchronous(service: Any) -> dict[str, Any]:
    """All that there is for programs with an event loop."""
    return asyncio.run(_asynchronous(service))


async def _asynchronous(service: Any) -> dict[str, Any]:
    base = (await service.get_server_capabilities_async()).supported_models[0].model_name
    client = await service.create_lora_training_client_async(base_model=base, rank=4, seed=1)
    path = (await (await client.save_weights_for_sampler_async("kept"))).path
    samplers = [
        await client.save_weights_and_get_sampling_client_async(),
        await client.create_sampling_client_async(path),
        await service.create_sampling_client_async(model_path=path),
        await service.create_sampling_client_async(base_model=base),
    ]
    made = [await one.sample_async(prompt(TOKENS), 2, PARAMS) for one in samplers]
    # As many programs do it: all are sent before the first is waited for.
    futures = [samplers[0].sample(prompt([5, number]), 2, PARAMS) for number in range(24)]
    many = await asyncio.gather(*(future.result_async() for future in futures))
    return {
        "tokens": [[list(one.tokens) for one in each.sequences] for each in made],
        "scores": await samplers[0].compute_logprobs_async(prompt(TOKENS)),
        "base": [base, await samplers[0].get_base_model_async()],
        "num_samples": sum(len(each.sequences) for each in many),
        "future": futures[0].future().result().sequences[0].stop_reason,
        "coroutine": (await futures[1].coroutine()).sequences[0].stop_reason,
    }


def _trained(service: Any) -> Any:
    client = service.create_lora_training_client(base_model=base_of(service), rank=4, seed=1)
    for _ in range(3):
        client.forward_backward([datum([5, 60, 170, 8, 290, 10, 400])], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2))
    return client


def _tokens(sampler: Any) -> list[list[int]]:
    return [
        list(one.tokens) for one in sampler.sample(prompt(TOKENS), 2, PARAMS).result().sequences
    ]


def _unseeded(sampler: Any) -> list[list[int]]:
    free = types.SamplingParams(max_tokens=12)
    futures = [sampler.sample(prompt(TOKENS), 4, free) for _ in range(2)]
    return [list(one.tokens) for each in futures for one in each.result().sequences]


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


WHATS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "samples": samples,
    "scores": scores,
    "handles": handles,
    "asynchronous": asynchronous,
}

if __name__ == "__main__":
    with tinker.ServiceClient() as client, recorded() as called:
        saw = WHATS[sys.argv[1]](client)
    print(json.dumps({**saw, "called": sorted(called)}))
