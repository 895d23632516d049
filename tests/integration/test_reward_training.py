"""A reward that learns from pairs, a cost beside it, and what both refuse."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reward_calls import NUM_PAIRS, RewardClient, trained, write_pairs, write_rows
from support.services import operation_key, serving
from support.tiny_models import write_tiny_llama
from transformers import AutoTokenizer

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rewards.sources import ClassifierReward
from rolemesh.engine.specs import ClassifierRewardSpec, ModelSpec
from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.errors import InvalidRequestError, PreconditionError
from rolemesh.services.cost.servicers import CostRole
from rolemesh.services.reward.servicers import RewardRole
from rolemesh.services.runtime.calls.runtime import Runtime
from rolemesh.v1 import (
    data_pb2,
    experience_pb2,
    rollout_pb2,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), seed=4)


@asynccontextmanager
async def client_of(role: RewardRole) -> AsyncIterator[tuple[RewardClient, Runtime]]:
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        yield RewardClient(channel), server.runtime


def held(runtime: Runtime, ref: experience_pb2.ExperienceRef) -> Experience:
    """The experience that this service published."""
    (shard,) = ref.groups[0].shards
    return runtime.store.get(shard.experience_id).experience


async def test_a_reward_learns_from_pairs_and_its_export_gives_the_same_rewards(
    llama: Path, tmp_path: Path
) -> None:
    spec = trained(llama, write_pairs(tmp_path / "pairs.jsonl"))
    async with client_of(RewardRole()) as (reward, runtime):
        ready = await reward.initialize(spec)
        assert ready.num_parameters > 0
        assert dict(ready.facts)["data.train_prompts"] == str(NUM_PAIRS)
        batch = await reward.read()
        read = held(runtime, batch)
        assert read.num_rows == 2 * NUM_PAIRS
        assert read["preference"].values.tolist() == [1, -1] * NUM_PAIRS
        assert read["loss_mask"].values.all()
        before = held(runtime, (await reward.judge(batch)).experience)["rewards"].values
        assert before.tolist() == [0.0] * 2 * NUM_PAIRS

        metrics, version = {}, 0
        for _ in range(6):
            updated = await reward.update(batch, version=version)
            version, metrics = updated.policy_version, dict(updated.report.metrics)
        assert version == 12
        assert metrics["preference_accuracy"] == 1

        judged = await reward.judge(batch)
        rewards = held(runtime, judged.experience)["rewards"].values
        assert bool((rewards[::2] > rewards[1::2]).all())
        assert dict(judged.report.metrics)["reward/mean"] == pytest.approx(
            float(rewards.double().mean())
        )
        await reward.export(tmp_path / "reward")

    source = ClassifierReward(
        ClassifierRewardSpec(model=ModelSpec(path=tmp_path / "reward", compute_dtype="float32")),
        torch.device("cpu"),
        RankMesh.single(),
    )
    again = source.score(read, lambda *_: None)
    assert torch.equal(again, rewards)


async def test_training_sees_the_very_tokens_that_are_judged(llama: Path, tmp_path: Path) -> None:
    """Not those of a policy's completion, which end with a token that scoring never sees."""
    spec = trained(llama, write_pairs(tmp_path / "pairs.jsonl"))
    role = RewardRole()
    async with client_of(role) as (reward, runtime):
        await reward.initialize(spec)
        read = held(runtime, await reward.read())
    tokenizer = AutoTokenizer.from_pretrained(llama)
    texts = zip(read["prompt_text"].strings(), read["completion_text"].strings(), strict=True)
    for row, (prompt, completion) in zip(read["tokens"].rows(), texts, strict=True):
        assert row.tolist() == tokenizer(prompt + completion)["input_ids"]


