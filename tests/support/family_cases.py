"""Tiny models of each family with a record, small but with every trap of the family in reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rolemesh.engine.layout.family_records import RECORDS

LAYERS = 3
"""Not a multiple of two stages; the last one stands alone on the second."""
WINDOW = 4
"""Shorter than the rows."""

_TWO_KINDS = {
    # The second stage's layer is of another kind than the first one.
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
}
_BIASES = {"attention_bias": True, "mlp_bias": True}

_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2}

CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", _BIASES),
    "mistral": ("mistral", {"sliding_window": WINDOW, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_5_vl_text": (
        "qwen2_5_vl_text",
        {
            "head_dim": None,  # the family has no field for it
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 2],
            },
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_vl_text": (
        "qwen3_vl_text",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("qwen3", {**_TWO_KINDS, "use_sliding_window": True}),
    "ministral3": (
        "ministral3",
        {
            # Queries grow with positions beyond this one, by the logarithm.
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 4,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.5,
            "tie_word_embeddings": True,
        },
    ),
    "granite with biases": ("granite", {**_BIASES, "logits_scaling": 2.0}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 0], "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", _TWO_KINDS),
    "gemma2": (
        "gemma2",
        {
            **_TWO_KINDS,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 10,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_text": (
        "gemma3_text",
        {**_TWO_KINDS, "query_pre_attn_scalar": 10, "tie_word_embeddings": True},
    ),
    "phi3": ("phi3", {"bos_token_id": 1, "eos_token_id": 2}),
    "glm4": ("glm4", {"eos_token_id": 2}),
    "mixtral": (
        "mixtral",
        {**_EXPERTS, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {**_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1], "moe_intermediate_size": 24},
    ),
    "olmoe": (
        "olmoe",
        # Its heads have the width of the hidden states together.
        {**_EXPERTS, "hidden_size": 32, "head_dim": 8, "pad_token_id": 0, "eos_token_id": 2},
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_mtp_layers": 0,
        },
    ),
}
"""Family and fields of its config, by the name of the case; each family of RECORDS at least once.
With a tied embedding where the family has one, so that both ends of a pipeline hold it."""

IN_VLLM = tuple(name for name, (family, _) in CASES.items() if not RECORDS[family].within)
"""Those that vLLM knows by themselves: a text part it has with its tower alone."""


def case_config(name: str) -> dict[str, Any]:
    """Fields of a case's config, over those of `write_tiny_decoder`."""
    return {"num_hidden_layers": LAYERS, **CASES[name][1]}
