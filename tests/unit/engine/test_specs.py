"""Specs refuse what no computation could make sense of."""

import pytest
from pydantic import ValidationError

from rolemesh.engine.specs import (
    ActorSpec,
    ArithmeticRewardSpec,
    CriticSpec,
    GaeSpec,
    OptimizerSpec,
    PpoPolicyLossSpec,
    SamplingSpec,
)


@pytest.mark.parametrize(
    ("spec", "field", "value"),
    [
        (ArithmeticRewardSpec, "exact", float("nan")),
        (OptimizerSpec, "learning_rate", float("inf")),
        (OptimizerSpec, "learning_rate", 0.0),
        (SamplingSpec, "temperature", 0.0),
        (SamplingSpec, "top_k", 0),
        (SamplingSpec, "top_p", 1.5),
        (GaeSpec, "gamma", 1.1),
        (PpoPolicyLossSpec, "aggregation", "mean"),
    ],
)
def test_a_senseless_value_is_refused_by_its_field(spec, field, value):
    with pytest.raises(ValidationError) as caught:
        spec(**{field: value})
    (problem,) = caught.value.errors()
    assert field in (*problem["loc"], problem["msg"].split()[2])


@pytest.mark.parametrize(
    ("given", "rate"),
    [({}, 1e-5), ({"weight_decay": 0.1}, 1e-5), ({"learning_rate": 3e-4}, 3e-4)],
)
def test_a_critic_has_its_own_learning_rate_unless_one_is_given(given, rate):
    spec = CriticSpec(model={"path": "model"}, optimizer=given)
    assert spec.optimizer.learning_rate == rate


def test_an_unknown_key_is_refused():
    with pytest.raises(ValidationError, match="learning_rat"):
        OptimizerSpec(learning_rat=1e-3)


def test_norm_length_belongs_to_its_aggregation_alone():
    assert PpoPolicyLossSpec(aggregation="seq_sum_norm", norm_length=8).norm_length == 8
    for wrong in ({"norm_length": 8}, {"aggregation": "seq_sum_norm"}):
        with pytest.raises(ValidationError, match="norm_length"):
            PpoPolicyLossSpec(**wrong)


def test_an_actor_that_samples_keeps_all_layers():
    fields = {
        "model": {"path": "policy", "num_layers": 2},
        "data": {"type": "jsonl", "path": "rows.jsonl"},
    }
    ActorSpec.model_validate(fields)
    with pytest.raises(ValidationError, match=r"num_layers is 2.*leave it out"):
        ActorSpec.model_validate({**fields, "rollout": {"type": "hf", "max_model_len": 64}})
