from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest

from rolemesh.coordinator.api.alerts import RECENT_STEPS, alerts_of
from rolemesh.coordinator.dataflow.futures import Node, NodeKind, NodeState
from rolemesh.v1 import coordinator_pb2

STEPS = 40
HEALTHY = {
    "reward/mean": 0.6, "reward/std": 0.4, "kl/mean": 0.8, "entropy": 0.3,
    "groups/count": 8.0, "groups/all_equal": 2.0, "clip_fraction_high": 0.02,
    "clip_fraction_low": 0.03, "finished_fraction": 0.95, "sampler_logprob_diff_mean": 0.03,
    "staleness/max": 1.0, "actor/grad_norm": 7.0, "critic/grad_norm": 3.0, "time/step": 10.0,
    "time/generate": 6.0, "time/update_actor": 3.0, "reward/helpful/errors": 0.0,
    "reward/helpful/dropped_rows": 0.0, "reward/helpful/latency_p50_seconds": 0.1,
}  # fmt: skip


def node(role: str, kind: NodeKind, pool: str, start: float, end: float, inputs: tuple[int, ...],
         node_id: int) -> Node:  # fmt: skip
    return Node(
        node_id=node_id, step=1, kind=kind, service=role, method="work", pool=pool, sequence=0,
        inputs=inputs, queued_at=0.0, started_at=start, ended_at=end, state=NodeState.DONE,
    )  # fmt: skip


def step_of_two_pools(generated_s: float, *, judge_pool: str = "big") -> list[Node]:
    """The actor samples, the critic scores for 1 s and learns for 2 s, the actor learns for 2 s."""
    end = generated_s
    return [
        node("actor", NodeKind.SAMPLE, "big", 0.0, end, (), 0),
        node("reward", NodeKind.INFER, judge_pool, end, end + 0.01, (0,), 1),
        node("critic", NodeKind.INFER, "small", end, end + 1.0, (0,), 2),
        node("critic", NodeKind.UPDATE, "small", end + 1.0, end + 3.0, (2,), 3),
        node("actor", NodeKind.UPDATE, "big", end + 1.0, end + 3.0, (2,), 4),
    ]


def in_one_pool(nodes: Sequence[Node]) -> list[Node]:
    for each in nodes:
        each.pool = "shared"
    return list(nodes)


def device(
    name: str, busy: float, memory: float, minutes: int = 10
) -> coordinator_pb2.DeviceUseSeries:
    use = coordinator_pb2.DeviceUseSeries(
        service="critic", rank=1, device=name, busy=[busy] * (minutes + 1),
        memory_bytes=[int(memory * 2**30)] * (minutes + 1), memory_total_bytes=2**30,
    )  # fmt: skip
    for minute in range(minutes + 1):
        use.times.add(seconds=60 * minute)
    return use


def use_of(*devices: coordinator_pb2.DeviceUseSeries) -> coordinator_pb2.GetDeviceUseResponse:
    return coordinator_pb2.GetDeviceUseResponse(devices=devices)


def records(newest: Mapping[str, float] = {}, steps: int = RECENT_STEPS) -> list[dict[str, float]]:
    """A healthy run whose newest steps have other values."""
    first = STEPS - steps
    return [
        {"step": i + 1, **HEALTHY, **(newest if i >= first else {})} for i in range(STEPS)
    ]  # fmt: skip


def alerts(
    run: Sequence[Mapping[str, float]] = (),
    graphs: Sequence[Sequence[Node]] = (),
    devices: coordinator_pb2.GetDeviceUseResponse | None = None,
) -> list[coordinator_pb2.Alert]:
    return alerts_of(run, graphs, devices or coordinator_pb2.GetDeviceUseResponse())


def test_a_healthy_run_gives_no_alert() -> None:
    graphs = [in_one_pool(step_of_two_pools(3.0))] * 5
    devices = use_of(device("cuda:0", 0.7, 0.9), device("cpu", 0.01, 0.3))
    assert alerts(records(), graphs, devices) == []