def judged_rows(runtime: Runtime, completions: Sequence[str]) -> experience_pb2.ExperienceRef:
    """Completions of prompts 7 and 3 in turn, to which the right answer is 12."""
    number = len(completions)
    rows = Experience(
        {
            "tokens": Column.ragged(ColumnKind.SEQUENCE, [[1, 2]] * number, torch.int64),
            "prompt_ids": Column(
                ColumnKind.ROW, torch.tensor([3 if row % 2 else 7 for row in range(number)])
            ),
            "completion_text": Column.text(completions),
            "answer": Column.text(["12"] * number),
        }
    )
    return runtime.publish(operation_key("rows"), rows)


async def test_a_cost_gives_costs() -> None:
    async with client_of(CostRole()) as (cost, runtime):
        await cost.initialize({"source": {"type": "arithmetic"}})
        judged = await cost.judge(judged_rows(runtime, ["12", "13"]))
        costs = held(runtime, judged.experience)
        assert list(costs.columns) == ["costs"]
        assert costs["costs"].values.tolist() == pytest.approx([1.0, 0.1])
        assert dict(judged.report.metrics)["cost/mean"] == pytest.approx(0.55)


async def test_pass_at_k_is_reported_over_the_completions_of_each_prompt() -> None:
    async with client_of(RewardRole()) as (reward, runtime):
        await reward.initialize({"source": {"type": "arithmetic"}})
        # Prompt 7: one of three is right; prompt 3: none of three.
        batch = judged_rows(runtime, ["12", "1", "1", "1", "1", "12 apples"])
        metrics = dict((await reward.judge(batch, pass_at=[1, 2, 3])).report.metrics)
        assert metrics["pass@1"] == pytest.approx((1 / 3 + 0) / 2)
        assert metrics["pass@2"] == pytest.approx((2 / 3 + 0) / 2)
        assert metrics["pass@3"] == pytest.approx(1 / 2)
        held_bytes = runtime.store.held_bytes
        with pytest.raises(InvalidRequestError, match="prompt 3 has 3 rows") as caught:
            await reward.judge(batch, pass_at=[4])
        assert caught.value.reason == "VALUE_INVALID"
        # Nobody knows the rewards of a call that failed.
        assert runtime.store.held_bytes == held_bytes


async def test_pass_at_k_without_the_prompts_of_rows_is_refused() -> None:
    async with client_of(RewardRole()) as (reward, runtime):
        await reward.initialize({"source": {"type": "arithmetic"}})
        rows = held(runtime, judged_rows(runtime, ["12", "1"]))
        others = rows.require([name for name in rows.columns if name != "prompt_ids"])
        batch = runtime.publish(operation_key("rows without prompts"), others)
        with pytest.raises(InvalidRequestError, match="prompt_ids") as caught:
            await reward.judge(batch, pass_at=[1])
        assert caught.value.reason == "COLUMN_MISSING"


# --- refusals -------------------------------------------------------------------------------


async def test_a_reward_that_is_not_trained_says_so_to_every_call_of_training(
    tmp_path: Path,
) -> None:
    async with client_of(RewardRole()) as (reward, _):
        with pytest.raises(PreconditionError) as early:
            await reward.read()
        assert early.value.reason == "NOT_INITIALIZED"
        await reward.initialize({"source": {"type": "arithmetic"}})
        empty = experience_pb2.ExperienceRef()
        for call in (reward.read(), reward.update(empty), reward.export(tmp_path / "out")):
            with pytest.raises(PreconditionError, match="give reward a source of type") as caught:
                await call
            assert caught.value.reason == "NOT_TRAINABLE"


async def test_a_classifier_has_no_full_score_to_pass(llama: Path, tmp_path: Path) -> None:
    async with client_of(RewardRole()) as (reward, runtime):
        await reward.initialize(trained(llama, write_pairs(tmp_path / "pairs.jsonl")))
        with pytest.raises(InvalidRequestError, match="no full score") as caught:
            await reward.judge(judged_rows(runtime, ["12"]), pass_at=[1])
        assert caught.value.reason == "PASS_AT_INVALID"


