"""Every part that a recipe can name has its numbers, and reads and makes what its spec says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from support.loss_graphs import graph_of

from rolemesh.engine.algorithms.estimators.estimation import (
    Controllers,
    estimate_advantages,
    estimator_for,
)
from rolemesh.engine.algorithms.losses.base import loss_for, make_loss
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.granted.own_functions import OwnFunctions
from rolemesh.engine.layout.payload import ColumnMissingError
from rolemesh.engine.specs import (
    EstimatorPartSpec,
    EstimatorSpec,
    FixedKlSpec,
    GaeSpec,
    GdpoSpec,
    KlPenaltySpec,
    LossSpec,
    OverlongSpec,
    OwnFunctionSpec,
    PartSpec,
    PassAtKSpec,
    PpoPolicyLossSpec,
    PythonEstimatorSpec,
    PythonPolicyLossSpec,
    SafeRlhfSpec,
    TracedLossSpec,
)


def members(union: Any) -> list[type[Any]]:
    """Classes of a union discriminated on `type`."""
    return list(get_args(get_args(union)[0]))


EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "own_losses.py"
OWN = {
    PythonPolicyLossSpec: f"{EXAMPLE}:clipped",
    PythonEstimatorSpec: f"{EXAMPLE}:group_relative",
}
"""Functions of the specs that name one."""
LOADED = OwnFunctions({name: OwnFunctionSpec(function=name) for name in OWN.values()})
FIELDS: dict[type[Any], dict[str, Any]] = {
    **{spec_class: {"function": name} for spec_class, name in OWN.items()},
    GdpoSpec: {"weights": {"form": 1.0}},
    PassAtKSpec: {"k": 2},
    TracedLossSpec: {
        "inputs": [{"name": "logprobs", "rank": 1}],
        "nodes": graph_of(lambda logprobs: (logprobs.sum(), {})),
    },
}
"""What a spec needs, or needs for groups as small as those here."""


def smallest(spec_class: type[Any]) -> Any:
    return spec_class(**FIELDS.get(spec_class, {}))


ESTIMATORS = pytest.mark.parametrize(
    "spec_class", members(EstimatorSpec), ids=lambda spec_class: spec_class.__name__
)


def every_column() -> Experience:
    """Four rows of two prompts with all columns that any estimator reads."""
    lengths = [2, 1, 3, 1]
    numbers = [torch.linspace(-1, -0.5, n) for n in lengths]
    columns = {
        name: Column.ragged(ColumnKind.COMPLETION, numbers, torch.float32)
        for name in (
            *("logprobs", "reference_logprobs", "proximal_logprobs", "teacher_logprobs"),
            "values",
        )
    }
    masks = [[True] * n for n in lengths]
    columns["loss_mask"] = Column.ragged(ColumnKind.COMPLETION, masks, torch.bool)
    for name, row in {
        "rewards": [1.0, 0.0, 0.5, 0.25],
        "reward/form": [0.0, 0.0, 1.0, 0.0],
        "costs": [0.0, 1.0, 2.0, 1.0],
        "preference": [1.0, -1.0, 0.0, 0.0],
    }.items():
        columns[name] = Column(ColumnKind.ROW, torch.tensor(row))
    columns["prompt_ids"] = Column(ColumnKind.ROW, torch.tensor([4, 4, 4, 2]))
    columns["sample_indexes"] = Column(ColumnKind.ROW, torch.tensor([0, 1, 2, 0]))
    return Experience(columns)


def estimate(spec: EstimatorPartSpec, experience: Experience) -> tuple[Experience, Any]:
    needed = spec.baseline_columns()
    baseline = every_column().slice(2, 4).require(needed) if needed else None
    return estimate_advantages(experience, spec, Controllers.from_spec(spec), baseline, LOADED)


@ESTIMATORS
def test_an_estimator_reads_and_makes_what_its_spec_says(
    spec_class: type[EstimatorPartSpec],
) -> None:
    specs = [smallest(spec_class)]
    if issubclass(spec_class, KlPenaltySpec):
        specs.append(specs[0].model_copy(update={"kl_in_reward": FixedKlSpec()}))
    for spec in specs:
        experience = every_column().require(spec.columns())
        result, metrics = estimate(spec, experience)
        assert set(result.columns) == set(spec.makes())
        assert result.num_rows == 4
        assert all(isinstance(number, float) for number in metrics.values())
        for name in spec.columns():
            rest = Experience({n: c for n, c in experience.columns.items() if n != name})
            with pytest.raises(ColumnMissingError, match=f"'{name}' is missing"):
                estimate(spec, rest)


@ESTIMATORS
def test_optional_columns_change_metrics_alone(spec_class: type[EstimatorPartSpec]) -> None:
    spec = smallest(spec_class)
    bare, fewer = estimate(spec, every_column().require(spec.columns()))
    names = dict.fromkeys((*spec.columns(), *spec.optional_columns()))
    rich, more = estimate(spec, every_column().require(names))
    for name, column in bare.columns.items():
        assert torch.equal(column.values, rich[name].values)
    assert fewer.items() <= more.items()
    assert (len(more) > len(fewer)) == bool(set(spec.optional_columns()) - set(spec.columns()))


@pytest.mark.parametrize(
    "spec_class", members(LossSpec), ids=lambda spec_class: spec_class.__name__
)
def test_a_loss_of_a_recipe_can_be_made(spec_class: type[PartSpec]) -> None:
    spec = smallest(spec_class)
    loss = make_loss(spec, LOADED)
    assert loss.columns == spec.columns()
    assert "loss_mask" in loss.columns


def test_a_second_registration_is_refused() -> None:
    with pytest.raises(ValueError, match="GaeSpec has an estimator already"):
        estimator_for(GaeSpec)(lambda given, spec: (given.experience, {}))
    with pytest.raises(ValueError, match="PpoPolicyLossSpec has a loss already"):
        loss_for(PpoPolicyLossSpec)(object)


def test_a_spec_without_numbers_is_refused_with_those_that_have_some() -> None:
    class OddSpec(EstimatorPartSpec):
        def columns(self) -> tuple[str, ...]:
            return ()

        def makes(self) -> tuple[str, ...]:
            return ()

    with pytest.raises(ValueError, match=r"no estimator for OddSpec: give one of .*'GaeSpec'"):
        estimate_advantages(every_column(), OddSpec())
    with pytest.raises(ValueError, match=r"no loss for OddSpec: give one of .*PpoPolicyLossSpec"):
        make_loss(OddSpec())


def test_a_spec_that_does_not_say_what_it_reads_cannot_be_made() -> None:
    class SilentSpec(EstimatorPartSpec):
        pass

    with pytest.raises(TypeError, match=r"abstract methods .*columns.*makes"):
        SilentSpec()  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"max_length": 4, "buffer": 5}, "buffer is 5 and max_length is 4"),
        ({"max_length": 4, "buffer": 0}, "buffer"),
        ({"max_length": 4, "buffer": 2, "penalty": 0.0}, "penalty"),
    ],
)
def test_a_senseless_overlong_section_is_refused(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        OverlongSpec(**wrong)


@pytest.mark.parametrize("field", ["initial_multiplier", "multiplier_rate", "max_multiplier"])
def test_a_multiplier_that_cannot_grow_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        SafeRlhfSpec(**{field: 0.0})
