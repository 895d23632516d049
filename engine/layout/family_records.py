"""What is known of each decoder family that can be spread over ranks: one record a family.

Pure: no torch. `families.py` has the arithmetic; a new family is a record here. What a record says
of parameters, tests compare with transformers, one rank and vLLM (test_families.py and
test_families_vllm.py in tests/numerics/).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

Cut: TypeAlias = (
    Literal["whole", "heads", "kv_heads", "rows", "columns", "vocab", "qkv", "gate_up"]
    | Literal["experts_gate_up", "experts_columns"]
)
"""What tensor slices take of a parameter: all of it; rows by query heads; rows by key-value heads;
rows by the MLP's inner width; columns (by query heads or by inner width); rows by the padded
vocabulary; of projections that one tensor stacks by rows, of each its own rows (see FUSED_CUTS). Of
a stack of experts [experts, rows, columns], of each expert what a dense MLP's part would be cut to:
rows of gate and of up, columns."""

LayerKind: TypeAlias = Literal["dense", "sparse"]
"""Whether a layer has one MLP, or experts."""

FUSED_CUTS: Mapping[Cut, tuple[Cut, ...]] = MappingProxyType(
    {
        "qkv": ("heads", "kv_heads", "kv_heads"),
        "gate_up": ("rows", "rows"),
        "experts_gate_up": ("rows", "rows"),
    }
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
    sees_own_part: bool = False
    """Every slice holds all of it, but uses it for its own part alone: a norm of each head, a
    router whose experts are cut."""
    only: LayerKind | None = None
    """The layers that have it; None: all."""
    files: tuple[str, ...] = ()
    """Names within the layer under which files hold it, where that is not its own: one tensor, or
    of a stack of experts those that are stacked by rows, with {} for the number of the expert."""
    is_buffer: bool = False
    """It is in the files, but no gradient reaches it; every rank holds all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFields:
    """Fields of a config.json that say which layers have experts, and their sizes."""

    default: int
    """Experts of a layer where no field gives their number."""
    inner_size: str = "moe_intermediate_size"
    """Inner width of one."""
    shared: str = ""
    """Experts that every token goes through, as one MLP of that many times the width; or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRecord:
    """A family, by the model_type of its config.json."""

    parts: tuple[Part, ...]
    """Parameters of a layer, in the order of transformers' model."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields that a config.json may leave out and that then are neither false nor derived:
    transformers 5.19. num_key_value_heads is as many as query heads where no default is named,
    head_dim the hidden size divided by them."""
    experts: ExpertFields | None = None
    """Of a mixture of experts."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of a router's logits."""
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
    vllm_mlp: str = "mlp"
    """What vLLM calls a layer's MLP, or experts and router."""
    vllm_whole: tuple[str, ...] = ()
    """Parameters of a layer that each of vLLM's slices holds all of, though ours hold parts."""
    within: str = ""
    """model_type of the model of images and text whose text part it is. A folder holds that: its
    config.json has the sizes in text_config or beside vision_config, and its files have the tower
    too, which is frozen (`engine/models/images/image_tower.py`)."""
    is_nested: bool = False
    """Whether transformers writes that model's files with names that begin with
    `model.language_model.` and `model.visual.`; else with `model.` and `visual.`."""
    deepstack: tuple[int, ...] = ()
    """Layers of the tower, where vision_config names none, whose features are added behind the
    first layers of the decoder (DeepStack, arXiv 2406.04334); empty: the family has no such."""
    kernel_classes: str = ""
    """Begins the names of the classes in transformers that are like Llama's, so that
    `models/layers/fused_layers.py` may compute their forward passes; empty: they are not."""

    def norms_queries(self, config: Mapping[str, Any]) -> bool:
        """Whether queries and keys are normed, a head or the whole width."""
        return any(
            part.suffix == "self_attn.q_norm.weight" and (not part.when or config.get(part.when))
            for part in self.parts
        )

    @property
    def has_fused_files(self) -> bool:
        """Whether files hold projections that tensor slices cut apart in one tensor."""
        return any(part.cut in ("qkv", "gate_up") for part in self.parts)


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


def _head_norms(when: str = "") -> tuple[Part, ...]:
    return (
        Part("self_attn.q_norm.weight", "whole", when, sees_own_part=True),
        Part("self_attn.k_norm.weight", "whole", when, sees_own_part=True),
    )


def _only(kind: LayerKind, *parts: Part) -> tuple[Part, ...]:
    return tuple(replace(part, only=kind) for part in parts)


def _experts(gate: str, up: str, down: str) -> tuple[Part, ...]:
    """The stacks of a layer's experts, and what files call the matrices of one."""
    return (
        Part("mlp.experts.gate_up_proj", "experts_gate_up", files=(gate, up)),
        Part("mlp.experts.down_proj", "experts_columns", files=(down,)),
    )


