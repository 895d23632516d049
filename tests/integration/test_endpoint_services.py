"""An actor that serves an endpoint beside its steps. Loads two engines, in turn."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support.endpoints import PATIENCE_S, wait_until
from support.in_flight_checks import at_steps
from support.mesh_runs import tiny_model
from support.rollout_services import Caller, rows_of
from support.services import assert_same, serving

from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.services.actor.servicers import ActorRole

ASK = {"model": "policy", "prompt": "a", "max_tokens": 4, "ignore_eos": True}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


async def initialized(caller: Caller, folder: Path, **more: Any) -> dict[str, str]:
    result = await caller.initialize(
        model={"path": str(folder), "compute_dtype": "float32"},
        optimizer={"learning_rate": 1e-2},
        **{
            "rollout": {
                "type": "vllm",
                "dtype": "float32",
                "max_model_len": 256,
                "max_num_seqs": 16,
            },
            **more,
        },
    )
    return dict(result.facts)


async def versions_of_a_call(client: httpx.AsyncClient) -> set[int]:
    """Of the weights that sample a call now."""
    place = f"/sessions/{(await client.post('/sessions', json={})).json()['session_id']}"
    assert (await client.post(f"{place}/v1/completions", json=ASK)).status_code == 200
    (call,) = (await client.get(place)).json()["calls"]
    assert len(call["sampled_tokens"]) == 4
    return set(call["policy_versions"])


async def test_an_actor_answers_when_idle_during_generate_and_after_training(folder: Path) -> None:
    role = ActorRole()
    async with serving(role) as server:
        caller = Caller(server.runtime.address)
        facts = await initialized(caller, folder, endpoint={})
        assert role.endpoint is not None
        calls = role.endpoint._calls
        url = facts["endpoint"]
        assert url == role.endpoint.url
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            # Idle, before any step: the first weights are brought by the call itself.
            assert await versions_of_a_call(client) == {0}
            first = await rows_of((await caller.generate(0)).experience)

            # In the middle of a generation, which waits for its answer.
            loop, asked = asyncio.get_running_loop(), list[asyncio.Future[Any]]()

            def ask() -> None:
                asked.append(
                    asyncio.run_coroutine_threadsafe(versions_of_a_call(client), loop)  # type: ignore[arg-type]
                )
                wait_until(lambda: not calls.is_empty)

            def hear() -> None:
                asked[0].result(PATIENCE_S)  # type: ignore[call-arg]

            role.backend.between_steps = at_steps({1: ask, 8: hear})
            beside = await caller.generate(0)
            role.backend.between_steps = None
            assert asked[0].result() == {0}
            rows = await rows_of(beside.experience)
            assert torch.equal(rows["tokens"].values, first["tokens"].values)

            version = await caller.train(beside.experience, version=0)
            assert version > 0
            assert await versions_of_a_call(client) == {version}

            # Asleep: calls wait until it is woken.
            await caller._client.sleep(caller._key("sleep", 0))
            waiting = asyncio.create_task(client.post("/v1/completions", json=ASK))
            await asyncio.to_thread(wait_until, lambda: calls.num_open == 1)
            assert not role.endpoint._may_sample()
            assert not waiting.done()
            await caller._client.wake(caller._key("wake", 0))
            assert (await waiting).status_code == 200
        await caller.channel.close()
    async with httpx.AsyncClient(base_url=url) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
    # The same service without an endpoint: the same tokens and log-probs, to the bit.
    async with serving(ActorRole()) as server:
        caller = Caller(server.runtime.address)
        assert "endpoint" not in await initialized(caller, folder)
        alone = await rows_of((await caller.generate(0)).experience)
        await caller.channel.close()
    assert_same(alone, first)


async def test_an_endpoint_that_cannot_be_served_is_told(folder: Path) -> None:
    for given, told in (
        ({"endpoint": {}, "rollout": {"type": "hf", "max_model_len": 256}}, "rollout.type is 'hf'"),
        ({"endpoint": {"host": "0.0.0.0"}}, "without certificate and token_variable"),
    ):
        async with serving(ActorRole()) as server:
            caller = Caller(server.runtime.address)
            with pytest.raises(InvalidRequestError, match=told):
                await initialized(caller, folder, **given)
            await caller.channel.close()
