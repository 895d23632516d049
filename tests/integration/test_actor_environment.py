"""An actor whose policy talks to an environment: through Initialize, Generate and the reward."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf import json_format, struct_pb2
from support.episode_checks import OWN
from support.service_calls import pulled
from support.services import assert_same, make_experience, operation_key, serving
from support.tiny_models import tiny_tokenizer, write_tiny_llama

from rolemesh.engine.experience import Experience
from rolemesh.engine.sandbox.host import find_sandbox
from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import InvalidRequestError, PreconditionError, RolemeshError
from rolemesh.services.actor.servicers import ActorRole
from rolemesh.services.reward.servicers import RewardRole
from rolemesh.services.runtime.calls.runtime import Runtime
from rolemesh.v1 import (
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "chat_environment.py"

FAILS = """

class Fails(Nods):
    def step(self, completion_text):
        raise OSError("the tool is out of order")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    write_tiny_llama(folder / "model", seed=4)
    rows = [json.dumps({"prompt": f"count to {n}", "answer": str(n)}) for n in range(4)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "own.py").write_text(OWN + FAILS)
    return folder


@asynccontextmanager
async def actor(
    folder: Path, environment: str | dict[str, Any]
) -> AsyncIterator[tuple[MeshChannel, Runtime]]:
    if isinstance(environment, str):
        environment = {"environment": f"{folder / 'own.py'}:{environment}"}
    spec = {
        "model": {"path": str(folder / "model"), "compute_dtype": "float32"},
        "rollout": {"type": "hf", "max_model_len": 256},
        "data": {"type": "jsonl", "path": str(folder / "rows.jsonl")},
        "environment": {"type": "python", **environment},
    }
    async with (
        serving(ActorRole()) as server,
        open_channel(server.runtime.address) as channel,
    ):
        await initialize(channel, spec)
        yield channel, server.runtime


async def initialize(channel: MeshChannel, spec: dict[str, Any]) -> None:
    await channel.channel_ready()
    request = worker_pb2.InitializeRequest(
        key=operation_key("initialize"),
        spec=json_format.ParseDict(spec, struct_pb2.Struct()),
        run_seed=3,
    )
    await last(worker_pb2_grpc.WorkerServiceStub(channel).Initialize(request))


async def last(call: Any) -> Any:
    messages = [message async for message in call]
    return messages[-1].result


def generate(channel: MeshChannel, block_rows: int = 0, max_new_tokens: int = 48) -> Any:
    request = rollout_pb2.GenerateRequest(
        key=operation_key("generate", sequence=block_rows),
        prompts=rollout_pb2.PromptSlice(split=rollout_pb2.SPLIT_TRAIN, count=4),
        sampling=rollout_pb2.Sampling(
            samples_per_prompt=2, temperature=1, top_p=1, top_k=-1, max_new_tokens=max_new_tokens
        ),
        block_rows=block_rows,
    )
    return rollout_pb2_grpc.RolloutServiceStub(channel).Generate(request)


async def test_rows_are_episodes_and_their_rewards_reach_the_reward_role(folder: Path) -> None:
    async with (
        actor(folder, "Nods") as (channel, runtime),
        serving(RewardRole()) as judge,
        open_channel(judge.runtime.address) as reward_channel,
    ):
        assert isinstance(runtime.role, ActorRole)
        assert runtime.role.source.facts["environment.sandbox"] == str(find_sandbox("auto"))
        await initialize(reward_channel, {"source": {"type": "environment"}})
        result = await last(generate(channel))
        batch = await pulled(runtime, result.experience)
        request = reward_pb2.ComputeRewardRequest(
            key=operation_key("reward"), experience=result.experience
        )
        judged = await last(
            reward_pb2_grpc.RewardServiceStub(reward_channel).ComputeReward(request)
        )
        rewards = (await pulled(runtime, judged.experience))["rewards"].values

        streamed = [message async for message in generate(channel, block_rows=4)]
        blocks = {m.block.index: m.block for m in streamed if m.WhichOneof("event") == "block"}
        parts = [await pulled(runtime, blocks[index].experience) for index in (0, 1)]
    assert_same(Experience.concat(parts), batch)
    assert torch.equal(rewards, batch["environment_rewards"].values)
    greeting = tiny_tokenizer()(" hello")["input_ids"]
    for mask, text in zip(
        batch["loss_mask"].rows(), batch["completion_text"].strings(), strict=True
    ):
        assert text.startswith(" hello")
        assert not mask[: len(greeting)].any()
        assert mask[len(greeting)]
    sampled = batch["logprobs"].values[batch["loss_mask"].values].double().mean()
    assert result.report.metrics["sampler_logprob/mean"] == pytest.approx(float(sampled))


async def test_the_chat_example_plays_over_a_model(folder: Path) -> None:
    environment = {"environment": f"{EXAMPLE}:Guess", "max_turn_tokens": 6, "max_turns": 3}
    async with actor(folder, environment) as (channel, runtime):
        result = await last(generate(channel, max_new_tokens=180))
        batch = await pulled(runtime, result.experience)
    tokenizer = tiny_tokenizer()
    opening = "\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    hints = ("More.", "Less.", "That is no number.", "You were cut off: answer with one number.")
    said = {f"{opening[0]}{hint}{opening[1]}" for hint in hints}
    num_cut = 0
    for row, prompt_length in enumerate(batch["prompt_lengths"].values.tolist()):
        one = batch.slice(row, row + 1)
        tokens, own = one["tokens"].values[prompt_length:], one["loss_mask"].values
        borders = [0, *(torch.nonzero(own[1:] != own[:-1]).flatten() + 1).tolist(), len(tokens)]
        parts = [tokens[a:b] for a, b in itertools.pairwise(borders)]
        turns, between = parts[0::2], parts[1::2]
        assert 1 <= len(turns) <= 3
        assert len(between) == len(turns) - 1
        for turn, answer in zip(turns, between, strict=False):
            is_closed = int(turn[-1]) == tokenizer.eos_token_id
            assert is_closed or len(turn) == 6
            end = "" if is_closed else "<|im_end|>"
            assert tokenizer.decode(answer).removeprefix(end) in said
            assert is_closed == (not tokenizer.decode(answer).startswith("<|im_end|>"))
            assert is_closed or "You were cut off" in tokenizer.decode(answer)
            num_cut += not is_closed
    assert num_cut, "a random model is cut, mostly"


async def test_an_environment_that_fails_is_told_to_the_caller(folder: Path) -> None:
    async with actor(folder, "Fails") as (channel, _):
        with pytest.raises(
            PreconditionError, match=r"Fails failed for prompt \d, row \d, turn 0: OSError"
        ) as caught:
            await last(generate(channel))
    assert caught.value.reason == "ENVIRONMENT_FAILED"


async def test_a_class_that_is_not_there_is_told_at_initialize(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="has no 'NoSuch'") as caught:
        async with actor(folder, "NoSuch"):
            pass
    assert caught.value.reason == "USER_CODE_INVALID"


async def test_a_reward_of_an_environment_that_is_not_there_names_the_column(folder: Path) -> None:
    async with serving(RewardRole()) as judge, open_channel(judge.runtime.address) as channel:
        await initialize(channel, {"source": {"type": "environment"}})
        request = reward_pb2.ComputeRewardRequest(
            key=operation_key("reward"),
            experience=judge.runtime.publish(operation_key(), make_experience(3)),
        )
        with pytest.raises(RolemeshError, match="column 'environment_rewards' is missing"):
            await last(reward_pb2_grpc.RewardServiceStub(channel).ComputeReward(request))
