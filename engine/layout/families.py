"""Decoder families that can be spread over ranks: their parameters, and how each is cut.

Pure: no torch. Families: llama, mistral, qwen2, qwen3, under their Hugging Face names. Tensor
slices cut attention by heads and the MLP by its inner width (arXiv 1909.08053, section 3), the
vocabulary in padded blocks as vLLM does; stages are runs of layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeAlias

from rolemesh.engine.layout.adapters import (
    AdapterShape,
    check_rank,
    chosen_targets,
    is_factor,
    split_factor,
)
from rolemesh.engine.layout.manifest import Box, DtypeName, Manifest, Parameter
from rolemesh.engine.layout.ranks import HybridLayout, LayoutError, TrainLayout

Cut: TypeAlias = Literal["whole", "heads", "kv_heads", "rows", "columns", "vocab"]
"""What tensor slices take of a parameter: all of it; rows by query heads; rows by key-value heads;
rows by the MLP's inner width; columns (by query heads or by inner width); rows by the padded
vocabulary."""

Head: TypeAlias = Literal["lm_head", "score"]
"""What stands on top: the projection to the vocabulary, or that to labels."""

EMBEDDING = "model.embed_tokens.weight"
"""Name of the input embedding."""
LM_HEAD = "lm_head.weight"
"""Name of the projection to the vocabulary."""
NORM = "model.norm.weight"
"""Name of the last norm."""

VOCAB_BLOCK = 64
"""Vocabulary rows are padded to a multiple of this before they are divided among slices: the
default padding of vLLM's VocabParallelEmbedding, so that training slices lie inside its."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")

_LAYER_CUTS: dict[str, Cut] = {
    "self_attn.q_proj.weight": "heads",
    "self_attn.q_proj.bias": "heads",
    "self_attn.k_proj.weight": "kv_heads",
    "self_attn.k_proj.bias": "kv_heads",
    "self_attn.v_proj.weight": "kv_heads",
    "self_attn.v_proj.bias": "kv_heads",
    "self_attn.o_proj.weight": "columns",
    # Added once, after the sum over slices: every slice holds all of it.
    "self_attn.o_proj.bias": "whole",
    "self_attn.q_norm.weight": "whole",
    "self_attn.k_norm.weight": "whole",
    "mlp.gate_proj.weight": "rows",
    "mlp.gate_proj.bias": "rows",
    "mlp.up_proj.weight": "rows",
    "mlp.up_proj.bias": "rows",
    "mlp.down_proj.weight": "columns",
    "mlp.down_proj.bias": "whole",
    "input_layernorm.weight": "whole",
    "post_attention_layernorm.weight": "whole",
}

_MATRICES = tuple(name for name in _LAYER_CUTS if name.endswith("_proj.weight"))
"""Those that can have an adapter."""

_OUTER_CUTS: dict[str, Cut] = {
    EMBEDDING: "vocab",
    NORM: "whole",
    LM_HEAD: "vocab",
    "score.weight": "whole",
    "score.bias": "whole",
}


