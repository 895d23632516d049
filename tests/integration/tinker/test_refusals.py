"""What a server of Tinker's protocol refuses, and what it says of it."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
from support.tinker_servers import (
    LONGEST,
    MOST_RANK,
    NAME,
    TinkerClient,
    TinkerModel,
    TinkerWorld,
    datum,
    model_input,
    refusal,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = [5, 6, 7, 8]
PICTURE = {"type": "image", "data": "AAAA", "format": "png"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"base": "Qwen/Qwen3-8B"}, f"base_model: Qwen/Qwen3-8B: this server has {NAME}"),
        ({"rank": MOST_RANK + 1}, rf"lora_config\.rank: 9: this server takes {MOST_RANK} at most"),
        ({"rank": 0}, "give 1 or more, or start it with --whole"),
        ({"seed": -1}, r"lora_config\.seed: "),
        ({"train_attn": False, "train_mlp": False}, "one of them must be true"),
    ],
)
async def test_models_that_cannot_be_are_refused(
    client: TinkerClient, wrong: dict[str, Any], message: str
) -> None:
    with refusal(400, message):
        await client.create(**wrong)


async def test_another_optimizer_is_refused(client: TinkerClient) -> None:
    body = {
        "session_id": await client.begin(),
        "model_seq_id": 0,
        "base_model": NAME,
        "lora_config": {"rank": 2},
        "optimizer_config": {"type": "dimuon", "version": 1},
    }
    load = {**body, "path": "tinker://none/weights/none"}
    for route, asked in (("create_model", body), ("load_weights", load)):
        with refusal(400, r"optimizer_config\.type is 'dimuon'"):
            await client.call(route, asked)


async def test_a_model_whose_weights_are_lost_says_so(client: TinkerClient) -> None:
    model = await client.create()
    await model.gradient([datum([5, 6, 7])])
    await model.step(learning_rate=1e38)
    with refusal("user", "loss is nan.*or weights that are not finite"):
        await model.gradient([datum([5, 6, 7])])
    with refusal("user", "nothing can be sampled: go back to weights that were saved"):
        await client.sample(await model.sampler(), [5, 6])


async def test_data_that_cannot_be_are_refused(client: TinkerClient) -> None:
    model = await client.create()
    with_picture = {**datum([5, 6]), "model_input": {"chunks": [PICTURE]}}
    too_long = [datum([5] * LONGEST, [5] * LONGEST)]
    wrong: list[tuple[list[dict[str, Any]], str, str]] = [
        (too_long, "cross_entropy", rf"data\.0\.model_input: {LONGEST} tokens: .*shorten it"),
        ([datum([5, 6], weights=[np.nan])], "cross_entropy", r"weights: NaN or infinite"),
        ([datum([5, 6], weights=[np.inf])], "cross_entropy", r"weights: NaN or infinite"),
        ([datum([5, 6])], "mse", "loss_fn: mse: no such loss is known here: give one of cross_"),
        ([datum([5, 6])], "stable_reinforce", "stable_reinforce: its definition is not public"),
        ([datum([5, 6])], "ppo", "logprobs: none: the loss ppo needs it"),
        ([with_picture], "cross_entropy", "image: this server trains and samples text alone"),
        ([], "cross_entropy", "data: 0 data: send 1 to"),
    ]
    for data, loss, message in wrong:
        for made in (model.gradient, model.forward):
            with refusal(400, message):
                await made(data, loss)
    # The longest that fits.
    (told,) = (await model.forward([datum([5] * LONGEST)]))["loss_fn_outputs"]
    assert told["logprobs"]["shape"] == [LONGEST - 1]


async def test_tokens_that_the_model_lacks_are_refused(client: TinkerClient) -> None:
    model = await client.create()
    for data in (datum([5, 512, 6]), datum([5, 6, 7], [6, 512, 3])):
        with refusal("user", "token 512, .*vocabulary has 512"):
            await model.gradient([data])
    sampler = await model.sampler()
    with refusal("user", "token 512 is none of the model's"):
        await client.sample(sampler, [5, 512])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"stop": []}, r"sampling_params\.stop: \[\]: a sample always ends at the end of a turn"),
        ({"prompt": {"chunks": [PICTURE]}}, "image: this server trains and samples text alone"),
        ({"prompt": model_input([5] * LONGEST)}, f"prompt: {LONGEST} tokens: .*shorten it"),
        ({"topk_prompt_logprobs": 2000}, "topk_prompt_logprobs: 2000: give 1024"),
        ({"topk_sample_logprobs": 2}, "topk_sample_logprobs: 2: this is not served"),
        ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k: 1: this is not served"),
        ({"temperature": -1}, r"sampling_params\.temperature: -1\.0: give 0 or more"),
        ({"num_samples": 0}, "num_samples: 0: give a whole number from 1"),
        ({"max_tokens": 0}, r"sampling_params\.max_tokens: 0"),
        ({"beam_width": 3}, "this server does not know the field"),
    ],
    ids=lambda wrong: next(iter(wrong)) if isinstance(wrong, dict) else None,
)
async def test_samples_that_cannot_be_are_refused(
    client: TinkerClient, wrong: dict[str, Any], message: str
) -> None:
    body = client.sample_body(await client.sampler(base_model=NAME), TOKENS)
    for name, value in wrong.items():
        of_params = name in ("stop", "temperature", "max_tokens")
        (body["sampling_params"] if of_params else body)[name] = value
    with refusal(400, message):
        await client.call("asample", body)


async def test_what_there_is_not_is_not_found(client: TinkerClient) -> None:
    session_id, none = await client.begin(), f"{client.session_id}:train:7"
    nobody = TinkerModel(client, none)
    path = f"tinker://{none}/weights/none"
    of_session = {"session_id": session_id, "sampling_session_seq_id": 1}
    calls: list[tuple[str, dict[str, Any], str]] = [
        ("forward_backward", nobody.gradient_body([datum(TOKENS)]), "model .*: there is none: cre"),
        ("optim_step", nobody.numbered(adam_params={}), "model .*: there is none"),
        ("save_weights", nobody.numbered(path="a"), "model .*: there is none"),
        ("get_info", {"model_id": none}, "model .*: there is none"),
        ("unload_model", {"model_id": none}, "model .*: there is none"),
        ("weights_info", {"tinker_path": path}, f"{path}: there are no such weights"),
        ("load_weights", {"session_id": session_id, "model_seq_id": 1, "path": path}, path),
        ("create_sampling_session", {**of_session, "model_path": path}, path),
        ("asample", client.sample_body(f"{session_id}:sample:77", TOKENS), "sampling session .*"),
        ("asample", client.sample_body("none", TOKENS), "session 'none': there is none"),
        ("sessions/none/finish", {}, "session 'none': there is none, or it has ended"),
    ]
    for route, body, message in calls:
        with refusal(404, message):
            await client.call(route, body)
    with refusal(410, "request_id 'none': there is none"):
        await client.call("retrieve_future", {"request_id": "none"})
    with refusal(410):
        await client.call("session_heartbeat", {"session_id": "none"})


@pytest.mark.parametrize(
    "body",
    ["{", "[1]", "7", "", "[" * 100_000, '{"model_id": 1}', b"\xff"],
    ids=lambda one: one[:3],
)
async def test_bodies_that_are_none_are_refused(world: TinkerWorld, body: str | bytes) -> None:
    transport = httpx.ASGITransport(world.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://tinker/api/v1/") as http:
        for route in ("create_model", "forward_backward", "asample", "optim_step", "load_weights"):
            response = await http.post(route, content=body)
            assert response.status_code == 400, (route, response.text)
            assert response.json()["error"]


async def test_numbers_that_json_has_not_are_a_failure(
    client: TinkerClient, world: TinkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await client.create()
    step = world.server.model("local", model.model_id).trained

    async def infinite(*_: Any) -> dict[str, float]:
        return {"grad_norm": float("inf")}

    monkeypatch.setattr(step, "step", infinite)
    with refusal("user", r"JSON"):
        await model.step()
