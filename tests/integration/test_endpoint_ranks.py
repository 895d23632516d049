"""An actor of four ranks, two generation replicas of two slices, behind one endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support.agents import write_agents
from support.endpoints import PATIENCE_S
from support.mesh_runs import tiny_model
from support.rollout_services import Caller, process_of, rows_of
from support.services import serving
from transformers import AutoModelForCausalLM

from rolemesh.engine.experience import Experience
from rolemesh.rpc.errors import PreconditionError
from rolemesh.services.actor.servicers import ActorRole

LAYOUT = "tp=2,dp=2,fsdp=1"
LOGPROB = 5e-4
"""What is promised of sampler and trainer in float32."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    tiny_model(folder / "model")
    write_agents(folder)
    return folder


async def initialized(
    caller: Caller, folder: Path, agent: str, **layouts: Any
) -> Mapping[str, str]:
    result = await caller.initialize(
        model={"path": str(folder / "model"), "compute_dtype": "float32"},
        optimizer={"learning_rate": 1e-2},
        rollout={"type": "vllm", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 16},
        environment={"type": "python_agent", "run": f"{folder / 'agents.py'}:{agent}"},
        endpoint={},
        **layouts,
    )
    return dict(result.facts)


async def calls_of_a_session(client: httpx.AsyncClient, number: int) -> list[Any]:
    """A session's calls: one with two completions, and one that streams."""
    place = f"/sessions/{(await client.post('/sessions', json={})).json()['session_id']}"
    ask = {"model": "policy", "prompt": f"{number} is", "max_tokens": 5, "ignore_eos": True}
    answer = await client.post(f"{place}/v1/completions", json={**ask, "n": 2})
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 2
    url = f"{place}/v1/completions"
    async with client.stream("POST", url, json={**ask, "stream": True}) as stream:
        events = [line async for line in stream.aiter_lines() if line]
    assert events[-1] == "data: [DONE]"
    assert len(events) > 3
    calls: list[Any] = (await client.get(place)).json()["calls"]
    assert len(calls) == 3
    return calls


def check_logprobs(folder: Path, calls: list[Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    for call in calls:
        assert call["parent"] is None
        prompt, sampled = call["added_tokens"], call["sampled_tokens"]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(sampled)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(call["logprobs"]), wanted, atol=LOGPROB, rtol=0)


async def test_ranks_sample_for_one_endpoint_as_one_rank_does(folder: Path) -> None:
    async def played(caller: Caller) -> Experience:
        return await rows_of((await caller.generate(0)).experience)

    async with serving(ActorRole()) as server:
        caller = Caller(server.runtime.address)
        await initialized(caller, folder, "run")
        alone = await played(caller)
        await caller.channel.close()

    with process_of("actor", folder, "--layout", LAYOUT) as (address, _):
        caller = Caller(address)
        layouts = {"train": {"tp": 2, "dp": 2, "fsdp": 1}, "generate": {"tp": 2}}
        url = (await initialized(caller, folder, "run", **layouts))["endpoint"]
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            # Between the run's calls: the first of them brings the weights to all ranks.
            sessions = await asyncio.gather(*(calls_of_a_session(client, n) for n in range(6)))
            calls = [call for session in sessions for call in session]
            assert {version for call in calls for version in call["policy_versions"]} == {0}
            check_logprobs(folder, calls)

            # Agents, beside calls from outside.
            result, beside = await asyncio.gather(caller.generate(0), calls_of_a_session(client, 7))
            check_logprobs(folder, beside)
            rows = await rows_of(result.experience)
            assert rows["tokens"].values.tolist() == alone["tokens"].values.tolist()
            assert rows["loss_mask"].values.tolist() == alone["loss_mask"].values.tolist()
            gap = rows["logprobs"].values - alone["logprobs"].values
            assert gap.abs().max() < LOGPROB

            version = await caller.train(result.experience, version=0)
            (call, *_) = await calls_of_a_session(client, 8)
            assert set(call["policy_versions"]) == {version}

        # An agent that fails ends the generation on all ranks alike, and the service goes on.
        url = (await initialized(caller, folder, "wrong", **layouts))["endpoint"]
        with pytest.raises(PreconditionError, match="agent failed for prompt") as failed:
            await caller.generate(0)
        assert failed.value.reason == "ENVIRONMENT_FAILED"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            await calls_of_a_session(client, 9)
        await caller.channel.close()
