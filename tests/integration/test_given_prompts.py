"""Prompts that travel with the call: completed as those that the service holds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.mesh_runs import tiny_model
from support.rollout_services import Caller, rows_of
from support.services import assert_same, operation_key, serving

from rolemesh.engine.experience import Experience
from rolemesh.rpc.errors import InvalidRequestError, RolemeshError
from rolemesh.services.actor.servicers import ActorRole
from rolemesh.v1 import rollout_pb2, rollout_pb2_grpc

SAMPLING = rollout_pb2.Sampling(
    samples_per_prompt=2, temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=12
)
STEP = 3


@pytest.fixture
async def actor(tmp_path: Path) -> AsyncIterator[Caller]:
    async with serving(ActorRole()) as server:
        caller = Caller(server.runtime.address)
        await caller.initialize(
            model={"path": str(tiny_model(tmp_path / "tiny")), "compute_dtype": "float32"},
            optimizer={"learning_rate": 1e-2},
            rollout={"type": "hf", "max_model_len": 256, "max_num_seqs": 16},
        )
        yield caller
        await caller.channel.close()


async def complete(
    actor: Caller, prompts: list[rollout_pb2.GivenPrompt], sequence: int = 0, **changes: Any
) -> Experience:
    request = rollout_pb2.GenerateRequest(
        key=operation_key("given", step=STEP, sequence=sequence),
        given=rollout_pb2.GivenPrompts(prompts=prompts),
        sampling=SAMPLING,
        **changes,
    )
    async for message in rollout_pb2_grpc.RolloutServiceStub(actor.channel).Generate(request):
        result = message.result
    return await rows_of(result.experience)


async def test_given_prompts_are_completed_as_the_same_ones_of_the_data_are(
    actor: Caller,
) -> None:
    own = await rows_of((await actor.generate(STEP, count=4)).experience)
    prompts = []
    for row in range(0, own.num_rows, SAMPLING.samples_per_prompt):
        one = own.slice(row, row + 1)
        prompt_length = int(one["prompt_lengths"].values[0])
        prompts.append(
            rollout_pb2.GivenPrompt(
                prompt_id=int(one["prompt_ids"].values[0]),
                tokens=one["tokens"].values[:prompt_length].tolist(),
                answer=one["answer"].strings()[0],
                metadata_json=one["metadata"].strings()[0],
            )
        )
    # The same ids and step give the same seeds, and those the same tokens.
    assert_same(await complete(actor, prompts), own)


async def test_a_text_is_rendered_by_the_chat_template_of_the_service(actor: Caller) -> None:
    given = rollout_pb2.GivenPrompt(text="What is 2 + 3?", answer="5")
    completed = await complete(actor, [given, given])
    assert "What is 2 + 3?" in completed["prompt_text"].strings()[0]
    assert completed["prompt_text"].strings()[0] != "What is 2 + 3?"
    assert completed["answer"].strings() == ["5"] * 4
    assert completed["metadata"].strings() == ["{}"] * 4
    # Two prompts of one id make one group of four draws, no two of which are the same.
    assert completed["prompt_ids"].values.tolist() == [0] * 4
    assert completed["sample_indexes"].values.tolist() == [0, 1, 2, 3]
    rows = [tuple(row.tolist()) for row in completed["tokens"].rows()]
    assert len(set(rows)) == len(rows)
    as_tokens = rollout_pb2.GivenPrompt(
        tokens=rows[0][: int(completed["prompt_lengths"].values[0])], answer="5"
    )
    again = await complete(actor, [as_tokens, as_tokens], sequence=1)
    assert torch.equal(again["tokens"].values, completed["tokens"].values)


@pytest.mark.parametrize(
    ("prompts", "reason", "says"),
    [
        ([], "SLICE_INVALID", "given.prompts are 0"),
        ([{}], "PROMPT_INVALID", r"given.prompts\[0\]: give either tokens or text"),
        ([{"text": "a"}, {"text": "a", "tokens": [1]}], "PROMPT_INVALID", r"prompts\[1\]"),
        ([{"text": "a", "prompt_id": -1}], "PROMPT_INVALID", "prompt_id is -1"),
        ([{"tokens": [1, 1 << 40]}], "PROMPT_INVALID", f"token {1 << 40} is none of the model's"),
        ([{"tokens": [5] * 256}], "PROMPT_TOO_LONG", "256"),
    ],
)
async def test_a_prompt_that_cannot_be_completed_is_refused_by_name(
    actor: Caller, prompts: list[dict[str, Any]], reason: str, says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says) as refused:
        await complete(actor, [rollout_pb2.GivenPrompt(**prompt) for prompt in prompts])
    assert refused.value.reason == reason


async def test_a_request_with_neither_positions_nor_prompts_is_refused(actor: Caller) -> None:
    request = rollout_pb2.GenerateRequest(key=operation_key("none"), sampling=SAMPLING)
    with pytest.raises(RolemeshError) as refused:
        async for _ in rollout_pb2_grpc.RolloutServiceStub(actor.channel).Generate(request):
            pass
    assert refused.value.reason == "SPLIT_INVALID"
