from __future__ import annotations

import pytest

from rolemesh.coordinator.dataflow.futures import Node, NodeKind
from rolemesh.coordinator.run.folders.summary import mean_rewards
from rolemesh.coordinator.run.results.metrics import (
    dataflow_traffic,
    merged_metrics,
    phase_peaks,
    phase_seconds,
    step_record,
    traffic_since,
)
from rolemesh.rpc.channel import ChannelTraffic, MethodTraffic


def node(name: str, seconds: float = 1.0, **fields: object) -> Node:
    role, method = name.split(".")
    return Node(
        node_id=0,
        step=1,
        kind=NodeKind.INFER,
        service=role,
        method=method,
        pool="main",
        sequence=0,
        inputs=(),
        queued_at=0.0,
        started_at=10.0,
        ended_at=10.0 + seconds,
        **fields,  # type: ignore[arg-type]
    )


def test_bytes_of_weights_count_in_whichever_call_they_travelled() -> None:
    taken = node("rollout.update_weights", metrics={"weight_sync_bytes": 700.0})
    sampled = node("rollout.generate", metrics={"weight_sync_bytes": 0.0, "kl/mean": 0.5})
    judged = node("rollout.generate", metrics={"kl/mean": 0.25})
    merged = merged_metrics([taken, sampled, judged])
    assert merged["weight_sync_bytes"] == 700.0
    assert merged["kl/mean"] == 0.375


def test_weight_sync_is_shown_beside_generate_not_in_it() -> None:
    nodes = [
        node("actor.generate", 3.0, phases={"weight_sync": 0.5, "compute": 2.0}),
        node("critic.update", 2.0),
        node("critic.update", 1.0),
        node("actor.compute_logprobs", 4.0),
    ]
    assert phase_seconds(nodes) == {
        "weight_sync": 0.5,
        "generate": 2.5,
        "update_critic": 3.0,
        "proximal": 4.0,
    }


def test_bare_names_are_told_apart_only_where_roles_share_them() -> None:
    merged = merged_metrics(
        [
            node("reward.compute_reward", metrics={"reward/mean": 0.25}),
            node("actor.compute_advantages", metrics={"reward/mean": 0.5, "kl/mean": 0.125}),
            node("critic.update", metrics={"grad_norm": 1.0, "value_loss": 2.0}),
            node("actor.update", metrics={"grad_norm": 3.0, "entropy": 4.0}),
        ]
    )
    assert merged == {
        "reward/mean": 0.5,
        "kl/mean": 0.125,
        "critic/grad_norm": 1.0,
        "value_loss": 2.0,
        "actor/grad_norm": 3.0,
        "entropy": 4.0,
    }


def test_tokens_a_second_count_the_rollouts_once() -> None:
    nodes = [
        node("actor.generate", num_tokens=100),
        node("actor.update", num_tokens=100, num_bytes=7),
    ]
    record = step_record(3, nodes, 4.0, MethodTraffic(2, 30, 40))
    assert (record["step"], record["tokens"], record["tokens_per_second"]) == (3, 100, 25.0)
    assert record["time/step"] == 4.0
    assert record["experience/fetched_bytes"] == 7
    assert record["coordinator/received_bytes"] == 40


def test_the_watchers_calls_do_not_count_as_work() -> None:
    traffic = ChannelTraffic()
    traffic.methods["/rolemesh.v1.WorkerService/GetStatus"] = MethodTraffic(9, 90, 900)
    traffic.methods["/rolemesh.v1.TrainerService/Update"] = MethodTraffic(2, 20, 200)
    assert dataflow_traffic(traffic) == MethodTraffic(2, 20, 200)
    since = traffic_since(MethodTraffic(1, 5, 50), dataflow_traffic(traffic))
    assert since == MethodTraffic(1, 15, 150)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([], (None, None)),
        ([0.5], (0.5, None)),
        ([1.0, 2.0, 4.0], (1.0, 4.0)),
        ([1.0, 2.0, 3.0, 4.0, 5.0], (1.5, 4.5)),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], (2.0, 6.0)),
    ],
    ids=["no steps", "one step", "three steps", "five steps", "seven steps"],
)
def test_first_and_last_rewards_average_three_steps_that_are_not_the_same(
    rewards: list[float], expected: tuple[float | None, float | None]
) -> None:
    assert mean_rewards([{"reward/mean": reward} for reward in rewards]) == expected


def test_the_peak_of_a_phase_is_that_of_the_rank_that_held_most() -> None:
    nodes = [
        node("actor.generate", 3.0, peak_bytes={"weight_sync": {0: 5, 1: 7}, "compute": {0: 9}}),
        node("actor.update", 2.0, peak_bytes={"compute": {0: 11, 1: 10}}),
    ]
    assert phase_peaks(nodes) == {"weight_sync": 7, "generate": 9, "update_actor": 11}
