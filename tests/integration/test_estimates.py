"""ComputeAdvantages and SelectGroups over gRPC: what they read, make and remember. No model."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from google.protobuf import struct_pb2
from support.service_calls import last
from support.services import ToySpec, assert_same, operation_key, serving

from rolemesh.engine.algorithms.estimators.estimation import (
    KL_CONTROLLER,
    LAGRANGE_MULTIPLIER,
    RUNNING_BASELINE,
    estimate_advantages,
)
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.specs import GrpoSpec
from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import InvalidRequestError, NotFoundError
from rolemesh.rpc.experience.references import TOKENS, by_group, row_tokens
from rolemesh.services.critic.servicers import CriticRole
from rolemesh.services.runtime.calls.role import InitializeResult
from rolemesh.services.runtime.service_server import ServiceServer
from rolemesh.services.runtime.servicers import estimates as estimate_servicer
from rolemesh.v1 import experience_pb2, trainer_pb2, trainer_pb2_grpc, worker_pb2, worker_pb2_grpc


class EmptyCriticRole(CriticRole):
    """A trainer that holds a run, but no model."""

    spec_class = ToySpec

    def initialize(
        self, spec: Any, run_seed: int, progress: Any, mesh: RankMesh
    ) -> InitializeResult:
        return InitializeResult()


@dataclass
class Mesh:
    """A trainer without a model, and a service that holds the batches."""

    role: EmptyCriticRole
    producer: ServiceServer
    channel: MeshChannel

    def publish(self, experience: Experience) -> experience_pb2.ExperienceRef:
        return self.producer.runtime.publish(operation_key("produce"), experience)

    async def pull(self, ref: experience_pb2.ExperienceRef, columns: list[str]) -> Experience:
        return await self.producer.runtime.pull(ref, columns, NoCall())  # type: ignore[arg-type]

    async def estimate(
        self,
        ref: experience_pb2.ExperienceRef,
        estimator: str,
        *,
        baseline: experience_pb2.ExperienceRef | None = None,
        sequence: int = 0,
        **parameters: Any,
    ) -> Any:
        request = trainer_pb2.ComputeAdvantagesRequest(
            key=operation_key("critic.compute_advantages", sequence=sequence),
            experience=ref,
            estimator=part(estimator, parameters),
            baseline=baseline,
        )
        stub = trainer_pb2_grpc.TrainerServiceStub(self.channel)
        return await last(stub.ComputeAdvantages(request))

    async def select(
        self,
        ref: experience_pb2.ExperienceRef,
        *,
        rule: str = "reward_spread",
        max_groups: int = 0,
        **parameters: Any,
    ) -> Any:
        request = trainer_pb2.SelectGroupsRequest(
            key=operation_key("critic.select_groups"),
            experience=ref,
            rule=part(rule, parameters),
            max_groups=max_groups,
        )
        return await last(trainer_pb2_grpc.TrainerServiceStub(self.channel).SelectGroups(request))


class NoCall:
    """What `pull` needs of a call."""

    def phase(self, name: str) -> Any:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def add_fetched(self, transport: str, num_bytes: int) -> None: ...


def part(name: str, parameters: dict[str, Any]) -> trainer_pb2.AlgorithmPart:
    struct = struct_pb2.Struct()
    struct.update(parameters)
    return trainer_pb2.AlgorithmPart(type=name, parameters=struct)


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    role = EmptyCriticRole()
    async with (
        serving(role) as server,
        serving() as producer,
        open_channel(server.runtime.address) as channel,
    ):
        await channel.channel_ready()
        request = worker_pb2.InitializeRequest(key=operation_key("initialize"))
        await last(worker_pb2_grpc.WorkerServiceStub(channel).Initialize(request))
        yield Mesh(role, producer, channel)


def row(numbers: list[float], dtype: torch.dtype = torch.float32) -> Column:
    return Column(ColumnKind.ROW, torch.tensor(numbers, dtype=dtype))


def make_batch() -> Experience:
    """Six rows of three prompts, scattered: 5 has rewards that differ, so has 8, and 6 has not."""
    lengths = [3, 1, 2, 4, 2, 3]
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(0, 99, (2 + n,), generator=generator) for n in lengths]
    numbers = [torch.randn(n, generator=generator) for n in lengths]
    return Experience(
        {
            "tokens": Column.ragged(ColumnKind.SEQUENCE, tokens, torch.int64),
            "prompt_lengths": row([2] * 6, torch.int64),
            "loss_mask": Column.ragged(
                ColumnKind.COMPLETION, [[True] * n for n in lengths], torch.bool
            ),
            "values": Column.ragged(ColumnKind.COMPLETION, numbers, torch.float32),
            "prompt_ids": row([5, 6, 5, 8, 6, 8], torch.int64),
            "rewards": row([1.0, 0.5, 0.0, 1.0, 0.5, 0.25]),
            "costs": row([3.0, 3.0, 3.0, 3.0, 3.0, 3.0]),
            "completion_text": Column.text([f"row {index}" for index in range(6)]),
        }
    )


def logprobs_of(batch: Experience, shift: float) -> Column:
    values = batch["values"]
    return Column(ColumnKind.COMPLETION, values.values - shift, values.offsets)


async def test_a_group_estimator_makes_the_columns_of_its_spec(mesh: Mesh) -> None:
    batch = make_batch()
    result = await mesh.estimate(mesh.publish(batch), "grpo")
    expected, metrics = estimate_advantages(batch, GrpoSpec())
    assert_same(await mesh.pull(result.experience, list(GrpoSpec().makes())), expected)
    assert dict(result.report.metrics) == pytest.approx(metrics)
    assert result.report.num_tokens == 15


async def test_kl_is_reported_where_both_logprobs_are_there(mesh: Mesh) -> None:
    batch = make_batch()
    one = batch | Experience({"logprobs": logprobs_of(batch, 3.0)})
    both = one | Experience({"reference_logprobs": logprobs_of(batch, 4.0)})
    plain = await mesh.estimate(mesh.publish(one), "rloo", sequence=1)
    assert "kl/mean" not in plain.report.metrics
    reported = await mesh.estimate(mesh.publish(both), "rloo", sequence=2)
    assert reported.report.metrics["kl/mean"] == pytest.approx(1.0)


async def test_branches_of_a_trajectory_are_read_and_count_once(mesh: Mesh) -> None:
    batch = make_batch()
    apart = await mesh.estimate(mesh.publish(batch), "rloo", sequence=1)
    prompts = batch["prompt_ids"].values.tolist()
    # The first two rows of the first prompt are one trajectory; all others stand for themselves.
    of_first = [row for row, prompt in enumerate(prompts) if prompt == prompts[0]]
    indexes = list(range(len(prompts)))
    indexes[of_first[1]] = indexes[of_first[0]]
    branches = batch | Experience({"sample_indexes": row(indexes, torch.int64)})
    together = await mesh.estimate(mesh.publish(branches), "rloo", sequence=2)
    both = [
        [
            float(tokens[0])
            for tokens in (await mesh.pull(one.experience, ["advantages"]))["advantages"].rows()
        ]
        for one in (apart, together)
    ]
    changed = [place for place, (a, b) in enumerate(zip(*both, strict=True)) if a != b]
    assert changed
    assert set(changed) <= set(of_first)


async def test_remax_pulls_its_baseline(mesh: Mesh) -> None:
    baseline = Experience(
        {"rewards": row([0.5, 0.25, 1.0]), "prompt_ids": row([8, 5, 6], torch.int64)}
    )
    result = await mesh.estimate(
        mesh.publish(make_batch()), "remax", baseline=mesh.publish(baseline)
    )
    pulled = await mesh.pull(result.experience, ["advantages"])
    firsts = [float(tokens[0]) for tokens in pulled["advantages"].rows()]
    assert firsts == [0.75, -0.5, -0.25, 0.5, -0.5, -0.25]


@pytest.mark.parametrize(
    ("estimator", "has_baseline", "words"),
    [("remax", False, "baseline is missing: RemaxSpec"), ("grpo", True, "baseline is given, but")],
)
async def test_a_baseline_must_be_there_exactly_where_it_is_read(
    mesh: Mesh, estimator: str, has_baseline: bool, words: str
) -> None:
    ref = mesh.publish(make_batch())
    with pytest.raises(InvalidRequestError, match=words):
        await mesh.estimate(ref, estimator, baseline=ref if has_baseline else None)


async def test_missing_columns_and_wrong_parameters_are_named(mesh: Mesh) -> None:
    batch = make_batch()
    rest = Experience({n: c for n, c in batch.columns.items() if n != "prompt_ids"})
    with pytest.raises(InvalidRequestError, match="column 'prompt_ids' is missing") as caught:
        await mesh.estimate(mesh.publish(rest), "grpo", sequence=1)
    assert caught.value.reason == "COLUMN_MISSING"
    with pytest.raises(InvalidRequestError, match=r"gamma is 2") as caught:
        await mesh.estimate(mesh.publish(batch), "reinforce_plus_plus", sequence=2, gamma=2.0)
    assert caught.value.reason == "SPEC_INVALID"
    with pytest.raises(InvalidRequestError, match="grpo2") as caught:
        await mesh.estimate(mesh.publish(batch), "grpo2", sequence=3)
    assert caught.value.reason == "SPEC_INVALID"


async def test_the_multiplier_moves_once_a_call_and_is_part_of_the_trainer_s_state(
    mesh: Mesh,
) -> None:
    """Mean cost 3, limit 1, rate 0.1: ln lambda grows by 0.2 lambda."""
    ref = mesh.publish(make_batch())
    parameters: dict[str, Any] = {
        "cost_limit": 1.0,
        "kl_in_reward": {"type": "adaptive", "coefficient": 0.2, "target": 0.001},
    }
    with pytest.raises(InvalidRequestError, match="'logprobs' is missing"):
        await mesh.estimate(ref, "safe_rlhf", **parameters)
    assert mesh.role.extra_state == {}
    batch = make_batch()
    both = {"logprobs": logprobs_of(batch, 3.0), "reference_logprobs": logprobs_of(batch, 4.0)}
    ref = mesh.publish(batch | Experience(both))
    first = await mesh.estimate(ref, "safe_rlhf", sequence=1, **parameters)
    again = await mesh.estimate(ref, "safe_rlhf", sequence=1, **parameters)
    assert first == again
    assert first.report.metrics["cost/multiplier"] == pytest.approx(1.0)
    log_value = 0.2
    assert mesh.role.extra_state[LAGRANGE_MULTIPLIER]["log_multiplier"] == pytest.approx(log_value)
    assert mesh.role.extra_state[KL_CONTROLLER]["coefficient"] > 0.2

    second = await mesh.estimate(ref, "safe_rlhf", sequence=2, **parameters)
    assert second.report.metrics["cost/multiplier"] == pytest.approx(math.exp(log_value))
    log_value += 0.2 * math.exp(log_value)
    assert mesh.role.extra_state[LAGRANGE_MULTIPLIER]["log_multiplier"] == pytest.approx(log_value)


async def test_the_running_baseline_moves_once_a_call_and_is_part_of_the_trainer_s_state(
    mesh: Mesh,
) -> None:
    batch = make_batch()
    mean = float(batch["rewards"].values.mean())
    better = row((batch["rewards"].values + 1).tolist())
    refs = [mesh.publish(batch), mesh.publish(batch | Experience({"rewards": better}))]
    found = []
    for number in (0, 1, 1, 2):
        ref = refs[min(number, 1)]
        result = await mesh.estimate(ref, "running_baseline", sequence=number, decay=0.5)
        found.append(result.report.metrics["reward/baseline_mean"])
    assert found == pytest.approx([mean, mean, mean, mean + 0.5])
    assert mesh.role.extra_state[RUNNING_BASELINE] == {"value": pytest.approx(mean + 0.75)}


async def test_a_mask_that_leaves_groups_out_is_a_new_column(mesh: Mesh) -> None:
    batch = make_batch()
    result = await mesh.estimate(mesh.publish(batch), "grpo", zero_variance="left_out")
    columns = GrpoSpec(zero_variance="left_out").makes()
    found = await mesh.pull(result.experience, list(columns))
    expected, _ = estimate_advantages(batch, GrpoSpec(zero_variance="left_out"))
    assert_same(found, expected)


async def test_estimates_that_are_asked_for_at_once_move_the_multiplier_each(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mean cost 3, limit 1, rate 0.1: two moves, of 0.2 and of 0.2 times the new multiplier."""

    def slowly(*inputs: Any) -> Any:
        # Long enough for the second call to get as far as it can.
        time.sleep(0.3)
        return estimate_advantages(*inputs)

    monkeypatch.setattr(estimate_servicer, "estimate_advantages", slowly)
    ref = mesh.publish(make_batch())
    results = await asyncio.gather(
        *(mesh.estimate(ref, "safe_rlhf", sequence=number, cost_limit=1.0) for number in (0, 1))
    )
    multipliers = sorted(result.report.metrics["cost/multiplier"] for result in results)
    assert multipliers == pytest.approx([1.0, math.exp(0.2)])
    moved = 0.2 + 0.2 * math.exp(0.2)
    assert mesh.role.extra_state[LAGRANGE_MULTIPLIER]["log_multiplier"] == pytest.approx(moved)


