"""What is known of each decoder family that can be spread over ranks: one record a family.

Pure: no torch. `families.py` has the arithmetic; a new family is a record here. What a record says
of parameters, one test compares with transformers, vLLM and one rank (tests/numerics/
test_families.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

Cut: TypeAlias = Literal["whole", "heads", "kv_heads", "rows", "columns", "vocab", "qkv", "gate_up"]
"""What tensor slices take of a parameter: all of it; rows by query heads; rows by key-value heads;
rows by the MLP's inner width; columns (by query heads or by inner width); rows by the padded
vocabulary; of projections that one tensor stacks by rows, of each its own rows (see FUSED_CUTS)."""

FUSED_CUTS: Mapping[Cut, tuple[Cut, ...]] = MappingProxyType(
    {"qkv": ("heads", "kv_heads", "kv_heads"), "gate_up": ("rows", "rows")}
)
"""The projections that are stacked, in this order, by the cut of the whole."""


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter that layers have."""

    suffix: str
    """Its name within the layer, e.g. "self_attn.q_proj.weight"."""
    cut: Cut
    when: str = ""
    """Field of config.json that gives it to a model; empty: every model of the family has it."""
    sees_own_heads: bool = False
    """Every slice holds all of it, but uses it on its own heads alone: a norm of each head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRecord:
    """A family, by the model_type of its config.json."""

    parts: tuple[Part, ...]
    """Parameters of a layer, in the order of transformers' model."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields that a config.json may leave out and that then are neither false nor derived:
    transformers 5.19. num_key_value_heads is as many as query heads where no default is named,
    head_dim the hidden size divided by them."""
    per_layer: tuple[str, ...] = ()
    """Fields of its config that list one entry a layer, which a stage therefore cuts."""
    scales_embedding: bool = False
    """What the embedding looks up is multiplied by the root of the hidden size."""
    enters_times: str = ""
    """Field of a factor on what enters the first layer, which transformers applies to a later
    stage's input, too."""
    logits_over: str = ""
    """Field of a number by which logits are divided."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Fields that must not be set, and why."""
    not_in_vllm: Mapping[str, str] = field(default_factory=dict)
    """Fields with which vLLM's model lacks parameters, and which."""
    vllm_from_rope: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Fields that vLLM reads of the config and transformers has in rope_parameters: of each the
    names there, by vLLM's. Left out, vLLM computes without them, and says nothing."""
    vllm_whole: tuple[str, ...] = ()
    """Parameters of a layer that each of vLLM's slices holds all of, though ours hold parts."""
    kernel_classes: str = ""
    """Begins the names of the classes in transformers whose forward passes `kernels/layers.py`
    computes on a GPU, e.g. "Llama"; empty: transformers' code runs there."""

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normed, a head or the whole width."""
        return any(part.suffix == "self_attn.q_norm.weight" for part in self.parts)

    @property
    def has_fused_files(self) -> bool:
        """Whether files hold projections that tensor slices cut apart in one tensor."""
        return any(part.cut in FUSED_CUTS for part in self.parts)


def _linear(name: str, cut: Cut, bias: str | None) -> tuple[Part, ...]:
    """A projection. Its bias is named by the field that gives it; "": always; None: never."""
    weight = Part(f"{name}.weight", cut)
    if bias is None:
        return (weight,)
    # The bias of a sum over slices is added once, after it: every slice holds all of it.
    return (weight, Part(f"{name}.bias", "whole" if cut == "columns" else cut, bias))


def _attention(qkv_bias: str | None = None, output_bias: str | None = None) -> tuple[Part, ...]:
    return (
        *_linear("self_attn.q_proj", "heads", qkv_bias),
        *_linear("self_attn.k_proj", "kv_heads", qkv_bias),
        *_linear("self_attn.v_proj", "kv_heads", qkv_bias),
        *_linear("self_attn.o_proj", "columns", output_bias),
    )


def _mlp(bias: str | None = None) -> tuple[Part, ...]:
    return (
        *_linear("mlp.gate_proj", "rows", bias),
        *_linear("mlp.up_proj", "rows", bias),
        *_linear("mlp.down_proj", "columns", bias),
    )


def _norms(*names: str) -> tuple[Part, ...]:
    return tuple(Part(f"{name}.weight", "whole") for name in names)


_HEAD_NORMS = (
    Part("self_attn.q_norm.weight", "whole", sees_own_heads=True),
    Part("self_attn.k_norm.weight", "whole", sees_own_heads=True),
)
_TWO_NORMS = _norms("input_layernorm", "post_attention_layernorm")
_FOUR_NORMS = (
    *_TWO_NORMS,
    *_norms("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_FUSED_MLP = (
    *_linear("mlp.gate_up_proj", "gate_up", None),
    *_linear("mlp.down_proj", "columns", None),
)
_OLMO = (
    *_attention("attention_bias", "attention_bias"),
    # Over the width of all heads at once: each slice norms its own part by the sum of all.
    Part("self_attn.q_norm.weight", "heads"),
    Part("self_attn.k_norm.weight", "kv_heads"),
    *_mlp(),
    *_norms("post_attention_layernorm", "post_feedforward_layernorm"),
)
_OLMO_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
_GEMMA = {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
_SOFT_CAPS = {
    "attn_logit_softcapping": "the attention here, as that of vLLM on a CPU, has no soft cap",
    "final_logit_softcapping": "log-probs here leave soft caps out",
}

RECORDS: Mapping[str, FamilyRecord] = MappingProxyType(
    {
        "llama": FamilyRecord(
            parts=(
                *_attention("attention_bias", "attention_bias"),
                *_mlp("mlp_bias"),
                *_TWO_NORMS,
            ),
            kernel_classes="Llama",
        ),
        "mistral": FamilyRecord(
            parts=(*_attention(), *_mlp(), *_TWO_NORMS),
            defaults={"num_key_value_heads": 8},
            kernel_classes="Mistral",
        ),
        "qwen2": FamilyRecord(
            parts=(*_attention(""), *_mlp(), *_TWO_NORMS),
            defaults={"num_key_value_heads": 32},
            per_layer=("layer_types",),
            kernel_classes="Qwen2",
        ),
        "qwen3": FamilyRecord(
            parts=(
                *_attention("attention_bias", "attention_bias"),
                *_HEAD_NORMS,
                *_mlp(),
                *_TWO_NORMS,
            ),
            # A head has a width of its own, whatever the hidden size.
            defaults={"num_key_value_heads": 32, "head_dim": 128},
            per_layer=("layer_types",),
            not_in_vllm={"attention_bias": "o_proj.bias"},
            kernel_classes="Qwen3",
        ),
        "ministral3": FamilyRecord(
            parts=(*_attention(), *_mlp(), *_TWO_NORMS),
            defaults={"num_key_value_heads": 8, "head_dim": 128},
            # Queries beyond the first context grow with their positions.
            vllm_from_rope={
                "llama_4_scaling": {
                    "beta": "llama_4_scaling_beta",
                    "original_max_position_embeddings": "original_max_position_embeddings",
                }
            },
        ),
        "granite": FamilyRecord(
            parts=(
                *_attention("attention_bias", "attention_bias"),
                *_mlp("mlp_bias"),
                *_TWO_NORMS,
            ),
            enters_times="embedding_multiplier",
            logits_over="logits_scaling",
        ),
        "smollm3": FamilyRecord(
            parts=(
                *_attention("attention_bias", "attention_bias"),
                *_mlp("mlp_bias"),
                *_TWO_NORMS,
            ),
            defaults={"num_key_value_heads": 4, "tie_word_embeddings": True},
            per_layer=("layer_types", "no_rope_layers"),
        ),
        "olmo2": FamilyRecord(parts=_OLMO, vllm_whole=_OLMO_NORMS),
        "olmo3": FamilyRecord(parts=_OLMO, per_layer=("layer_types",), vllm_whole=_OLMO_NORMS),
        "gemma2": FamilyRecord(
            parts=(
                *_attention("attention_bias", "attention_bias"),
                *_mlp(),
                *_FOUR_NORMS,
            ),
            defaults={**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            per_layer=("layer_types",),
            scales_embedding=True,
            refused=_SOFT_CAPS,
        ),
        "gemma3_text": FamilyRecord(
            parts=(
                *_attention("attention_bias", "attention_bias"),
                *_HEAD_NORMS,
                *_mlp(),
                *_FOUR_NORMS,
            ),
            defaults=_GEMMA,
            per_layer=("layer_types",),
            scales_embedding=True,
            refused={
                **_SOFT_CAPS,
                "use_bidirectional_attention": "a policy's tokens see only those before them",
            },
        ),
        "phi3": FamilyRecord(
            parts=(
                *_linear("self_attn.o_proj", "columns", None),
                *_linear("self_attn.qkv_proj", "qkv", None),
                *_FUSED_MLP,
                *_TWO_NORMS,
            ),
        ),
        "glm4": FamilyRecord(
            parts=(
                *_attention("attention_bias"),
                *_FUSED_MLP,
                *_TWO_NORMS,
                *_norms("post_self_attn_layernorm", "post_mlp_layernorm"),
            ),
            defaults={"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
        ),
    }
)
"""By model_type."""


def vllm_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that vLLM's model needs beside those of a config.json; none for most families.

    Args:
        config: `PretrainedConfig.to_dict()`.
    """
    record = RECORDS.get(str(config.get("model_type")))
    rope = config.get("rope_parameters") or {}
    return {
        name: {own: rope[given] for own, given in names.items()}
        for name, names in (record.vllm_from_rope if record else {}).items()
        if all(rope.get(given) is not None for given in names.values())
    }


def known_families() -> str:
    """All families, as an error lists them."""
    return ", ".join(RECORDS)