def test_a_run_that_has_not_begun_gives_no_alert() -> None:
    assert alerts() == []


@pytest.mark.parametrize("steps", range(1, STEPS))
def test_a_healthy_run_gives_no_alert_after_any_of_its_steps(steps: int) -> None:
    assert alerts(records()[:steps]) == []


@pytest.mark.parametrize(
    ("newest", "steps", "rule", "said"),
    [
        ({"actor/loss": math.nan}, 1, "NOT_FINITE", "actor/loss"),
        ({"actor/loss": math.inf}, 1, "NOT_FINITE", "actor/loss"),
        ({"health/skipped": 1.0}, 2, "STEPS_SKIPPED", "Of the last 10 steps 2 were undone"),
        ({"health/roll_backs": 2.0}, 4, "RUN_WENT_BACK", "took the run back 2 times"),
        ({"reward/std": 0.0}, 10, "REWARD_FLAT", "last 10 steps are equal"),
        ({"groups/all_equal": 7.5}, 10, "GROUPS_ALIKE", "94 %"),
        ({"reward/helpful/errors": 2.0}, 3, "REWARD_ERRORS", "helpful failed 6 times"),
        ({"reward/helpful/dropped_rows": 4.0}, 2, "REWARD_ROWS_DROPPED", "8 rows"),
        ({"teacher/dropped_rows": 3.0}, 2, "TEACHER_ROWS_DROPPED", "6 rows"),
        ({"entropy": 0.001}, 10, "ENTROPY_COLLAPSED", "from 0.30 to 0.0010"),
        ({"kl/mean": 2.5}, 10, "KL_HIGH", "2.50 nats a token away"),
        ({"actor/grad_norm": 84.0}, 1, "GRADIENT_GREW", "the actor is 84, 12 times"),
        ({"clip_fraction_high": 0.2, "clip_fraction_low": 0.15}, 10, "CLIP_HIGH", "35 %"),
        ({"sampler_logprob_diff_mean": 0.2}, 10, "SAMPLES_STALE", "1 steps old"),
        (
            {"sampler_logprob_diff_mean": 0.2, "staleness/max": 0.0},
            10, "SAMPLER_DIFFERS", "0.20 nats",
        ),
        ({"finished_fraction": 0.4}, 10, "COMPLETIONS_CUT", "60 % of completions"),
        (
            {"time/step": 25.0, "time/generate": 21.0},
            3, "STEP_SLOWED", "took 25.0 s, usual were 10.0 s; most of it in generate",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isupper() else "",
)  # fmt: skip
def test_what_goes_wrong_is_said(
    newest: dict[str, float], steps: int, rule: str, said: str
) -> None:
    (alert,) = alerts(records(newest, steps))
    assert alert.rule == rule
    assert said in alert.text
    assert alert.remedy


@pytest.mark.parametrize(
    ("newest", "steps"),
    [
        ({"entropy": 0.001}, RECENT_STEPS - 5),
        ({"kl/mean": 2.5}, 1),
        ({"actor/grad_norm": 20.0}, 1),
        ({"time/step": 25.0}, 2),
        ({"finished_fraction": 0.4}, 3),
        ({"reward/std": 0.0}, RECENT_STEPS - 1),
    ],
)
def test_one_odd_batch_gives_no_alert(newest: dict[str, float], steps: int) -> None:
    assert alerts(records(newest, steps)) == []


def test_kl_that_multiplies_is_said_before_it_is_large() -> None:
    run = [
        {"kl/mean": 0.2 if i < STEPS - RECENT_STEPS else 1.0, "step": i + 1} for i in range(STEPS)
    ]
    (alert,) = alerts(run)
    assert alert.rule == "KL_GROWS"
    assert "from 0.20 to 1.00" in alert.text


def test_a_policy_that_was_certain_from_the_start_has_not_collapsed() -> None:
    assert alerts([{"entropy": 0.001, "step": i + 1} for i in range(STEPS)]) == []


@pytest.mark.parametrize(("newest", "is_said"), [(0.70, True), (0.76, False)])
def test_a_held_out_score_is_said_to_fall_by_more_than_chance(
    newest: float, *, is_said: bool
) -> None:
    # Errors of 0.03 each: two of the difference are 2 * sqrt(2) * 0.03 = 0.085.
    run = records()
    run[9] |= {"held_out/score": 0.8, "held_out/standard_error": 0.03}
    run[19] |= {"held_out/score": 0.75, "held_out/standard_error": 0.03}
    run[39] |= {"held_out/score": newest, "held_out/standard_error": 0.03}
    found = alerts(run)
    assert [alert.rule for alert in found] == ["HELD_OUT_FELL"] * is_said
    assert all("0.100 below that of step 10" in alert.text for alert in found)


def test_a_role_that_waits_is_named_with_whom_it_waits_for() -> None:
    # Of 10 s, actor.generate takes 7, in which the critic's pool does nothing.
    (alert,) = alerts(records(), [step_of_two_pools(7.0)] * 5)
    assert alert.rule == "ROLE_WAITS"
    assert alert.text == "critic waits for actor 70 % of the time."
    assert "Give the actor more devices" in alert.remedy


def test_a_role_that_waits_less_than_half_of_the_time_is_not_named() -> None:
    # 2.5 of 5.5 s.
    assert alerts(records(), [step_of_two_pools(2.5)] * 5) == []


def test_roles_of_one_pool_do_not_wait_for_each_other() -> None:
    assert alerts(records(), [in_one_pool(step_of_two_pools(9.0))] * 5) == []


def test_a_reward_function_may_wait_but_a_reward_model_on_a_gpu_may_not() -> None:
    graphs = [step_of_two_pools(2.5, judge_pool="judges")] * 5
    assert alerts(records(), graphs) == []
    judge = device("cuda:3", 0.5, 0.5)
    judge.service = "reward"
    (alert,) = alerts(records(), graphs, use_of(judge))
    # Of 5.5 s, the critic scores and learns for 3.
    assert alert.text.startswith("reward waits for critic 54 %")


def test_a_full_device_and_an_idle_one_are_said() -> None:
    found = alerts(records(), (), use_of(device("cuda:0", 0.5, 0.99), device("cuda:1", 0.02, 0.5)))
    assert [alert.rule for alert in found] == ["MEMORY_NEARLY_FULL", "DEVICE_IDLE"]
    assert "critic, rank 1, cuda:0 is 99 % full" in found[0].text
    assert "computed 2 % of the last 10 minutes" in found[1].text


def test_an_idle_processor_and_a_short_look_are_no_alert() -> None:
    short = device("cuda:1", 0.0, 0.5, minutes=2)
    assert alerts(records(), (), use_of(device("cpu", 0.0, 0.5), short)) == []


@pytest.mark.parametrize(("steps", "is_said"), [((21, 30, 39), True), ((20, 30, 39), False)])
def test_a_run_that_recovers_again_and_again_is_said(steps: tuple[int, ...], is_said: bool) -> None:
    recoveries = [
        coordinator_pb2.Recovered(step=step, cause=f"actor was killed, {step}", seconds=4.0)
        for step in steps
    ]
    use = coordinator_pb2.GetDeviceUseResponse()
    found = alerts_of(records(), (), use, recoveries)
    assert [alert.rule for alert in found] == ["RECOVERS_OFTEN"] * is_said
    if is_said:
        assert "3 times in the last 20 steps, in 12 s in all" in found[0].text
        assert "actor was killed, 39" in found[0].text


def test_the_most_pressing_alert_comes_first() -> None:
    run = records({"finished_fraction": 0.1})
    run[-1]["actor/loss"] = math.nan
    found = alerts(run, (), use_of(device("cuda:1", 0.0, 0.5)))
    assert [alert.rule for alert in found] == ["NOT_FINITE", "COMPLETIONS_CUT", "DEVICE_IDLE"]
    levels = [alert.level for alert in found]
    assert levels == sorted(levels, reverse=True)
