"""Devices have a source for each number; models have the parameters that the world knows."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from support.public_models import CONFIGS

from rolemesh.coordinator.mapping.errors import PlanError
from rolemesh.coordinator.mapping.job.models import LayerSizes, Model
from rolemesh.coordinator.mapping.machines.devices import DEVICES, device_of
from rolemesh.coordinator.run.services.host_gpus import GPU_BYTES
from rolemesh.engine.specs import AdapterSpec


def llama(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int = 32_000
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }


QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_30B = CONFIGS["Qwen3-30B-A3B"]
OLMOE = {
    "model_type": "olmoe",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 50304,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}
GLM = {
    "model_type": "glm4_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
QWEN15_MOE = {**QWEN3_30B, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 5632}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        pytest.param(
            {**llama(576, 1536, 30, 9, 3, 49152), "tie_word_embeddings": True},
            134_515_008,
            id="SmolLM2-135M",
        ),
        pytest.param(llama(4096, 11008, 32, 32, 32), 6_738_415_616, id="Llama-2-7b"),
        pytest.param(llama(5120, 13824, 40, 40, 40), 13_015_864_320, id="Llama-2-13b"),
        pytest.param(llama(8192, 28672, 80, 64, 8), 68_976_648_192, id="Llama-2-70b"),
        pytest.param(QWEN_7B, 7_615_616_512, id="Qwen2.5-7B"),
        pytest.param(MIXTRAL, 46_702_792_704, id="Mixtral-8x7B"),
        pytest.param(QWEN3_30B, 30_532_122_624, id="Qwen3-30B-A3B"),
        pytest.param(OLMOE, 6_919_161_856, id="OLMoE-1B-7B"),
    ],
)
def test_a_model_has_the_parameters_of_its_published_weights(
    config: dict[str, Any], parameters: int
) -> None:
    assert Model.from_config(config).num_parameters == parameters


def test_a_mixture_computes_with_the_chosen_experts() -> None:
    # Mixtral's paper (arXiv 2401.04088) says 13B active parameters, the embedding included.
    active = Model.from_config(MIXTRAL).active_parameters + 32_000 * 4096
    assert active == pytest.approx(12.9e9, rel=0.01)
    qwen = Model.from_config(QWEN3_30B)
    assert qwen.active_parameters + 151_936 * 2048 == pytest.approx(3.35e9, rel=0.01)


def test_layers_of_a_mixture_may_be_dense() -> None:
    mixed = Model.from_config({**QWEN3_30B, "mlp_only_layers": [0, 1]})
    one_expert_layer = 128 * 3 * 2048 * 768 + 2048 * 128
    one_dense_layer = 3 * 2048 * 6144
    assert mixed.num_parameters == 30_532_122_624 - 2 * (one_expert_layer - one_dense_layer)


def test_each_layer_of_a_mixture_is_counted_by_its_kind() -> None:
    """Of GLM the first layer has one MLP; the others experts, a router, and an MLP for all."""
    model = Model.from_config(GLM)
    attention, norms, router = 2 * 64 * 64 + 2 * 64 * 32, 2 * 64, 8 * 64
    one, shared = 3 * 64 * 32, 3 * 64 * 64
    dense = LayerSizes(whole=norms, cut=attention + 3 * 64 * 128, active=attention + 3 * 64 * 128)
    sparse = LayerSizes(
        whole=norms + router,
        cut=attention + shared,
        experts=8 * one,
        active=attention + shared + router + 2 * one,
    )
    assert model.layers == (dense, sparse, sparse)
    assert model.num_parameters == dense.total + 2 * sparse.total + 2 * 6400 + 64
    assert model.active_parameters == dense.active + 2 * sparse.active + 6400


def test_a_pass_reads_the_experts_that_some_token_chose() -> None:
    model = Model.from_config(GLM)
    one = 2 * 3 * 64 * 32
    assert model.read_parameters(1) == model.active_parameters
    assert model.read_parameters(3) == model.active_parameters + 4 * one
    assert model.read_parameters(100) == model.active_parameters + 6 * one
    assert model.read_parameters(100, ep=4) == model.active_parameters
    dense = Model.from_config(llama(64, 128, 2, 4, 2, 100))
    assert dense.read_parameters(100) == dense.active_parameters


def test_flops_are_two_for_each_weight_and_four_for_each_score() -> None:
    model = Model.from_config(llama(64, 128, 2, 4, 2, 100))
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128
    assert model.active_parameters == 2 * layer + 100 * 64
    expected = 10 * (2 * (2 * layer + 6400) + 4 * 2 * 64 * 5)
    assert model.forward_flops(10, 5) == expected


def test_a_critic_has_a_score_head_and_fewer_layers() -> None:
    config = llama(64, 128, 4, 4, 2, 100)
    whole = Model.from_config(config)
    critic = Model.from_config(config, head="score", num_layers=1)
    layers = (whole.num_parameters - 2 * 6400 - 64) // 4
    assert critic.num_parameters == layers + 6400 + 64 + 64


def test_what_slices_do_not_cut_is_counted() -> None:
    model = Model.from_config(llama(64, 128, 4, 4, 2, 100))
    assert [one.whole for one in model.layers] == 4 * [2 * 64]
    assert model.outer_whole == 64


def test_an_adapter_is_counted_apart_from_its_base() -> None:
    config = llama(64, 128, 2, 4, 2, 100)
    bare, adapter = Model.from_config(config), AdapterSpec(rank=4)
    adapted = Model.from_config(config, adapter=adapter)
    factors = 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    assert adapted.num_parameters == bare.num_parameters == bare.trained_parameters
    assert adapted.trained_parameters == adapted.factor_parameters == factors
    assert bare.factor_parameters == 0
    few = Model.from_config(config, adapter=AdapterSpec(rank=4, targets=("q_proj", "down_proj")))
    assert few.trained_parameters == 2 * 4 * (64 + 64 + 64 + 128)
    # A score head is trained as a whole.
    critic = Model.from_config(config, head="score", adapter=adapter)
    assert critic.trained_parameters == factors + 64
    # Two slices hold half of what is cut, and all of A before a matrix that is cut by rows.
    assert [one.whole_factors for one in few.layers] == 2 * [4 * 64 + 4 * 64]
    with pytest.raises(PlanError, match="k_projection"):
        Model.from_config(config, adapter=AdapterSpec(targets=("k_projection",)))


def test_the_experts_of_a_mixture_have_no_adapter() -> None:
    mixed = Model.from_config(MIXTRAL, adapter=AdapterSpec(rank=8))
    assert mixed.trained_parameters == 32 * 8 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    # What every token goes through has one, in layers of either kind.
    glm = Model.from_config(GLM, adapter=AdapterSpec(rank=8))
    attention = 8 * (2 * (64 + 64) + 2 * (64 + 32))
    assert [one.factors for one in glm.layers] == [
        attention + 8 * 3 * (64 + inner) for inner in (128, 64, 64)
    ]


def test_frozen_matrices_are_multiplied_once_in_a_backward_pass() -> None:
    """An update takes 4 operations for each of their numbers and a token, 6 for each trained."""
    config = llama(64, 128, 2, 4, 2, 100)
    bare, adapted = (Model.from_config(config, adapter=one) for one in (None, AdapterSpec(rank=4)))
    scores = 4 * 2 * 64 * 5
    assert bare.backward_flops(10, 5) == 2 * bare.forward_flops(10, 5)
    update = adapted.forward_flops(10, 5) + adapted.backward_flops(10, 5)
    trained = adapted.trained_parameters
    assert update == 10 * (4 * adapted.active_parameters + 6 * trained + 3 * scores)


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(PlanError, match=r"model_type 'mamba'.*llama.*qwen3_moe"):
        Model.from_config({"model_type": "mamba"})
    with pytest.raises(PlanError, match=r"model_type 'qwen2_moe'.*mixtral"):
        Model.from_config(QWEN15_MOE)


@pytest.mark.parametrize("chosen", [None, 0, 9, "2"])
def test_a_mixture_says_how_many_experts_a_token_goes_through(chosen: Any) -> None:
    with pytest.raises(PlanError, match=rf"num_experts_per_tok is {chosen!r}.*of the 8 experts"):
        Model.from_config({**MIXTRAL, "num_experts_per_tok": chosen})


@pytest.mark.parametrize("name", DEVICES)
def test_each_number_of_a_device_has_a_source(name: str) -> None:
    device = DEVICES[name]
    numbers = {
        field.name
        for field in dataclasses.fields(device)
        if field.name not in ("name", "kind", "per_machine", "sources")
    }
    assert set(device.sources) == numbers
    assert all(getattr(device, number) > 0 for number in numbers)
    # A link is not faster than memory, and a network of a machine not than its links together.
    assert device.link_bandwidth <= device.memory_bandwidth
    assert device.network_bandwidth <= device.per_machine * device.link_bandwidth
    assert math.isfinite(device.flops)


def test_an_unknown_device_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(PlanError, match=r"'h1000' is no device.*a100-80, h100"):
        device_of("h1000")


def test_fit_knows_the_memory_of_every_gpu() -> None:
    assert set(DEVICES) - set(GPU_BYTES) == {"cpu"}
    assert GPU_BYTES["h100"] == 80 * 10**9
