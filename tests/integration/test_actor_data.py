"""The actor trains on given data: demonstrations, pairs, judgements, texts."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf import json_format, struct_pb2
from support.services import operation_key, serving
from support.tiny_models import END_ID, write_tiny_llama

from rolemesh.engine.experience import Experience
from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import InvalidRequestError, PreconditionError
from rolemesh.services.actor.servicers import ActorRole
from rolemesh.services.runtime.calls.runtime import Runtime
from rolemesh.v1 import (
    data_pb2,
    data_pb2_grpc,
    experience_pb2,
    logprob_pb2,
    logprob_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

NUM_ROWS = 6
DEMONSTRATION = data_pb2.READ_KIND_DEMONSTRATION
PREFERENCE = data_pb2.READ_KIND_PREFERENCE
JUDGEMENT = data_pb2.READ_KIND_JUDGEMENT


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), seed=4)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Client:
    """Calls the actor under keys of their own."""

    def __init__(self, channel: MeshChannel, runtime: Runtime) -> None:
        self._channel = channel
        self._runtime = runtime
        self._number = 0
        self.version = 0

    def key(self) -> Any:
        self._number += 1
        return operation_key("call", sequence=self._number)

    async def initialize(self, llama: Path, data: Path, pretraining: Path | None = None) -> None:
        await self._channel.channel_ready()
        spec: dict[str, Any] = {
            "model": {"path": str(llama), "compute_dtype": "float32", "micro_batch_tokens": 256},
            "optimizer": {"learning_rate": 1e-3},
            # No rollout: what learns from given data needs no sampler.
            "data": {"type": "jsonl", "path": str(data)},
        }
        if pretraining is not None:
            spec["pretraining_data"] = {"type": "jsonl", "path": str(pretraining)}
        request = worker_pb2.InitializeRequest(
            key=self.key(), spec=json_format.ParseDict(spec, struct_pb2.Struct()), run_seed=3
        )
        await result_of(worker_pb2_grpc.WorkerServiceStub(self._channel).Initialize(request))

    async def read(
        self,
        kind: data_pb2.ReadKind.ValueType,
        split: rollout_pb2.Split.ValueType = rollout_pb2.SPLIT_TRAIN,
        count: int = NUM_ROWS,
    ) -> experience_pb2.ExperienceRef:
        rows = rollout_pb2.PromptSlice(split=split, start=0, count=count)
        request = data_pb2.ReadBatchRequest(key=self.key(), rows=rows, kind=kind)
        stub = data_pb2_grpc.DataServiceStub(self._channel)
        return (await result_of(stub.ReadBatch(request))).experience

    async def generate(self) -> Any:
        request = rollout_pb2.GenerateRequest(
            key=self.key(),
            prompts=rollout_pb2.PromptSlice(split=rollout_pb2.SPLIT_TRAIN, start=0, count=1),
            sampling=rollout_pb2.Sampling(
                samples_per_prompt=1, max_new_tokens=2, temperature=1.0, top_p=1.0, top_k=-1
            ),
        )
        return await result_of(rollout_pb2_grpc.RolloutServiceStub(self._channel).Generate(request))

    async def scored(
        self, batch: experience_pb2.ExperienceRef, column: str
    ) -> experience_pb2.ExperienceRef:
        """The batch with the actor's own log-probs of now."""
        request = logprob_pb2.ComputeLogprobsRequest(
            key=self.key(), experience=batch, column=column, temperature=1.0
        )
        stub = logprob_pb2_grpc.LogprobServiceStub(self._channel)
        return joined(batch, (await result_of(stub.ComputeLogprobs(request))).experience)

    async def estimated(
        self, batch: experience_pb2.ExperienceRef, estimator: str
    ) -> experience_pb2.ExperienceRef:
        request = trainer_pb2.ComputeAdvantagesRequest(
            key=self.key(),
            experience=batch,
            estimator=trainer_pb2.AlgorithmPart(type=estimator),
        )
        stub = trainer_pb2_grpc.TrainerServiceStub(self._channel)
        return joined(batch, (await result_of(stub.ComputeAdvantages(request))).experience)

    async def update(
        self,
        batch: experience_pb2.ExperienceRef,
        loss: str,
        *,
        epochs: int = 1,
        rows_per_unit: int = 1,
        **parameters: float,
    ) -> dict[str, float]:
        struct = struct_pb2.Struct()
        struct.update(parameters)
        request = trainer_pb2.UpdateRequest(
            key=self.key(),
            experience=batch,
            loss=trainer_pb2.AlgorithmPart(type=loss, parameters=struct),
            epochs=epochs,
            mini_batch_rows=batch.num_rows,
            expected_policy_version=self.version,
            rows_per_unit=rows_per_unit,
        )
        updated = await result_of(
            trainer_pb2_grpc.TrainerServiceStub(self._channel).Update(request)
        )
        self.version = updated.policy_version
        return dict(updated.report.metrics)

    def held(self, ref: experience_pb2.ExperienceRef) -> Experience:
        """The first columns of a reference, which this service published."""
        (shard,) = ref.groups[0].shards
        return self._runtime.store.get(shard.experience_id).experience


