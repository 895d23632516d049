"""Tests of what people and programs see of a run."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from rolemesh.coordinator.commands.terminal.console import (
    JsonConsole,
    LiveConsole,
    LoggingObserver,
    PlainConsole,
    SturdyConsole,
)
from rolemesh.coordinator.commands.terminal.summary import print_summary
from rolemesh.coordinator.dataflow.observer import RECOVERING
from rolemesh.coordinator.run.folders.summary import RunSummary
from rolemesh.coordinator.run.results.evaluation import Evaluation
from rolemesh.coordinator.run.saving.best import BestCheckpoint, HeldOut
from rolemesh.coordinator.state.store import RunState

RECORD = {
    "step": 3,
    "reward/mean": 0.25,
    "kl/mean": 0.0123,
    "entropy": 1.5,
    "completion_length/mean": 6.5,
    "tokens_per_second": 321.0,
    "time/generate": 2.0,
    "time/weight_sync": 0.5,
    "time/update_actor": 4.0,
    "time/reward_compute_cost": 0.125,
    "time/step": 7.0,
}


def summary(directory: Path, **changes: object) -> RunSummary:
    def score(step: int, value: float) -> Evaluation:
        return Evaluation(
            step=step,
            score=value,
            standard_error=0.01,
            num_prompts=64,
            metrics={"accuracy/mean": value / 2, "accuracy/standard_error": 0.02},
        )

    values: dict[str, object] = {
        "run_id": "x-1",
        "name": "x",
        "state": RunState.SUCCEEDED,
        "failure": "",
        "seed": 0,
        "steps": 4,
        "num_steps": 4,
        "held_out_before": score(0, 0.125),
        "held_out_after": score(4, 0.75),
        "mean_reward_first_steps": 0.1,
        "mean_reward_last_steps": 0.6,
        "tokens": 12345,
        "seconds": 100.0,
        "seconds_by_phase": {"generate": 30.0, "update_actor": 60.0, "reward": 0.01},
        "versions": {},
        "git_commit": None,
        "coordinator_traffic": {},
        "directory": directory,
        "model_directory": directory / "model",
        **changes,
    }
    return RunSummary(**values)  # type: ignore[arg-type]


def test_plain_line_tells_metrics_and_where_time_went() -> None:
    stream = io.StringIO()
    PlainConsole(stream).on_step(RECORD)
    line = stream.getvalue()
    for text in ("step 3", "reward 0.250", "kl 0.0123", "entropy 1.500", "length 6.5", "tok/s 321"):
        assert text in line
    assert "7.0 s: gen 2.0 sync 0.5 upd actor 4.0 reward_compute_cost 0.1" in line
    # Not measured is not 0.
    assert "held out" not in line


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ({"nll": 2.5}, "nll 2.500"),
        (
            {"preference_accuracy": 0.75, "chosen_reward": 1.5, "rejected_reward": -0.5},
            "accuracy 0.750 chosen 1.500 rejected -0.500",
        ),
        (
            {"reward/mean": 0.5, "cost/mean": 0.25, "cost/multiplier": 0.875},
            "reward 0.500 cost 0.250 lambda 0.875",
        ),
    ],
)
def test_a_line_tells_the_curve_of_each_kind_of_training(
    metrics: dict[str, float], shown: str
) -> None:
    stream = io.StringIO()
    PlainConsole(stream).on_step({"step": 1, "time/step": 1.0, "tokens_per_second": 9.0, **metrics})
    assert f"step 1 {shown} tok/s 9 |" in stream.getvalue()


@pytest.mark.parametrize(
    ("curve", "word", "held_out"),
    [("reward/mean", "reward", "held_out/score"), ("nll", "nll", "held_out/loss")],
)
def test_headings_stand_above_the_values_of_every_step(
    curve: str, word: str, held_out: str
) -> None:
    out = io.StringIO()
    console = LiveConsole(Console(file=out, width=200))
    record = {"step": 1, "time/step": 1.0, "tokens_per_second": 9.0, curve: 2.5}
    console.on_step(record)
    console.on_step({**record, held_out: 0.5})
    console.close()
    heading, first, second = out.getvalue().splitlines()[:3]
    assert heading.count("held out") == 1
    for name, values in ((word, ("2.500", "2.500")), ("held out", ("-", "0.500"))):
        end = heading.index(name) + len(name)
        assert (first[:end].split()[-1], second[:end].split()[-1]) == values


def test_a_line_names_each_phase_by_its_word_and_nothing_that_is_no_phase() -> None:
    phases = ("wake", "sleep", "publish_weights", "proximal", "cost", "update_reward", "other")
    record = {
        **{"step": 1, "time/step": 9.0, "dataflow/critical_path_seconds": 8.0},
        **{f"time/{phase}": float(number) for number, phase in enumerate(phases, start=1)},
    }
    stream = io.StringIO()
    PlainConsole(stream).on_step(record)
    line = stream.getvalue().strip()
    words = "prox 4.0 cost 5.0 upd reward 6.0 publish 3.0 sleep 2.0 wake 1.0 other 7.0"
    assert line.endswith(f"9.0 s: {words}")


def test_json_is_one_object_a_line() -> None:
    stream = io.StringIO()
    shown = JsonConsole(stream)
    shown.on_event("hello")
    shown.on_phase("actor", "generate", 1, 2)
    shown.on_step(RECORD)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["type"] for line in lines] == ["event", "step"]
    assert lines[0]["text"] == "hello"
    assert (lines[1]["step"], lines[1]["metrics"]) == (3, RECORD)


def test_live_console_keeps_rows_and_drops_activity() -> None:
    stream = io.StringIO()
    shown = LiveConsole(Console(file=stream, force_terminal=True, width=160))
    shown.on_phase("actor", "generate", 3, 64)
    shown.on_phase("critic", "values", 0, 0)
    shown.on_phase("critic", "", 0, 0)
    shown.on_step(RECORD)
    shown.on_event("saved")
    shown.close()
    output = stream.getvalue()
    assert "where the time went" in output
    assert "0.250" in output
    assert "saved" in output


def test_live_console_tells_what_a_recovery_waits_for_and_since_when(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stream = io.StringIO()
    shown = LiveConsole(Console(file=io.StringIO(), width=160))

    def drawn() -> list[str]:
        stream.truncate(stream.seek(0))
        Console(file=stream, width=160).print(shown._activity())
        return [" ".join(line.split()) for line in stream.getvalue().splitlines()]

    try:
        shown.on_phase("actor", "update", 3, 64)
        shown.on_phase(RECOVERING, "actor was killed; actor is started again", 0, 0)
        shown.on_phase("actor", "start", 0, 0)
        now = 105.0
        # Another attempt of the same recovery.
        shown.on_phase(RECOVERING, "critic does not answer; critic is waited for", 0, 0)
        now = 107.0
        assert drawn() == [
            "recovering critic does not answer; critic is waited for 7 s",
            "actor start 7 s",
        ]
        shown.on_phase(RECOVERING, "", 0, 0)
        assert drawn() == ["actor start 7 s"]
    finally:
        shown.close()


def test_logging_observer_hands_everything_on() -> None:
    stream = io.StringIO()
    observer = LoggingObserver(PlainConsole(stream))
    observer.on_phase("actor", "start", 0, 0)
    observer.on_event("hello")
    observer.on_step(RECORD)
    assert len(stream.getvalue().splitlines()) == 3


def test_a_console_that_is_gone_is_logged_once_and_never_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class GoneConsole(PlainConsole):
        calls = 0

        def on_event(self, text: str) -> None:
            self.calls += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    shown = GoneConsole()
    observer = LoggingObserver(shown)
    with caplog.at_level(logging.INFO):
        observer.on_event("hello")
        observer.on_step(RECORD)
        observer.on_phase("actor", "start", 0, 0)
        observer.show(lambda: shown.on_event("summary"))
    assert shown.calls == 1
    messages = [record.getMessage() for record in caplog.records]
    assert sum("the console is gone" in message for message in messages) == 1
    assert any(message.startswith("step 3: ") for message in messages)


def test_a_broken_pipe_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    try:
        with pytest.raises(BrokenPipeError):
            print_summary(SturdyConsole(file=stream), summary(tmp_path))
    finally:
        with contextlib.suppress(BrokenPipeError):
            stream.close()


def test_summary_tells_before_after_files_and_curves(tmp_path: Path) -> None:
    stream = io.StringIO()
    print_summary(Console(file=stream, width=200), summary(tmp_path))
    text = stream.getvalue()
    for expected in (
        "x-1 succeeded: 4 of 4 steps",
        "held-out score (64 prompts)",
        "0.125 +- 0.010",
        "0.750 +- 0.010",
        "0.375 +- 0.020",
        "12,345 training tokens in 100 s: update_actor 60 s, generate 30 s",
        str(tmp_path / "model"),
        f"--logdir {tmp_path / 'tensorboard'}",
    ):
        assert expected in text


@pytest.mark.parametrize(("step", "is_told"), [(3, True), (4, False)])
def test_summary_tells_how_to_export_the_best_checkpoint_if_it_is_not_the_last(
    step: int, is_told: bool, tmp_path: Path
) -> None:
    best = BestCheckpoint(metric="held_out/score", held_out=HeldOut(step, 0.5), directory=tmp_path)
    stream = io.StringIO()
    print_summary(Console(file=stream, width=200), summary(tmp_path, best=best))
    assert f"best checkpoint: step {step}, held_out/score 0.5" in stream.getvalue()
    command = f"to export it: rolemesh export {tmp_path} --step {step} --to FOLDER"
    assert (command in stream.getvalue()) == is_told


def test_summary_tells_losses_before_and_after_where_there_is_no_score(tmp_path: Path) -> None:
    def loss(step: int, value: float) -> Evaluation:
        metrics = {"loss": value, "preference_accuracy": 1 - value / 2, "chosen_reward": 7.0}
        return Evaluation(step=step, num_prompts=32, metrics=metrics)

    nothing = {"mean_reward_first_steps": None, "mean_reward_last_steps": None}
    stream = io.StringIO()
    found = summary(
        tmp_path, held_out_before=loss(0, 0.75), held_out_after=loss(4, 0.25), **nothing
    )
    print_summary(Console(file=stream, width=200), found)
    rows = [
        [cell.strip() for cell in line.split("\u2502")[1:-1]]
        for line in stream.getvalue().splitlines()
        if "held-out" in line
    ]
    assert rows == [
        ["held-out loss (32 rows)", "0.750", "0.250"],
        ["held-out accuracy", "0.625", "0.875"],
    ]
    # Nothing in the table has one.
    assert "standard error" not in stream.getvalue()
    assert json.loads(json.dumps(found.to_dict()))["held_out"]["after"] == {
        "step": 4, "score": None, "standard_error": None, "num_prompts": 32,
        "metrics": {"loss": 0.25, "preference_accuracy": 0.875, "chosen_reward": 7.0},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("planned_s", "measured_s", "told"),
    [
        (6.0, 5.0, "a step: planned 6 s, measured 5 s (error +20%)"),
        (1.25, 2.5, "a step: planned 1.25 s, measured 2.5 s (error -50%)"),
        (1.25, None, "planned: 1.25 s a step; too few steps were made to measure one"),
        (None, 2.5, ""),
    ],
)
def test_summary_tells_the_planned_step_beside_the_measured_one(
    planned_s: float | None, measured_s: float | None, told: str, tmp_path: Path
) -> None:
    stream = io.StringIO()
    found = summary(tmp_path, planned_step_s=planned_s, measured_step_s=measured_s)
    print_summary(Console(file=stream, width=200), found)
    assert told in stream.getvalue()
    assert ("a step" in stream.getvalue()) == (planned_s is not None)
    assert found.to_dict()["step_s"] == {"planned": planned_s, "measured": measured_s}


def test_summary_of_a_run_that_ended_early_has_no_empty_promises(tmp_path: Path) -> None:
    stream = io.StringIO()
    ended = summary(
        tmp_path,
        state=RunState.STOPPED,
        held_out_after=None,
        mean_reward_first_steps=None,
        mean_reward_last_steps=None,
        model_directory=None,
        steps=0,
    )
    print_summary(Console(file=stream, width=200), ended)
    assert "model " not in stream.getvalue()
    assert "training reward" not in stream.getvalue()


class Clock:
    """A clock that tests move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def test_a_call_that_takes_long_is_told_in_lines_that_grow_rare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, stream = Clock(monkeypatch), io.StringIO()
    shown = PlainConsole(stream)
    shown.on_phase("actor", "generate", 0, 0)
    told_at = []
    for second in range(1, 201):
        clock.now += 1
        before = stream.getvalue()
        shown.on_phase("actor", "generate: decode", second, 400)
        if stream.getvalue() != before:
            told_at.append(second)
    assert told_at == [10, 30, 70, 130, 190]
    # 210 units are left, at one a second.
    assert "actor: generate: decode 190/400, about 3 min left" in stream.getvalue()
    shown.on_phase("actor", "", 0, 0)
    clock.now += 60
    shown.on_phase("actor", "update", 0, 0)
    assert "update" not in stream.getvalue()


