import math

from rolemesh.coordinator.api.http import models
from rolemesh.coordinator.api.http.conversion import to_metrics, to_plain
from rolemesh.v1 import coordinator_pb2


def test_times_states_and_numbers_become_what_json_has() -> None:
    run = coordinator_pb2.Run(
        run_id="r",
        state=coordinator_pb2.RUN_STATE_SUCCEEDED,
        step=2**60,
        metrics={"a": 0.5, "b": math.nan, "c": math.inf},
    )
    run.created_at.FromNanoseconds(1_767_225_600_250_000_000)
    run.updated_at.FromNanoseconds(1_767_225_601_000_000_000)

    plain = to_plain(run)

    assert plain["state"] == "succeeded"
    assert plain["step"] == 2**60
    assert plain["metrics"] == {"a": 0.5, "b": None, "c": None}
    assert plain["created_at"] == "2026-01-01T00:00:00.250000Z"
    assert plain["updated_at"] == "2026-01-01T00:00:01.000000Z"
    assert list(plain) == [field.name for field in run.DESCRIPTOR.fields]


def test_what_may_be_absent_is_null_and_zero_is_not_absent() -> None:
    node = coordinator_pb2.DataflowNode(name="actor.update", started_s=0.0, policy_version=0)

    plain = to_plain(node)

    assert plain["started_s"] == 0.0
    assert plain["policy_version"] == 0
    assert plain["ended_s"] is None
    assert plain["after"] == []


def test_an_event_has_the_member_that_happened_alone() -> None:
    event = coordinator_pb2.RunEvent(
        event_id="7", step=3, note=coordinator_pb2.Note(text="critic is back")
    )
    event.time.FromNanoseconds(1_767_225_600_000_000_000)

    assert to_plain(event) == {
        "event_id": "7",
        "time": "2026-01-01T00:00:00.000000Z",
        "step": 3,
        "note": {"text": "critic is back"},
    }


def test_float32_is_written_with_the_digits_that_it_has() -> None:
    sample = coordinator_pb2.Sample(logprobs=[-0.1, math.nan, 1e-30])

    first, second, third = to_plain(sample)["logprobs"]

    assert len(str(first)) < len(str(sample.logprobs[0]))
    # Read back as float32, it is the same number.
    assert coordinator_pb2.Sample(logprobs=[first]).logprobs[0] == sample.logprobs[0]
    assert coordinator_pb2.Sample(logprobs=[third]).logprobs[0] == sample.logprobs[2]
    assert second is None


def test_metrics_are_named_columns_and_zero_means_that_all_were_sent() -> None:
    answer = coordinator_pb2.GetMetricsResponse(
        steps=[1, 2],
        series=[
            coordinator_pb2.MetricSeries(name="loss", values=[0.25, math.nan]),
            coordinator_pb2.MetricSeries(name="huge", values=[1.5e308, 1.5e308]),
        ],
    )

    assert to_metrics(answer) == {
        "steps": [1, 2],
        "series": {"loss": [0.25, None], "huge": [1.5e308, 1.5e308]},
        "next_step": None,
    }
    answer.next_step = 3
    assert to_metrics(answer)["next_step"] == 3


def test_every_state_and_level_has_its_word() -> None:
    for number in coordinator_pb2.RunState.values()[1:]:
        change = to_plain(coordinator_pb2.RunStateChange(state=number))
        models.RunStateChange.model_validate(change)
    for number in coordinator_pb2.AlertLevel.values()[1:]:
        models.Alert.model_validate(to_plain(coordinator_pb2.Alert(level=number)))
