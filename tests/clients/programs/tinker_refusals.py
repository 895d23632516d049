"""What Tinker's SDK shows of calls that are refused: tinker_refusals.py WHAT, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import tinker
from tinker import types
from tinker_recorder import base_of, datum, prompt, recorded

TEXT = [5, 60, 170, 8]
CALL_S = 60.0


def errors(service: Any) -> dict[str, Any]:
    """What a person does wrong, and that training goes on after it."""
    base = base_of(service)
    client = service.create_lora_training_client(base_model=base, rank=4, seed=1)
    sampler = service.create_sampling_client(base_model=base)
    good = types.SamplingParams(max_tokens=2)
    path = client.save_state("taken").result().path

    def gradient(*tokens: int, loss: str = "cross_entropy", **inputs: list[float]) -> Any:
        return client.forward_backward([datum(tokens, **inputs)], loss)

    calls: dict[str, Callable[[], Any]] = {
        "base": lambda: service.create_lora_training_client(base_model="other").get_info(),
        "rank": lambda: service.create_lora_training_client(base_model=base, rank=4096).get_info(),
        "dimuon": lambda: service.create_lora_training_client(
            base_model=base, optimizer=types.DimuonOptimizerConfig()
        ).get_info(),
        "long": lambda: gradient(*range(1000)),
        "nan": lambda: gradient(*TEXT, weights=[1.0, float("nan"), 1.0]),
        "token": lambda: gradient(5, 10**6, 7),
        "loss": lambda: gradient(*TEXT, loss="stable_reinforce"),
        "input": lambda: gradient(*TEXT, loss="ppo"),
        "rate": lambda: client.optim_step(types.AdamParams(learning_rate=float("nan"))),
        "nothing": lambda: client.optim_step(types.AdamParams()),
        "name": lambda: client.save_state("a/b"),
        "taken": lambda: client.save_state("taken"),
        "path": lambda: service.create_training_client_from_state(path + "-other").get_info(),
        "prompt": lambda: sampler.sample(prompt(range(1000)), 1, good),
        "top": lambda: sampler.sample(prompt(TEXT), 1, good, topk_sample_logprobs=3),
        "sampler_base": lambda: service.create_sampling_client(base_model="other").get_base_model(),
    }
    seen = {name: _error(call) for name, call in calls.items()}
    gradient(*TEXT).result()
    seen["after"] = sorted(client.optim_step(types.AdamParams()).result().metrics)
    return seen


def places(service: Any) -> dict[str, Any]:
    """More models than there are places, and again after a session has ended."""
    base = base_of(service)
    other = tinker.ServiceClient()
    for _ in range(4):
        other.create_lora_training_client(base_model=base, rank=4).get_info()
    refused = _error(
        lambda: service.create_lora_training_client(base_model=base, rank=4).get_info()
    )
    other.close("success").result()
    info = service.create_lora_training_client(base_model=base, rank=4).get_info()
    return {"refused": refused, "rank": info.lora_rank}


def unserved(service: Any) -> dict[str, Any]:
    """Each method that asks for what is not served."""
    client = service.create_lora_training_client(base_model=base_of(service), rank=4).result()
    session = client.get_info().model_id.partition(":")[0]
    rest, admin = service.create_rest_client(), tinker.AdminClient(service.holder)
    period = ("2026-01-01", "2026-02-01")
    arguments: Mapping[Any, Mapping[str, tuple[Any, ...]]] = {
        rest: {
            "export_session_trace": (session,),
            "get_audit_log": (),
            "get_billing_usage": period,
            "get_current_checkpoint_storage_usage": (),
            "whoami": (),
        },
        admin: {
            "get_audit_log": (),
            "get_billing_usage": period,
            "get_current_checkpoint_storage_usage": (),
        },
    }
    seen: dict[str, Any] = {"telemetry": admin.get_telemetry() is None}
    for owner, methods in arguments.items():
        for name, given in methods.items():
            for each in (name, f"{name}_async"):
                method = getattr(owner, each, None)
                if method is not None:
                    key = f"{type(owner).__name__}.{each}"
                    seen[key] = _error(partial(_awaited, method, given))
    return seen


def _awaited(method: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    if not method.__name__.endswith("_async"):
        return method(*given)

    async def wait() -> Any:
        made = await method(*given)
        return await made.result_async() if hasattr(made, "result_async") else made

    return asyncio.run(wait())


def _error(call: Callable[[], Any]) -> list[Any]:
    """Class, text and seconds of the error that a call ends with; an empty list without one."""
    began = time.monotonic()
    try:
        made = call()
        if hasattr(made, "result"):
            made.result(timeout=CALL_S)
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - began]
    return []


WHATS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "errors": errors,
    "places": places,
    "unserved": unserved,
}

if __name__ == "__main__":
    with tinker.ServiceClient() as client, recorded() as called:
        saw = WHATS[sys.argv[1]](client)
    print(json.dumps({**saw, "called": sorted(called)}))
