"""The best step of a run, and the end of its patience, against plain loops."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Literal

import pytest
from support.fake_recipes import fake_recipe

from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.checkpoints import BestSpec
from rolemesh.coordinator.recipe.sections.run_section import RunSpec
from rolemesh.coordinator.run.results.evaluation import Evaluation
from rolemesh.coordinator.run.saving.best import BestOfRun, HeldOut, best_step, stalled
from rolemesh.coordinator.run.saving.progress import RunProgress

SCORE = "held_out/score"


def records(*values: float | None) -> list[dict[str, float]]:
    """Of steps 1, 2, ...; None: the step was not evaluated."""
    return [
        {"step": float(step), **({} if value is None else {SCORE: value})}
        for step, value in enumerate(values, start=1)
    ]


def run_spec(**run: Any) -> RunSpec:
    evaluation = {"num_prompts": 4, "every_steps": 1}
    return fake_recipe(**{"evaluation": evaluation, "checkpoint": {"keep_best": {}}, **run}).run


def progress(*values: float | None, before: float | None = None) -> RunProgress:
    found = RunProgress()
    if before is not None:
        found.evaluated(
            Evaluation(step=0, score=before, standard_error=0.1, num_prompts=4, metrics={})
        )
    for record in records(*values):
        found.commit(int(record["step"]), 8, 2, record)
        found.recorded(record)
    return found


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_best_step_is_the_first_of_the_best_values(mode: Literal["max", "min"]) -> None:
    spec = BestSpec(mode=mode)
    pick = max if mode == "max" else min
    for values in itertools.product((None, 0.0, 0.5, 1.0), repeat=4):
        found = best_step(spec, records(*values))
        there = [value for value in values if value is not None]
        if not there:
            assert found is None
        else:
            assert found == HeldOut(values.index(pick(there)) + 1, pick(there))


def test_only_steps_that_count_can_be_best() -> None:
    assert best_step(BestSpec(), records(0.9, 0.2, 0.5), among=[2, 3]) == HeldOut(3, 0.5)
    assert best_step(BestSpec(), records(0.9), among=[]) is None
    assert best_step(None, records(0.9)) is None


@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_value_counts_as_better_by_more_than_the_least_gain(mode: Literal["max", "min"]) -> None:
    sign = 1.0 if mode == "max" else -1.0
    values = [HeldOut(step, sign * value) for step, value in enumerate((2.0, 2.5, 3.5, 3.75, 3.5))]
    assert stalled(values, mode, 1.0) == (values[2], 2)
    # From 2.0 to 3.0 is not more than 1.
    assert stalled([HeldOut(0, sign * 2.0), HeldOut(1, sign * 3.0)], mode, 1.0)[1] == 1
    assert stalled(values, mode, 0.0) == (values[3], 1)
    assert stalled(values[:1], mode, 0.0) == (values[0], 0)
    assert stalled([], mode, 0.0) == (None, 0)


def test_patience_counts_evaluations_and_begins_before_the_first_step() -> None:
    stops = run_spec(early_stopping={"patience": 2, "min_delta": 0.1})
    assert BestOfRun(stops, progress(before=0.5)).early_stop() == ""
    assert BestOfRun(stops, progress(0.4, None, None, before=0.5)).early_stop() == ""
    told = BestOfRun(stops, progress(0.4, None, 0.6, before=0.5)).early_stop()
    assert told == (
        "early stopping after step 3: held_out/score was 0.5 after step 0, and no better by more "
        "than 0.1 in 2 evaluations since then (run.early_stopping.patience is 2)"
    )
    assert BestOfRun(stops, progress(0.4, None, 0.7, 0.7, before=0.5)).early_stop() == ""
    assert BestOfRun(run_spec(), progress(0.4, 0.3, 0.2, before=0.5)).early_stop() == ""


def test_a_step_that_is_taken_back_is_neither_best_nor_counted() -> None:
    made = progress(0.3, 0.9, 0.2, 0.2, before=0.1)
    best = BestOfRun(run_spec(early_stopping={"patience": 2}), made)
    assert best.step() == 2
    assert best.early_stop()
    made.roll_back(1)
    assert best.step() == 1
    assert best.early_stop() == ""


def test_an_evaluation_without_the_metric_is_named() -> None:
    best = BestOfRun(run_spec(checkpoint={"keep_best": {"metric": "held_out/loss"}}), progress())
    found = Evaluation(step=0, score=0.5, standard_error=0.1, num_prompts=4, metrics={"nll": 2.0})
    with pytest.raises(
        RunError,
        match=r"keep_best\.metric is 'held_out/loss'.*give one of held_out/nll, held_out/score",
    ):
        best.check(found)
    BestOfRun(run_spec(checkpoint={"keep_best": {"metric": "held_out/nll"}}), progress()).check(
        found
    )


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (
            {"evaluation": {"num_prompts": 0, "every_steps": 1}},
            r"keep_best\.metric is 'held_out/score', but evaluation\.num_prompts is 0.*give at "
            r"least 1",
        ),
        ({"evaluation": {"num_prompts": 4}}, r"but evaluation\.every_steps is 0.*give at least 1"),
        (
            {"checkpoint": {}, "early_stopping": {"patience": 3}},
            r"early_stopping\.patience is 3, but checkpoint\.keep_best.*give checkpoint\.keep_best",
        ),
        ({"checkpoint": {"keep_best": {"metric": "score"}}}, r"keep_best\.metric"),
    ],
)
def test_settings_without_evaluations_are_refused(run: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        run_spec(**run)


def test_a_run_whose_steps_a_client_makes_keeps_no_best() -> None:
    values = fake_recipe().model_dump(mode="json") | {"algorithm": {"type": "external"}}
    values["run"]["evaluation"]["every_steps"] = 1
    values["run"]["checkpoint"]["keep_best"] = {}
    with pytest.raises(ValueError, match=r"run\.checkpoint\.keep_best.*'external'.*leave it out"):
        Recipe.model_validate(values)


def test_nothing_is_saved_where_no_checkpoint_is(tmp_path: Path) -> None:
    assert BestOfRun(run_spec(), progress(0.5)).saved(tmp_path) is None