class UnsupportedFamilyError(ValueError):
    """A model that cannot be spread over ranks: names the family and what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The sizes that decide which parameters a decoder has."""

    family: str
    """model_type of its config."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Inner width of the MLP."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key-value heads; divides num_heads."""
    head_dim: int
    """Width of one head."""
    vocab_size: int
    """Rows of the embedding, without padding."""
    is_tied: bool
    """The input embedding is also the projection to the vocabulary."""
    has_qkv_bias: bool
    has_output_bias: bool
    """o_proj has a bias."""
    has_mlp_bias: bool
    has_qk_norm: bool
    """Queries and keys are normed a head (qwen3)."""
    head: Head
    num_labels: int = 1
    """Rows of a score head."""
    has_head_bias: bool = False
    """The score head has a bias."""
    adapter: AdapterShape | None = None
    """Factors beside some matrices. With them all else is frozen, but for a score head."""

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        *,
        head: Head = "lm_head",
        num_labels: int = 1,
        has_head_bias: bool = False,
    ) -> Self:
        """Reads the sizes of a model.

        Args:
            config: config.json as a dict, or `PretrainedConfig.to_dict()`; num_hidden_layers
                already cut.
            head: What stands on top. A score head is never tied.
            num_labels: Rows of a score head.
            has_head_bias: The score head has a bias. In transformers 5.19 token classifiers have
                one (unless the config says token_classification_bias false), sequence classifiers
                none.

        Raises:
            UnsupportedFamilyError: A family without a plan, or quantized weights.
            ValueError: A size is missing or impossible.
        """
        family = str(config.get("model_type"))
        if family not in _KV_HEADS:
            raise UnsupportedFamilyError(
                f"model_type is {family!r}: only {', '.join(_KV_HEADS)} can be spread over ranks; "
                "give the layout pp=1, tp=1, dp=1"
            )
        if config.get("quantization_config") is not None:
            raise UnsupportedFamilyError(
                f"the {family} model has a quantization_config: quantized weights cannot be spread "
                "over ranks; give the layout pp=1, tp=1, dp=1, or a model in bfloat16 or float32"
            )
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        kv_heads = config.get("num_key_value_heads", _KV_HEADS[family]) or heads
        # qwen3 has a width of its own whatever the hidden size; the others divide it.
        head_dim = config.get("head_dim") or (128 if family == "qwen3" else hidden // heads)
        if heads % kv_heads:
            raise ValueError(
                f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}: "
                "fix config.json"
            )
        has_attention_bias = family in ("llama", "qwen3") and bool(config.get("attention_bias"))
        return cls(
            family=family,
            num_layers=_size(config, "num_hidden_layers"),
            hidden_size=hidden,
            intermediate_size=_size(config, "intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=_size(config, "vocab_size"),
            is_tied=head == "lm_head" and bool(config.get("tie_word_embeddings")),
            has_qkv_bias=family == "qwen2" or has_attention_bias,
            has_output_bias=has_attention_bias,
            has_mlp_bias=family == "llama" and bool(config.get("mlp_bias")),
            has_qk_norm=family == "qwen3",
            head=head,
            num_labels=num_labels,
            has_head_bias=has_head_bias,
        )

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary rows that slices divide: the next multiple of VOCAB_BLOCK."""
        return -(-self.vocab_size // VOCAB_BLOCK) * VOCAB_BLOCK

    def manifest(self, dtype: DtypeName) -> Manifest:
        """All parameters in model order, a tied embedding once."""
        return {
            name: Parameter(parameter_shape(self, name), dtype)
            for name, _ in stage_tensors(self, pp=0, size=1)
        }

    def trained_manifest(self, dtype: DtypeName) -> Manifest:
        """The parameters that training changes: all, or with an adapter those of `trains`."""
        return {name: one for name, one in self.manifest(dtype).items() if self.trains(name)}

    def trains(self, name: str) -> bool:
        """Whether training changes a parameter: with an adapter its factors and a score head."""
        is_head = self.head == "score" and name.startswith("score.")
        return self.adapter is None or is_head or is_factor(name)

    def with_adapter(self, rank: int, targets: Literal["all_linear"] | Sequence[str]) -> Self:
        """The same decoder with an adapter.

        Raises:
            ValueError: It has no such matrix, or one that is too small for the rank.
        """
        matrices = [name.removesuffix(".weight") for name in _layer_suffixes(self, _MATRICES)]
        chosen = chosen_targets(targets, matrices)
        for module in chosen:
            rows, columns = parameter_shape(self, f"model.layers.0.{module}.weight")
            check_rank(rank, module, (rows, columns))
        return replace(self, adapter=AdapterShape(rank, chosen))


_KV_HEADS: dict[str, int | None] = {"llama": None, "mistral": 8, "qwen2": 32, "qwen3": 32}
"""Families that have a plan, and num_key_value_heads where a config.json says nothing (None: as
many as query heads): the defaults of transformers 5.19."""


def has_plan(config: Mapping[str, Any]) -> bool:
    """Whether the model of a config.json is of a family whose parameters are known here."""
    return config.get("model_type") in _KV_HEADS


def check_layout(shape: DecoderShape, layout: TrainLayout | HybridLayout) -> None:
    """Raises LayoutError unless the model can be cut so: heads, widths, vocabulary and layers.

    Of a HybridLayout, both sides are checked.
    """
    train = layout.train if isinstance(layout, HybridLayout) else layout
    if train.pp > shape.num_layers:
        raise LayoutError(
            f"pp {train.pp} is more than the model's {shape.num_layers} layers: give a stage at "
            "least one layer"
        )
    check_slices(shape, train.tp, field="tp")
    if isinstance(layout, HybridLayout):
        check_slices(shape, layout.generate.tp, field="generate.tp")


def check_slices(shape: DecoderShape, size: int, *, field: str = "tp") -> None:
    """Raises LayoutError, naming `field`, unless the model can be cut into `size` slices."""
    for name, number in (
        ("num_attention_heads", shape.num_heads),
        ("intermediate_size", shape.intermediate_size),
        ("the vocabulary, padded,", shape.padded_vocab_size),
    ):
        if number % size:
            raise LayoutError(
                f"{field} {size} does not divide {name} {number} of the {shape.family} model: "
                "give a divisor"
            )
    if shape.num_kv_heads % size and size % shape.num_kv_heads:
        raise LayoutError(
            f"{field} {size} neither divides num_key_value_heads {shape.num_kv_heads} of the "
            f"{shape.family} model nor is a multiple: give a divisor or a multiple"
        )


def cut_of(name: str) -> Cut:
    """How tensor slices cut the parameter of that Hugging Face name.

    Raises:
        UnsupportedFamilyError: No family here has such a parameter.
    """
    match = _LAYER.fullmatch(name)
    cut = _cut_in_layer(match[2]) if match else _OUTER_CUTS.get(name)
    if cut is None:
        raise UnsupportedFamilyError(
            f"parameter {name!r} belongs to none of {', '.join(_KV_HEADS)}: give the layout pp=1, "
            "tp=1, dp=1"
        )
    return cut


def _cut_in_layer(suffix: str) -> Cut | None:
    """Of a parameter of a layer; a factor is cut on the side on which its matrix is."""
    split = split_factor(suffix)
    if split is None:
        return _LAYER_CUTS.get(suffix)
    module, factor = split
    cut = _LAYER_CUTS.get(f"{module}.weight")
    if cut is None or (cut == "columns") == (factor == "A"):
        return cut
    return "whole"


def parameter_shape(shape: DecoderShape, name: str) -> tuple[int, ...]:
    """Global shape of a parameter, vocabulary not padded."""
    split = split_factor(name)
    if split is not None:
        if shape.adapter is None:
            raise ValueError(f"parameter {name!r} is a factor, but the shape has no adapter")
        height, width = parameter_shape(shape, f"{split[0]}.weight")
        return (shape.adapter.rank, width) if split[1] == "A" else (height, shape.adapter.rank)
    match = _LAYER.fullmatch(name)
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    cut = cut_of(name)
    module = (match[2] if match else name).removesuffix(".weight").removesuffix(".bias")
    sizes = {
        "self_attn.o_proj": (hidden, query),
        "mlp.down_proj": (hidden, inner),
        "self_attn.q_norm": (shape.head_dim,),
        "self_attn.k_norm": (shape.head_dim,),
        "score": (shape.num_labels, hidden),
    }.get(module)
    if sizes is None:
        rows = {"heads": query, "kv_heads": kv, "rows": inner, "vocab": shape.vocab_size}.get(cut)
        sizes = (hidden,) if rows is None else (rows, hidden)
    return sizes[:1] if name.endswith(".bias") else sizes


def slice_box(shape: DecoderShape, name: str, *, tp: int, size: int) -> Box:
    """The part of a parameter that slice `tp` of `size` holds, in global coordinates.

    Real rows only: the last slices of a padded vocabulary hold fewer rows, or none (an empty
    range). With more slices than key-value heads, neighbours hold the same head.

    Example: a vocabulary of 100 is padded to 128; slices 0..3 of 4 hold rows 0 to 32, 32 to 64,
    64 to 96 and 96 to 100.

    Raises:
        LayoutError: `size` does not fit the model (see `check_slices`), or `tp` is not below it.
    """
    check_slices(shape, size)
    if not 0 <= tp < size:
        raise LayoutError(f"slice is {tp}: give 0 to {size - 1}")
    sizes = parameter_shape(shape, name)
    cut = cut_of(name)
    if cut == "whole":
        return tuple((0, number) for number in sizes)
    if cut == "columns":
        width = sizes[1] // size
        return ((0, sizes[0]), (tp * width, (tp + 1) * width))
    if cut == "vocab":
        block = shape.padded_vocab_size // size
        rows = (min(tp * block, sizes[0]), min((tp + 1) * block, sizes[0]))
    else:
        slices, at = size, tp
        if cut == "kv_heads":
            sharing = replica_ranks_of_kv(shape, size)
            slices, at = size // sharing, tp // sharing
        rows = (at * (sizes[0] // slices), (at + 1) * (sizes[0] // slices))
    return (rows, *((0, number) for number in sizes[1:]))


def replica_ranks_of_kv(shape: DecoderShape, size: int) -> int:
    """How many neighbouring slices of `size` hold the same key-value head: 1 when none does."""
    check_slices(shape, size)
    return max(1, size // shape.num_kv_heads)


def stage_layers(shape: DecoderShape, *, pp: int, size: int) -> range:
    """Layers of stage `pp` of `size`: numbers differ by at most one, the first stages have more.

    Raises:
        LayoutError: More stages than layers, or no such stage.
    """
    if size > shape.num_layers:
        raise LayoutError(
            f"{size} stages are more than the model's {shape.num_layers} layers: give a stage at "
            "least one layer"
        )
    if not 0 <= pp < size:
        raise LayoutError(f"stage is {pp}: give 0 to {size - 1}")
    number, rest = divmod(shape.num_layers, size)
    start = pp * number + min(pp, rest)
    return range(start, start + number + (pp < rest))


def stage_tensors(shape: DecoderShape, *, pp: int, size: int) -> tuple[tuple[str, str], ...]:
    """What stage `pp` of `size` holds, in model order.

    Returns:
        (name of the tensor, name of the parameter). They differ only for a tied projection that
        stands on another stage than the embedding: ("lm_head.weight", "model.embed_tokens.weight").
    """
    layers = stage_layers(shape, pp=pp, size=size)
    tensors = [(EMBEDDING, EMBEDDING)] if pp == 0 else []
    tensors += [(name, name) for name in layer_parameters(shape, layers)]
    tensors += [(name, name) for name in layer_factors(shape, layers)]
    if pp == size - 1:
        tensors += [(name, name) for name in (NORM, *_head_names(shape))]
        if shape.is_tied and size > 1:
            tensors.append((LM_HEAD, EMBEDDING))
    return tuple(tensors)


def layer_parameters(shape: DecoderShape, layers: range) -> tuple[str, ...]:
    """Names of the parameters of these layers, in model order, without factors of adapters."""
    suffixes = _layer_suffixes(shape, _LAYER_CUTS)
    return tuple(f"model.layers.{layer}.{suffix}" for layer in layers for suffix in suffixes)


def layer_factors(shape: DecoderShape, layers: range) -> tuple[str, ...]:
    """Names of the adapter's factors in these layers, in model order; none without an adapter."""
    if shape.adapter is None:
        return ()
    return tuple(
        f"model.layers.{layer}.{name}"
        for layer in layers
        for module in shape.adapter.targets
        for name in shape.adapter.factors_of(module)
    )


def _layer_suffixes(shape: DecoderShape, suffixes: Iterable[str]) -> tuple[str, ...]:
    absent = set()
    if not shape.has_qkv_bias:
        absent |= {f"self_attn.{name}_proj.bias" for name in "qkv"}
    if not shape.has_output_bias:
        absent.add("self_attn.o_proj.bias")
    if not shape.has_mlp_bias:
        absent |= {f"mlp.{name}_proj.bias" for name in ("gate", "up", "down")}
    if not shape.has_qk_norm:
        absent |= {f"self_attn.{name}_norm.weight" for name in "qk"}
    return tuple(suffix for suffix in suffixes if suffix not in absent)


def _head_names(shape: DecoderShape) -> tuple[str, ...]:
    """Parameters of the head that are its own."""
    if shape.head == "score":
        return ("score.weight", "score.bias") if shape.has_head_bias else ("score.weight",)
    return () if shape.is_tied else (LM_HEAD,)


def _size(config: Mapping[str, Any], key: str) -> int:
    number = config.get(key)
    if not isinstance(number, int) or number < 1:
        raise ValueError(f"{key} is {number!r} in the model's config: give a whole number above 0")
    return number
