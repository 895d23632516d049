"""Units of rows and further losses through a critic service: done as asked, or refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format, struct_pb2
from support.family_cases import case_config
from support.services import operation_key, serving
from support.tiny_families import write_tiny_decoder
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import auxiliary_whole, forward_backward, update_whole

from rolemesh.engine.experience import Experience
from rolemesh.engine.seeds import derive_seed
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoValueLossSpec
from rolemesh.engine.train.trainer import Trainer
from rolemesh.rpc.calls.expert_loads import checked_loads
from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.services.critic.servicers import CriticRole
from rolemesh.v1 import (
    experience_pb2,
    trainer_pb2,
    trainer_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

RUN_SEED = 3
BATCH = token_batch()
_ROWS = token_batch(prompt_lengths=(2, 3, 1), completion_lengths=(5, 3, 6), seed=9)
EXTRA = _ROWS | Experience({"logprobs": _ROWS["values"]})
"""Further rows, with what a policy loss would read."""
VALUE_LOSS = trainer_pb2.AlgorithmPart(type="ppo_value")
POLICY_LOSS = trainer_pb2.AlgorithmPart(type="ppo_policy")


@dataclass
class Critic:
    """A service that holds a critic, and two batches that it can pull."""

    stub: Any
    batch: experience_pb2.ExperienceRef
    extra: experience_pb2.ExperienceRef
    model: ModelSpec
    number: int = 0

    def key(self) -> Any:
        self.number += 1
        return operation_key("call", sequence=self.number)

    async def update(self, **fields: Any) -> Any:
        request = trainer_pb2.UpdateRequest(
            **{
                "key": self.key(),
                "experience": self.batch,
                "loss": VALUE_LOSS,
                "epochs": 1,
                "mini_batch_rows": 4,
                **fields,
            }
        )
        return [message async for message in self.stub.Update(request)][-1].result

    async def forward_backward(self, **fields: Any) -> Any:
        request = trainer_pb2.ForwardBackwardRequest(
            **{"key": self.key(), "experience": self.batch, "loss": VALUE_LOSS, **fields}
        )
        return [message async for message in self.stub.ForwardBackward(request)][-1].result


@pytest.fixture
async def critic(tmp_path: Path) -> AsyncIterator[Critic]:
    async with serving_critic(write_tiny_llama(tmp_path / "llama", seed=4)) as found:
        yield found


@asynccontextmanager
async def serving_critic(path: Path) -> AsyncIterator[Critic]:
    model = ModelSpec(path=path, compute_dtype="float32", micro_batch_tokens=24)
    spec = {"model": model.model_dump(mode="json"), "optimizer": {"learning_rate": 1e-3}}
    async with (
        serving(CriticRole()) as server,
        serving() as producer,
        open_channel(server.runtime.address) as channel,
    ):
        await channel.channel_ready()
        found = Critic(
            stub=trainer_pb2_grpc.TrainerServiceStub(channel),
            batch=producer.runtime.publish(operation_key("batch"), BATCH),
            extra=producer.runtime.publish(operation_key("extra"), EXTRA),
            model=model,
        )
        request = worker_pb2.InitializeRequest(
            key=found.key(),
            spec=json_format.ParseDict(spec, struct_pb2.Struct()),
            run_seed=RUN_SEED,
        )
        async for _ in worker_pb2_grpc.WorkerServiceStub(channel).Initialize(request):
            pass
        yield found


async def test_an_update_with_units_and_a_further_loss_is_the_trainers(critic: Critic) -> None:
    auxiliary = [trainer_pb2.AuxiliaryLoss(experience=critic.extra, loss=VALUE_LOSS, weight=0.5)]
    result = await critic.update(rows_per_unit=2, auxiliary=auxiliary)
    trainer = Trainer.critic(critic.model, OptimizerSpec(learning_rate=1e-3))
    expected = update_whole(
        trainer,
        BATCH,
        PpoValueLossSpec(),
        epochs=1,
        mini_batch_rows=4,
        seed=derive_seed(RUN_SEED, operation_key().step, "critic", "update"),
        rows_per_unit=2,
        auxiliary=[auxiliary_whole(EXTRA, PpoValueLossSpec(), 0.5, num_steps=2)],
    )
    assert result.policy_version == 2
    assert list(result.expert_loads) == []
    assert dict(result.report.metrics) == expected
    assert any(name.startswith("auxiliary/ppo_value/") for name in expected)
    assert result.report.num_tokens == BATCH.num_tokens + EXTRA.num_tokens


async def test_a_mixture_tells_how_often_its_experts_were_chosen(tmp_path: Path) -> None:
    """Of an update of two optimizer steps, and of a step that was asked for by itself."""
    folder = write_tiny_decoder(
        tmp_path / "mixture", "qwen3_moe", vocab_size=512, **case_config("qwen3_moe")
    )
    async with serving_critic(folder) as critic:
        result = await critic.update()
        await critic.forward_backward()
        request = trainer_pb2.OptimStepRequest(key=critic.key(), expected_policy_version=2)
        stepped = await critic.stub.OptimStep(request)
        assert await critic.stub.OptimStep(request) == stepped
    trainer = Trainer.critic(critic.model, OptimizerSpec(learning_rate=1e-3))
    seed = derive_seed(RUN_SEED, operation_key().step, "critic", "update")
    update_whole(trainer, BATCH, PpoValueLossSpec(), epochs=1, mini_batch_rows=4, seed=seed)
    expected = {one.layer: one.choices for one in trainer.take_expert_loads()}
    assert expected.keys() == {0, 2}
    assert checked_loads(result.expert_loads) == expected
    forward_backward(trainer, BATCH, PpoValueLossSpec())
    trainer.optim_step()
    expected = {one.layer: one.choices for one in trainer.take_expert_loads()}
    assert checked_loads(stepped.expert_loads) == expected
    assert "experts/load_ratio" in stepped.report.metrics


async def test_more_epochs_than_can_be_planned_are_refused(critic: Critic) -> None:
    with pytest.raises(InvalidRequestError, match=r"epochs .* is 17179869176, .* limit of 2097152"):
        await critic.update(epochs=2**31 - 1)
    assert (await critic.update()).policy_version == 2


async def test_gradients_with_units_are_the_trainers(critic: Critic) -> None:
    result = await critic.forward_backward(rows_per_unit=4)
    trainer = Trainer.critic(critic.model, OptimizerSpec())
    assert dict(result.report.metrics) == forward_backward(
        trainer, BATCH, PpoValueLossSpec(), rows_per_unit=4
    )
    assert result.outputs.num_rows == BATCH.num_rows


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rows_per_unit": 3}, "rows are 8, which is no multiple of rows_per_unit 3"),
        (
            {"rows_per_unit": 4, "mini_batch_rows": 6},
            "mini_batch_rows are 6, which is no multiple of rows_per_unit 4",
        ),
        ({"rows_per_unit": -1}, "rows_per_unit is -1"),
    ],
    ids=["batch", "mini-batch", "negative"],
)
async def test_units_that_would_be_cut_are_refused(
    critic: Critic, fields: dict[str, int], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        await critic.update(**fields)
    assert caught.value.reason == "SPEC_INVALID"


@pytest.mark.parametrize(
    ("loss", "weight", "words"),
    [
        (VALUE_LOSS, -0.5, "weight of auxiliary loss 'ppo_value' is -0.5"),
        (POLICY_LOSS, 1.0, "this critic trains a value model"),
    ],
    ids=["weight", "output"],
)
async def test_a_further_loss_that_cannot_be_added_is_refused(
    critic: Critic, loss: trainer_pb2.AlgorithmPart, weight: float, words: str
) -> None:
    auxiliary = [trainer_pb2.AuxiliaryLoss(experience=critic.extra, loss=loss, weight=weight)]
    with pytest.raises(InvalidRequestError, match=words):
        await critic.update(auxiliary=auxiliary)
    # No step was made.
    assert (await critic.update(expected_policy_version=0)).policy_version == 2
