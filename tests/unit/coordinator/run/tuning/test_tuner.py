"""Tests of what the tuner decides, against worlds whose seconds are known."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rolemesh.coordinator.recipe.sections.tuning import Settings, TuningSpec, key_of
from rolemesh.coordinator.run.saving.progress import TURN_OPERATION, RunProgress
from rolemesh.coordinator.run.saving.turns import Turn
from rolemesh.coordinator.run.tuning.tuner import Tuner
from rolemesh.coordinator.state.store import JournalEntry

SPACE: dict[str, list[Any]] = {"a": [0, 1, 2, 3], "b": [0, 1, 2], "c": [0, 1]}
World = Callable[[Settings], float]


def tuner_of(space: dict[str, list[Any]] = SPACE, **spec: Any) -> Tuner:
    return Tuner(TuningSpec(space={name: tuple(v) for name, v in space.items()}, **spec), space)


def tune(
    tuner: Tuner,
    world: World,
    expect: Callable[[Settings, Settings], float | None],
    *,
    steps: int = 24,
    noise: Callable[[int], float] = lambda step: 1.0,
    failed: Sequence[str] = (),
) -> tuple[list[Turn], list[Settings]]:
    """Turns of a run, and the settings of each of its steps."""
    turns: list[Turn] = []
    seconds: dict[int, float] = {}
    made: list[Settings] = []
    for step in range(1, steps + 1):
        settings = turns[-1].settings if turns else tuner.own
        made.append(settings)
        # Just after a change, and at the begin, a step takes much longer.
        is_new = step <= 2 or (bool(turns) and turns[-1].step == step - 1)
        seconds[step] = world(settings) * noise(step) * (3.0 if is_new else 1.0)
        turn = tuner.next_turn(
            step, turns, seconds, lambda best: lambda one: expect(best, one), failed
        )
        if turn is not None:
            turns.append(turn)
    return turns, made


def multiplied(factors: dict[str, Sequence[float]]) -> World:
    return lambda settings: math.prod(factors[name][value] for name, value in settings.items())  # type: ignore[index]


def exact(world: World) -> Callable[[Settings, Settings], float]:
    return lambda best, settings: world(settings)


def nothing_known(world: World) -> Callable[[Settings, Settings], float]:
    return lambda best, settings: world(best)


BAD = multiplied({"a": [2.0, 1.0, 1.2, 1.5], "b": [1.5, 1.3, 1.0], "c": [1.3, 1.0]})


def test_with_right_expectations_the_best_settings_are_the_first_that_are_tried() -> None:
    turns, made = tune(tuner_of(), BAD, exact(BAD))
    assert turns[0].step == 4  # two steps to warm up, two that count
    assert turns[0].settings == {"a": 1, "b": 2, "c": 1}
    assert turns[0].expected_s == pytest.approx(1.0)
    assert turns[1].step == 7  # one that does not count, two that do
    verdict = turns[1].verdict
    assert verdict is not None
    assert verdict.is_kept
    assert (verdict.measured_s, verdict.before_s) == pytest.approx((1.0, 2.0 * 1.5 * 1.3))
    assert made[-1] == turns[-1].best == {"a": 1, "b": 2, "c": 1}
    assert turns[-1].is_last


@pytest.mark.parametrize("seed", range(3))
def test_with_expectations_that_are_off_the_best_of_all_is_reached_in_20_steps(seed: int) -> None:
    generator = random.Random(seed)
    # What the graph does not know of each value; the noise of a step besides.
    off = {
        name: [math.exp(generator.gauss(0, 0.08)) for _ in values] for name, values in SPACE.items()
    }
    error, spread = multiplied(off), {s: 1 + 0.02 * generator.random() for s in range(99)}
    world: World = lambda settings: BAD(settings) * error(settings)  # noqa: E731
    turns, made = tune(
        tuner_of(),
        world,
        lambda best, one: world(best) * BAD(one) / BAD(best),
        noise=spread.get,  # type: ignore[arg-type]
    )
    every = [dict(zip(SPACE, v, strict=True)) for v in itertools.product(*SPACE.values())]
    best = min(world(settings) for settings in every)
    assert world(tuner_of().own) > 1.5 * best
    assert world(turns[-1].best) <= 1.1 * best
    # It stays from step 21 on.
    assert turns[-1].is_last
    assert turns[-1].step <= 20
    assert made[20:] == [turns[-1].best] * 4


def test_a_wrong_expectation_is_found_out_and_leaves_no_value_untried() -> None:
    # Expected to halve each step, c makes all of them longer. So the best is expected to take twice
    # as long as what is kept first.
    world = multiplied({"a": [2.0, 1.0, 1.2, 1.5], "b": [1.5, 1.3, 1.0], "c": [1.0, 1.3]})
    hoped = multiplied({"a": [2.0, 1.0, 1.2, 1.5], "b": [1.5, 1.3, 1.0], "c": [1.0, 0.5]})
    turns, made = tune(tuner_of(), world, lambda best, one: world(best) * hoped(one) / hoped(best))
    assert made[4] == {"a": 1, "b": 2, "c": 1}
    assert turns[-1].best == {"a": 1, "b": 2, "c": 0}
    assert turns[-1].step <= 20


def test_what_nothing_is_known_of_is_tried_too() -> None:
    turns, made = tune(tuner_of({"a": [0, 1, 2, 3]}), BAD_A, nothing_known(BAD_A))
    assert {key_of(one) for one in made} == {key_of({"a": value}) for value in range(4)}
    assert turns[-1].best == {"a": 1}


BAD_A = multiplied({"a": [2.0, 1.0, 1.2, 1.5]})


def test_a_setting_that_is_no_better_is_given_up_after_one_counted_step() -> None:
    worse = multiplied({"a": [1.0, 1.2]})
    turns, made = tune(tuner_of({"a": [0, 1]}), worse, lambda best, one: 0.5)
    assert [turn.step for turn in turns] == [4, 6]
    assert made == [{"a": 0}] * 4 + [{"a": 1}] * 2 + [{"a": 0}] * 18
    assert turns[1].verdict is not None
    assert turns[1].verdict.why == "it is not shorter by 3.0 %"


def test_a_gain_within_the_noise_is_not_kept() -> None:
    slightly = multiplied({"a": [1.0, 0.95]})
    tuner = tuner_of({"a": [0, 1]}, steps_per_trial=3)
    quiet, _ = tune(tuner, slightly, nothing_known(slightly))
    assert quiet[-1].best == {"a": 1}
    noisy, _ = tune(
        tuner, slightly, nothing_known(slightly), noise=lambda step: 1 + 0.2 * (step % 2)
    )
    assert noisy[-1].best == {"a": 0}


def test_steps_after_a_change_do_not_count() -> None:
    # The first step after a change takes three times as long: counted, all would be given up.
    turns, _ = tune(tuner_of(), BAD, exact(BAD))
    assert turns[1].verdict is not None
    assert turns[1].verdict.measured_s == pytest.approx(1.0)


def test_nothing_is_tried_that_cannot_be_counted_before_the_last_step_of_tuning() -> None:
    turns, made = tune(tuner_of(steps=5), BAD, exact(BAD))
    assert [turn.step for turn in turns] == [4]
    assert turns[0].is_last
    assert made == [tuner_of().own] * 24
    turns, _ = tune(tuner_of(steps=6), BAD, exact(BAD))
    # One counted step has to do.
    assert [turn.step for turn in turns] == [4, 6]
    assert turns[-1].best == {"a": 1, "b": 2, "c": 1}


def test_settings_that_failed_or_that_the_recipe_refuses_are_not_tried() -> None:
    best = {"a": 1, "b": 2, "c": 1}
    _, made = tune(tuner_of(), BAD, exact(BAD), failed=[key_of(best)])
    assert best not in made
    refusing = lambda _, one: None if one["c"] else BAD(one)  # noqa: E731
    _, made = tune(tuner_of(), BAD, refusing)
    assert not any(one["c"] for one in made)
    assert made[-1] == {"a": 1, "b": 2, "c": 0}


def test_a_failure_in_a_trial_goes_back_to_the_best() -> None:
    tuner = tuner_of()
    turns, _ = tune(tuner, BAD, exact(BAD), steps=5)
    assert turns[-1].is_trial
    turn = tuner.given_up(5, turns, dict.fromkeys(range(1, 6), 3.9), "actor was killed")
    assert turn is not None
    assert turn.settings == turn.best == tuner.own
    assert turn.verdict is not None
    assert turn.verdict.has_failed
    assert turn.verdict.why == "something failed: actor was killed"
    assert tuner.given_up(5, [*turns, turn], {}, "again") is None


def test_journal_and_checkpoints_keep_the_turns() -> None:
    tuner = tuner_of()
    turns, _ = tune(tuner, BAD, exact(BAD))
    given_up = tuner.given_up(4, turns[:1], dict.fromkeys(range(1, 5), 3.9), "lost")
    assert given_up is not None
    entries = [JournalEntry(epoch=1, step=0, operation="step.commit", sequence=0,
                            result={"actor_version": 0})]  # fmt: skip
    for step in range(1, 25):
        made = {"next_prompt": step, "actor_version": step, "record": {"step": step}}
        entries.append(
            JournalEntry(epoch=1, step=step, operation="step.commit", sequence=0, result=made)
        )
        told = [turn for turn in turns if turn.step == step]
        told += [given_up] if step == 4 else []
        entries += [
            JournalEntry(
                epoch=1 + index, step=step, operation=TURN_OPERATION, sequence=0,
                # As a store gives it back.
                result=json.loads(json.dumps(turn.to_dict())),
            )
            for index, turn in enumerate(told)
        ]  # fmt: skip
    progress = RunProgress.of_journal(entries)
    assert progress is not None
    assert progress.turns == sorted([*turns, given_up], key=lambda turn: turn.step)
    assert progress.failed_settings == {key_of(turns[0].settings)}
    records = [{"step": float(step)} for step in range(1, 25)]
    marker = json.loads(json.dumps({**progress.to_dict(6), "epoch": 1}))
    of_marker = RunProgress.of_marker(marker, records)
    assert of_marker.turns == [turns[0], given_up]
    progress.rewind(6)
    assert progress.turns == [turns[0], given_up]
    progress.rewind(3)
    assert progress.turns == []
    # Else the run could go back behind it, and fail again and again.
    assert progress.failed_settings == {key_of(turns[0].settings)}


def test_a_run_that_is_resumed_at_any_step_decides_as_one_that_was_left_alone() -> None:
    tuner = tuner_of()
    turns, made = tune(tuner, BAD, exact(BAD))
    seconds = {step: BAD(made[step - 1]) for step in range(1, 25)}
    for step in range(1, 25):
        before = [Turn.from_dict(turn.to_dict()) for turn in turns if turn.step < step]
        known = {one: spent for one, spent in seconds.items() if one <= step}
        again = tuner_of().next_turn(step, before, known, lambda best: BAD)
        assert again == next((turn for turn in turns if turn.step == step), None)
