"""Tests of what roles over several ranks refuse; they stay fit for another run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf import json_format, struct_pb2
from support.layout_services import Start, layout_services
from support.mesh_runs import CliRun, tiny_model, tiny_recipe
from support.services import operation_key
from support.tiny_models import VOCAB_SIZE, tiny_tokenizer, write_tiny_classifier, write_tiny_llama
from transformers import GPT2Config, GPT2LMHeadModel

from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.errors import InvalidRequestError, PreconditionError
from rolemesh.v1 import reward_pb2, reward_pb2_grpc, worker_pb2, worker_pb2_grpc

RUN_S = 300
"""A run that is refused ends as soon as its services have started, on a busy machine too."""

BAD_INPUT = 2
"""Exit code of the command line."""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    with layout_services(tmp_path_factory) as begin:
        yield begin


@pytest.fixture(scope="module")
def critic(start: Start) -> str:
    return start("critic", "tp=2")


@pytest.fixture(scope="module")
def strange_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a family whose parameters have no plan."""
    folder = tmp_path_factory.mktemp("model") / "gpt2"
    config = GPT2Config(vocab_size=VOCAB_SIZE, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


async def initialize(address: str, epoch: int, device_type: str = "", **spec: Any) -> None:
    async with open_channel(address) as channel:
        async for _ in worker_pb2_grpc.WorkerServiceStub(channel).Initialize(
            worker_pb2.InitializeRequest(
                key=operation_key("initialize", epoch=epoch),
                spec=json_format.ParseDict(spec, struct_pb2.Struct()),
                device_type=device_type,
            )
        ):
            pass


async def test_a_family_without_a_plan_is_refused_by_name(critic: str, strange_model: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"model_type is 'gpt2'.*give") as caught:
        await initialize(critic, 1, model={"path": str(strange_model)}, train={"tp": 2})
    assert caught.value.reason == "SPEC_INVALID"


async def test_a_layout_that_does_not_divide_the_model_is_refused(
    critic: str, tmp_path: Path
) -> None:
    odd = write_tiny_llama(tmp_path / "odd", num_heads=1, num_kv_heads=1)
    with pytest.raises(InvalidRequestError, match=r"tp.* 2.* 1") as caught:
        await initialize(critic, 2, model={"path": str(odd)}, train={"tp": 2})
    assert caught.value.reason == "SPEC_INVALID"


async def test_another_layout_than_the_services_is_refused_and_the_next_run_is_served(
    critic: str, tmp_path: Path
) -> None:
    model = {"path": str(write_tiny_llama(tmp_path / "tiny"))}
    with pytest.raises(InvalidRequestError) as caught:
        await initialize(critic, 3, model=model, train={"dp": 2})
    assert caught.value.reason == "LAYOUT_MISMATCH"
    assert caught.value.message == (
        "the run asks the critic for the layout pp=1,tp=1,dp=2,fsdp=2,order=tp-pp-dp, but the "
        "service was started for pp=1,tp=2,dp=1,fsdp=1,order=tp-pp-dp: start it with the layout of "
        "the run (--layout), or change that of the recipe"
    )
    await initialize(critic, 4, model=model, train={"tp": 2})


@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks would see the GPU")
async def test_a_run_that_asks_for_gpus_is_refused_without_one_and_the_next_is_served(
    critic: str, tmp_path: Path
) -> None:
    model = {"path": str(write_tiny_llama(tmp_path / "tiny"))}
    with pytest.raises(PreconditionError, match=r"shows this service none: torch .*CPU") as caught:
        await initialize(critic, 5, "cuda", model=model, train={"tp": 2})
    assert caught.value.reason == "DEVICE_MISSING"
    await initialize(critic, 6, model=model, train={"tp": 2})


async def test_rewards_of_rows_sent_inline_come_out_of_the_last_stage(
    start: Start, tmp_path: Path
) -> None:
    judge = write_tiny_classifier(tmp_path / "judge", seed=4)
    source = {"type": "classifier", "model": {"path": str(judge)}}
    rows = [
        reward_pb2.Trajectory(prompt="1 + 1", completion=f"= {n}", completion_tokens=[n])
        for n in range(3)
    ]
    rewards = []
    for layout in ({"pp": 2}, {"pp": 1}):
        address = start("reward", f"pp={layout['pp']}")
        await initialize(address, 1, source=source, layout=layout)
        async with open_channel(address) as channel:
            async for message in reward_pb2_grpc.RewardServiceStub(channel).ComputeReward(
                reward_pb2.ComputeRewardRequest(
                    key=operation_key("reward"),
                    trajectories=reward_pb2.TrajectoryBatch(trajectories=rows),
                )
            ):
                if message.WhichOneof("event") != "progress":
                    rewards.append(list(message.rewards.rewards))
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-6)
    assert len(rewards[0]) == 3


def test_a_run_whose_model_cannot_be_spread_ends_with_one_clear_line(
    strange_model: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(
        tiny_model(tmp_path / "tiny"),
        reference__model={"path": str(strange_model)},
        reference__layout={"dp": 2},
    )
    run = CliRun(recipe, tmp_path)
    try:
        assert run.wait(RUN_S) == BAD_INPUT
        (line,) = [line for line in run.stderr.splitlines() if line.startswith("error:")]
        assert "reference" in line
        assert "model_type is 'gpt2'" in line
        assert "give the layout pp=1, tp=1, dp=1" in line
        assert "Traceback" not in run.stderr
    finally:
        run.close()