async def test_torn_pairs_are_refused_and_no_weight_moves(llama: Path, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "pairs.jsonl")
    async with client_of(RewardRole()) as (reward, _):
        await reward.initialize(trained(llama, data, micro_batch_tokens=1))
        batch = await reward.read()
        with pytest.raises(InvalidRequestError, match="rows_per_unit") as caught:
            await reward.update(batch, rows_per_unit=1)
        assert caught.value.reason == "PAIR_INCOMPLETE"
        assert (await reward.update(batch, version=0)).policy_version == 2


async def test_experience_without_pairs_is_refused(llama: Path, tmp_path: Path) -> None:
    data = write_rows(
        tmp_path / "rows.jsonl",
        [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}],
    )
    async with client_of(RewardRole()) as (reward, _):
        await reward.initialize(trained(llama, data))
        batch = await reward.read(count=2, kind=data_pb2.READ_KIND_DEMONSTRATION)
        with pytest.raises(InvalidRequestError, match="pair_ids") as caught:
            await reward.update(batch)
        assert caught.value.reason == "COLUMN_MISSING"


async def test_a_data_row_without_the_rejected_completion_is_named_at_the_start(
    llama: Path, tmp_path: Path
) -> None:
    data = write_rows(
        tmp_path / "rows.jsonl",
        [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "d", "chosen": "e"}],
    )
    async with client_of(RewardRole()) as (reward, _):
        with pytest.raises(InvalidRequestError, match=r"line 2: 'rejected' is missing") as caught:
            await reward.initialize(trained(llama, data))
        assert caught.value.reason == "DATA_INVALID"


async def test_rows_that_are_no_pairs_cannot_be_read_as_pairs(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    async with client_of(RewardRole()) as (reward, _):
        await reward.initialize(trained(llama, data))
        with pytest.raises(InvalidRequestError, match=r"line 1: has no 'chosen'") as caught:
            await reward.read(count=1)
        assert caught.value.reason == "DATA_INVALID"


async def test_a_row_that_the_model_cannot_see_whole_is_refused(
    llama: Path, tmp_path: Path
) -> None:
    data = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "a", "chosen": "yes! " * 300, "rejected": "no"}]
    )
    async with client_of(RewardRole()) as (reward, _):
        await reward.initialize(trained(llama, data))
        with pytest.raises(InvalidRequestError, match="max_row_tokens") as caught:
            await reward.read(count=1)
        assert caught.value.reason == "PROMPT_TOO_LONG"


async def test_split_and_kind_must_be_said(llama: Path, tmp_path: Path) -> None:
    async with client_of(RewardRole()) as (reward, _):
        await reward.initialize(trained(llama, write_pairs(tmp_path / "pairs.jsonl")))
        for arguments, reason in (
            ({"split": rollout_pb2.SPLIT_UNSPECIFIED}, "SPLIT_INVALID"),
            ({"kind": data_pb2.READ_KIND_UNSPECIFIED}, "KIND_INVALID"),
            ({"split": rollout_pb2.SPLIT_HELD_OUT}, "DATA_EMPTY"),
            ({"count": 0}, "SLICE_INVALID"),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                await reward.read(**arguments)
            assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"source": {"type": "arithmetic"}, "optimizer": {}}, "without data"),
        (
            {
                "source": {"type": "arithmetic"},
                "optimizer": {},
                "data": {"type": "jsonl", "path": "rows.jsonl"},
            },
            "nothing to train",
        ),
        (
            {"source": {"type": "classifier", "new_head": True, "model": {"path": "x"}}},
            "without optimizer",
        ),
        (
            {
                "source": {
                    "type": "classifier",
                    "new_head": True,
                    "label": 1,
                    "model": {"path": "x"},
                }
            },
            "label is 1 with new_head",
        ),
    ],
    ids=["data", "source", "untrained head", "label"],
)
async def test_specs_that_do_not_fit_together_are_refused(
    spec: dict[str, Any], message: str
) -> None:
    async with client_of(RewardRole()) as (reward, _):
        with pytest.raises(InvalidRequestError, match=message) as caught:
            await reward.initialize(spec)
        assert caught.value.reason == "SPEC_INVALID"