def test_a_reward_that_does_not_answer_is_told_while_the_run_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, stream = Clock(monkeypatch), io.StringIO()
    shown = PlainConsole(stream)
    shown.on_phase("reward", "compute_reward", 0, 0)
    for second in range(1, 13):
        clock.now += 1
        trouble = f"reward judge does not answer, try {second}, for {second} s"
        shown.on_phase("reward", f"compute_reward: {trouble}", 0, 1)
    line = "reward: compute_reward: reward judge does not answer, try 10, for 10 s"
    assert line in stream.getvalue()


def test_the_first_step_is_told_by_its_calls_until_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, stream = Clock(monkeypatch), io.StringIO()
    plain = PlainConsole(stream, num_steps=16)
    live = LiveConsole(Console(file=io.StringIO(), width=160), num_steps=16)
    drawn = io.StringIO()
    try:
        clock.now += 10
        for seconds in (30.0, 31.0, 40.0, 49.0):
            for shown in (LoggingObserver(plain), live):
                shown.on_estimate(1, seconds, 10.0)
        clock.now += 14
        Console(file=drawn, width=160).print(live._activity())
        record = {"step": 1, "time/step": 50.0, "tokens_per_second": 1.0}
        plain.on_step(record)
        # A later attempt knows less than what was made.
        plain.on_estimate(2, 500.0, 1.0)
    finally:
        live.close()
    first, corrected, made = (line[9:] for line in stream.getvalue().splitlines())
    assert first == "step 1 takes about 30 s, by its calls so far | about 8 min left"
    assert corrected == "step 1 takes about 40 s, by its calls so far | about 10 min left"
    assert made.endswith("| about 12 min left")
    # 16 steps of 49 s, of which the first one has gone on for 24 s.
    assert "step 0 of 16, about 13 min left" in drawn.getvalue()