async def test_online_pairs_are_row_columns(mesh: Mesh) -> None:
    result = await mesh.estimate(mesh.publish(make_batch()), "online_dpo")
    pulled = await mesh.pull(result.experience, ["pair_ids", "preference"])
    assert pulled["pair_ids"].values.tolist() == [0, -1, 0, 1, -1, 1]
    assert pulled["preference"].values.tolist() == [1, 0, -1, 1, 0, -1]


async def test_kept_groups_keep_all_columns_in_their_order(mesh: Mesh) -> None:
    """The reference has two groups of columns, and one of them two shards."""
    batch = make_batch()
    early = batch.require(["tokens", "prompt_lengths", "loss_mask", "prompt_ids"])
    late = batch.require(["rewards", "completion_text"])
    ref = mesh.publish(early.slice(0, 2))
    tail = mesh.publish(early.slice(2, 6)).groups[0].shards[0]
    tail.row_start = 2
    ref.groups[0].shards.append(tail)
    ref.num_rows = 6
    ref.groups.append(mesh.publish(late).groups[0])

    result = await mesh.select(ref)
    assert result.num_groups == 2
    kept = torch.tensor([0, 2, 3, 5])
    names = [*early.columns, *late.columns]
    assert_same(await mesh.pull(result.experience, names), (early | late).select(kept))
    assert result.experience.num_rows == 4
    assert row_tokens(result.experience) == [5, 4, 6, 5]
    (place,) = by_group(result.experience, [TOKENS])
    group = result.experience.groups[place]
    assert [column.name for column in group.columns] == names
    assert dict(result.report.metrics) == {
        "selection/groups": 3,
        "selection/wanted": 2,
        "selection/kept": 2,
        "selection/rows": 4,
    }


