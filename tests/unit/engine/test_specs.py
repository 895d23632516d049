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
    RewardSpec,
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


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"type": "muon", "betas": (0.9, 0.9)}, "betas is given, but type is 'muon'.*adamw.betas"),
        ({"momentum": 0.9}, "momentum is given, but type is 'adamw'.*or give type: muon"),
        ({"type": "muon", "momentum": 1.0}, "less than 1"),
        ({"type": "muon", "ns_steps": 0}, "greater than or equal to 1"),
        ({"type": "sgd"}, "'sgd'.*'adamw', 'muon'"),
        ({"type": "adamw_8bit"}, "8 bits share a scale .* give type muon"),
        ({"type": "AdamW8bit"}, "8 bits share a scale .* give type muon"),
    ],
)
def test_settings_of_another_optimizer_are_refused_with_what_to_do(given, says):
    with pytest.raises(ValidationError, match=says):
        CriticSpec(model={"path": "model"}, optimizer=given)


def test_an_optimizer_without_a_type_is_adamw():
    assert CriticSpec(model={"path": "model"}, optimizer={"eps": 1e-6}).optimizer.type == "adamw"


@pytest.mark.parametrize(
    ("role", "fields"),
    [
        (CriticSpec, {"model": {"path": "model", "adapter": {"rank": 2}}}),
        (
            RewardSpec,
            {
                "source": {
                    "type": "classifier",
                    "model": {"path": "model", "adapter": {"rank": 2}},
                },
                "data": {"type": "jsonl", "path": "pairs.jsonl"},
            },
        ),
    ],
)
def test_muon_with_an_adapter_is_refused(role, fields):
    with pytest.raises(ValidationError, match=r"'muon', but model\.adapter is given"):
        role(**fields, optimizer={"type": "muon"})


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
