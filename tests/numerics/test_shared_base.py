"""Tests of frozen weights that models of one process hold once."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from support.rollout_checks import load_trainer_model, rounded_copy
from support.tiny_models import write_tiny_llama

from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.scoring_model import VALUE_HEAD, ScoringModel
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.specs import AdapterSpec, HfSpec, ModelSpec, Numerics

ADAPTER = AdapterSpec(rank=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("base") / "model")


def policy(folder: Path, *, seed: int = 0, numerics: Numerics = "exact", **spec: str) -> CausalLm:
    adapter = ADAPTER.model_copy(update={"seed": seed})
    return CausalLm(ModelSpec(path=folder, adapter=adapter, **spec), numerics=numerics)


def places(model: CausalLm | ScoringModel) -> dict[str, int]:
    """Where each frozen weight lies."""
    return {
        name: weight.data_ptr()
        for name, weight in model.named_weights()
        if not weight.requires_grad
    }


def test_two_adapters_have_one_base_and_factors_of_their_own(folder: Path) -> None:
    one, two = policy(folder, seed=1), policy(folder, seed=2)
    assert places(one) == places(two)
    assert len(places(one)) >= 20
    own = [dict(model.trained_weights()) for model in (one, two)]
    for name, factor in own[0].items():
        assert factor.data_ptr() != own[1][name].data_ptr()
    # The model that was there first may go: a third one finds the base all the same.
    shared = places(two)
    del one, own
    gc.collect()
    assert places(policy(folder, seed=3)) == shared
    # A base that nobody holds any more is not kept.
    del two
    gc.collect()
    from rolemesh.engine.models.adapters import shared_base

    assert not any(len(held) for held in shared_base._held.values())


def test_a_critic_of_the_same_layers_shares_them_and_trains_its_head(folder: Path) -> None:
    # As models of the hub are: the policy's base is rounded to bfloat16, and the critic's is not.
    narrow = folder.with_name("bfloat16")
    rounded_copy(load_trainer_model(folder)).save_pretrained(narrow)
    actor = policy(narrow)
    critic = ScoringModel(ModelSpec(path=narrow, adapter=ADAPTER), VALUE_HEAD)
    common = places(actor).items() & places(critic).items()
    layers = [name for name in places(critic) if ".layers." in name]
    assert {name for name, _ in common} >= set(layers)
    assert critic.head.weight.requires_grad


def test_what_is_rounded_otherwise_is_not_shared(
    folder: Path,
) -> None:
    rounded, whole = policy(folder), policy(folder, compute_dtype="float32")
    with torch.no_grad():
        values = [dict(model.named_weights()) for model in (rounded, whole)]
        for name in places(rounded):
            assert torch.equal(values[0][name], values[1][name]) == (
                places(rounded)[name] == places(whole)[name]
            )
    assert places(rounded) != places(whole)


def test_the_sampler_of_an_adapter_has_the_trainers_base(folder: Path) -> None:
    trainer = policy(folder, compute_dtype="float32")
    backend = make_backend(HfSpec(dtype="float32"), folder, adapter=ADAPTER)
    held = {name: one.data_ptr() for name, one in backend._model.named_parameters()}  # type: ignore[attr-defined]
    for name, place in places(trainer).items():
        assert held[name] == place
    backend.close()


def test_models_that_are_trained_as_a_whole_share_nothing(folder: Path) -> None:
    spec = ModelSpec(path=folder, compute_dtype="float32")
    one, two = CausalLm(spec), CausalLm(spec)
    frozen = CausalLm(spec, trainable=False)
    own = [{weight.data_ptr() for _, weight in m.named_weights()} for m in (one, two, frozen)]
    assert not own[0] & own[1]
    assert not own[0] & own[2]
    assert places(CausalLm(spec, trainable=False)) == places(frozen)