async def test_the_first_groups_are_kept_within_the_bound(mesh: Mesh) -> None:
    result = await mesh.select(mesh.publish(make_batch()), max_groups=1)
    pulled = await mesh.pull(result.experience, ["prompt_ids", "completion_text"])
    assert pulled["completion_text"].strings() == ["row 0", "row 2"]
    assert result.num_groups == 1


async def test_when_no_group_is_kept_there_is_no_experience(mesh: Mesh) -> None:
    result = await mesh.select(mesh.publish(make_batch()), min_std=5.0)
    assert result.num_groups == 0
    assert not result.HasField("experience")
    assert result.report.metrics["selection/groups"] == 3


async def test_rows_of_pairs_are_published_as_neighbours(mesh: Mesh) -> None:
    batch = make_batch()
    made = await mesh.estimate(mesh.publish(batch), "online_dpo")
    ref = mesh.publish(batch)
    ref.groups.extend(made.experience.groups)
    result = await mesh.select(ref, rule="paired")
    pulled = await mesh.pull(result.experience, ["completion_text", "pair_ids", "preference"])
    assert pulled["completion_text"].strings() == ["row 0", "row 2", "row 3", "row 5"]
    assert pulled["pair_ids"].values.tolist() == [0, 0, 1, 1]
    assert pulled["preference"].values.tolist() == [1, -1, 1, -1]
    assert result.num_groups == 2


async def test_a_wrong_rule_is_refused(mesh: Mesh) -> None:
    ref = mesh.publish(make_batch())
    for wrong, words in (
        ({"max_groups": -1}, "max_groups is -1"),
        ({"min_std": -1.0}, "min_std is -1"),
        ({"rule": "best"}, "best"),
        ({"max_std": 1.0}, r"reward_spread\.max_std"),
    ):
        with pytest.raises(InvalidRequestError, match=words) as caught:
            await mesh.select(ref, **wrong)
        assert caught.value.reason == "SPEC_INVALID"


async def test_a_released_batch_is_said_to_be_gone(mesh: Mesh) -> None:
    ref = mesh.publish(make_batch())
    mesh.producer.runtime.store.release_through("run", 0)
    with pytest.raises(NotFoundError):
        await mesh.select(ref)