async def result_of(stream: AsyncIterator[Any]) -> Any:
    last = [message async for message in stream][-1]
    return getattr(last, last.WhichOneof("event"))


def joined(
    left: experience_pb2.ExperienceRef, right: experience_pb2.ExperienceRef
) -> experience_pb2.ExperienceRef:
    """Both references' columns over the same rows."""
    both = experience_pb2.ExperienceRef()
    both.CopyFrom(left)
    both.groups.extend(right.groups)
    return both


@asynccontextmanager
async def actor_on(
    llama: Path, data: Path, pretraining: Path | None = None
) -> AsyncIterator[Client]:
    async with serving(ActorRole()) as server, open_channel(server.runtime.address) as channel:
        client = Client(channel, server.runtime)
        await client.initialize(llama, data, pretraining)
        yield client


async def test_demonstrations_are_learnt(llama: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"say {n}", "completion": f"{n} it is"} for n in range(NUM_ROWS)]
    async with actor_on(llama, write_rows(tmp_path / "rows.jsonl", rows)) as actor:
        batch = await actor.read(DEMONSTRATION)
        read = actor.held(batch)
        assert read.num_rows == NUM_ROWS
        # A completion ends its turn, so that the policy learns to stop.
        assert all(END_ID in row[-2:] for row in read["tokens"].rows())
        first = await actor.update(batch, "sft")
        assert first["loss"] == pytest.approx(first["nll"])
        for _ in range(15):
            last = await actor.update(batch, "sft")
        assert last["nll"] < 0.5 * first["nll"]


async def test_a_policy_learns_to_prefer_what_was_chosen(llama: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"say {n}", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(NUM_ROWS)
    ]
    async with actor_on(llama, write_rows(tmp_path / "rows.jsonl", rows)) as actor:
        batch = await actor.scored(await actor.read(PREFERENCE), "reference_logprobs")
        first = await actor.update(batch, "dpo", rows_per_unit=2)
        assert first["loss"] == pytest.approx(math.log(2), rel=1e-3)
        for _ in range(5):
            last = await actor.update(batch, "dpo", rows_per_unit=2)
        assert last["preference_accuracy"] == 1
        assert last["loss"] < first["loss"]
        # Parameters of a part reach its loss.
        smoothed = await actor.update(batch, "dpo", rows_per_unit=2, label_smoothing=0.4)
        assert smoothed["loss"] > last["loss"]


async def test_a_policy_learns_from_judgements(llama: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"say {n}", "completion": f"{'yes' if n % 2 else 'no'} {n}", "label": n % 2}
        for n in range(NUM_ROWS)
    ]
    async with actor_on(llama, write_rows(tmp_path / "rows.jsonl", rows)) as actor:
        read = await actor.read(JUDGEMENT)
        assert actor.held(read)["preference"].values.count_nonzero() == NUM_ROWS
        reference = await actor.scored(read, "reference_logprobs")
        first: dict[str, float] = {}
        for _ in range(6):
            batch = await actor.scored(reference, "proximal_logprobs")
            last = await actor.update(await actor.estimated(batch, "kto"), "kto")
            first = first or last
        assert first["loss"] == pytest.approx(0.5)
        assert first["kl_reference_point"] == 0
        assert last["loss"] < first["loss"]
        assert last["chosen_reward"] > last["rejected_reward"]


async def test_texts_of_pretraining_are_read_from_a_split_of_their_own(
    llama: Path, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": "say", "completion": "a"}])
    texts = write_rows(tmp_path / "texts.jsonl", [{"text": "once upon a time " * 3}] * 2)
    async with actor_on(llama, data, texts) as actor:
        batch = await actor.read(DEMONSTRATION, rollout_pb2.SPLIT_PRETRAINING, count=2)
        assert torch.equal(actor.held(batch)["prompt_lengths"].values, torch.ones(2).long())
        assert (await actor.update(batch, "sft"))["nll"] > 0


async def test_a_split_that_the_actor_has_not_is_refused(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": "say", "completion": "a"}])
    async with actor_on(llama, data) as actor:
        with pytest.raises(InvalidRequestError, match="pretraining_data") as caught:
            await actor.read(DEMONSTRATION, rollout_pb2.SPLIT_PRETRAINING)
        assert caught.value.reason == "DATA_EMPTY"


async def test_an_actor_without_a_sampler_refuses_to_sample(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": "say", "completion": "a"}])
    async with actor_on(llama, data) as actor:
        with pytest.raises(PreconditionError, match=r"actor\.rollout") as caught:
            await actor.generate()
        assert caught.value.reason == "NO_SAMPLER"