def test_consoles_tell_how_long_the_run_takes_still(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(monkeypatch), io.StringIO()
    plain = PlainConsole(stream, num_steps=5)
    live = LiveConsole(Console(file=io.StringIO(), width=160), num_steps=5)
    drawn = io.StringIO()
    try:
        for step in (1, 2):
            clock.now += 100
            for shown in (plain, live):
                shown.on_step({"step": step, "time/step": 60.0, "tokens_per_second": 1.0})
        clock.now += 30
        Console(file=drawn, width=160).print(live._activity())
        for step in (3, 4, 5):
            plain.on_step({"step": step, "time/step": 60.0, "tokens_per_second": 1.0})
    finally:
        live.close()
    first, second, *_, last = stream.getvalue().splitlines()
    # The first is all that is known; between two steps lies more than a step.
    assert first.endswith("| about 4 min left")
    assert second.endswith("| about 4 min left")
    assert "left" not in last
    # Three steps of 80 s, of which one has gone on for 30 s.
    assert "step 2 of 5, about 4 min left" in drawn.getvalue()


def test_the_log_has_no_line_for_each_second_of_a_wait(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    observer = LoggingObserver(PlainConsole(io.StringIO()))
    for second in range(1, 9):
        observer.on_phase("reward", f"compute_reward: no answer, try 2, for {second} s", 0, 1)
    assert len(caplog.records) == 1


def test_a_step_whose_seconds_are_not_known_is_shown_without_them() -> None:
    lines, rows = io.StringIO(), io.StringIO()
    logged = {"step": 1, "reward/mean": 0.25}
    PlainConsole(lines, num_steps=4).on_step(logged)
    live = LiveConsole(Console(file=rows, width=120), num_steps=4)
    live.on_step(logged)
    live.close()
    assert lines.getvalue().strip().endswith("step 1 reward 0.250")
    assert "0.250" in rows.getvalue()
    assert " s:" not in rows.getvalue()