_EXPERTS = _experts(*(f"mlp.experts.{{}}.{name}_proj.weight" for name in ("gate", "up", "down")))
_MIXTRAL = ("w1", "w3", "w2")
_ROUTER = Part("mlp.gate.weight", "whole", sees_own_part=True)
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
        "qwen2_5_vl_text": FamilyRecord(
            parts=(*_attention(""), *_mlp(), *_TWO_NORMS),
            defaults={"num_key_value_heads": 8},
            per_layer=("layer_types",),
            within="qwen2_5_vl",
        ),
        "qwen3": FamilyRecord(
            parts=(
                *_attention("attention_bias", "attention_bias"),
                *_head_norms(),
                *_mlp(),
                *_TWO_NORMS,
            ),
            # A head has a width of its own, whatever the hidden size.
            defaults={"num_key_value_heads": 32, "head_dim": 128},
            per_layer=("layer_types",),
            not_in_vllm={"attention_bias": "o_proj.bias"},
            kernel_classes="Qwen3",
        ),
        "qwen3_vl_text": FamilyRecord(
            parts=(
                *_attention("attention_bias", "attention_bias"),
                *_head_norms(),
                *_mlp(),
                *_TWO_NORMS,
            ),
            defaults={"num_key_value_heads": 32, "head_dim": 128},
            not_in_vllm={"attention_bias": "o_proj.bias"},
            within="qwen3_vl",
            is_nested=True,
            deepstack=(8, 16, 24),
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
            kernel_classes="Ministral3",
        ),
        "granite": FamilyRecord(
            parts=(
                *_attention("attention_bias", "attention_bias"),
                *_mlp("mlp_bias"),
                *_TWO_NORMS,
            ),
            enters_times="embedding_multiplier",
            logits_over="logits_scaling",
            kernel_classes="Granite",
        ),
        "smollm3": FamilyRecord(
            parts=(
                *_attention("attention_bias", "attention_bias"),
                *_mlp("mlp_bias"),
                *_TWO_NORMS,
            ),
            defaults={"num_key_value_heads": 4, "tie_word_embeddings": True},
            per_layer=("layer_types", "no_rope_layers"),
            kernel_classes="SmolLM3",
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
                *_head_norms(),
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
        "mixtral": FamilyRecord(
            parts=(
                *_attention(),
                replace(_ROUTER, files=("block_sparse_moe.gate.weight",)),
                *_experts(*(f"block_sparse_moe.experts.{{}}.{w}.weight" for w in _MIXTRAL)),
                *_TWO_NORMS,
            ),
            defaults={"num_key_value_heads": 8},
            experts=ExpertFields(default=8, inner_size="intermediate_size"),
            vllm_mlp="block_sparse_moe",
            kernel_classes="Mixtral",
        ),
        "qwen3_moe": FamilyRecord(
            parts=(
                *_attention("attention_bias", "attention_bias"),
                *_head_norms(),
                *_only("sparse", *_EXPERTS, _ROUTER),
                *_only("dense", *_mlp()),
                *_TWO_NORMS,
            ),
            defaults={"num_key_value_heads": 4, "moe_intermediate_size": 768},
            experts=ExpertFields(default=128),
            not_in_vllm={"attention_bias": "o_proj.bias"},
            kernel_classes="Qwen3Moe",
        ),
        "olmoe": FamilyRecord(
            parts=(
                *_attention("attention_bias", "attention_bias"),
                Part("self_attn.q_norm.weight", "heads"),
                Part("self_attn.k_norm.weight", "kv_heads"),
                _ROUTER,
                *_EXPERTS,
                *_TWO_NORMS,
            ),
            experts=ExpertFields(default=64, inner_size="intermediate_size"),
            refused={"clip_qkv": "vLLM computes without it"},
            vllm_whole=_OLMO_NORMS,
            not_in_vllm={"attention_bias": "biases"},
            kernel_classes="Olmoe",
        ),
        "glm4_moe": FamilyRecord(
            parts=(
                *_attention("attention_bias"),
                *_head_norms("use_qk_norm"),
                *_only(
                    "sparse",
                    *_EXPERTS,
                    _ROUTER,
                    # Balancing moves it; see `models/buffers.py`.
                    Part("mlp.gate.e_score_correction_bias", "whole", is_buffer=True),
                    *_linear("mlp.shared_experts.gate_proj", "rows", None),
                    *_linear("mlp.shared_experts.up_proj", "rows", None),
                    *_linear("mlp.shared_experts.down_proj", "columns", None),
                ),
                *_only("dense", *_mlp()),
                *_TWO_NORMS,
            ),
            defaults={
                **{"num_key_value_heads": 8, "n_shared_experts": 1},
                **{"first_k_dense_replace": 1, "moe_intermediate_size": 1408},
            },
            experts=ExpertFields(default=128, shared="n_shared_experts"),
            router="sigmoid",
        ),
    }
)
"""By model_type."""


DEEPSTACK_LEVELS = "num_deepstack_levels"
"""Field that a decoder's config gets here: how many of its first layers a tower's further features
are added behind."""

TEXT_PARTS: Mapping[str, str] = MappingProxyType(
    {record.within: family for family, record in RECORDS.items() if record.within}
)
"""The family of a model's text part, by the model_type of a model of images and text."""


def decoder_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config.json says of the decoder: of a model of images and text, of its text part.

    Files of either form are read: with a text_config, and with the text's fields beside those of
    the tower, as the hub's older ones have them.
    """
    family = TEXT_PARTS.get(str(config.get("model_type")))
    if family is None:
        return config
    outer = {name: value for name, value in config.items() if not name.endswith("_config")}
    inner = config.get("text_config") or {}
    # Whether the embedding is tied is said of the whole model.
    tied = config.get("tie_word_embeddings", inner.get("tie_word_embeddings", False))
    vision = config.get("vision_config") or {}
    default = RECORDS[family].deepstack
    deepstack = vision.get("deepstack_visual_indexes", default) if default else ()
    return {
        **outer,
        **inner,
        "model_type": family,
        "tie_word_embeddings": tied,
        DEEPSTACK_LEVELS: len(deepstack),
    }


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
