"""Decoder families that can be spread over ranks: their parameters, and which stage has which.

Pure: no torch. `family_records.py` says what parameters a family has, under their Hugging Face
names, and `slices.py` how slices cut them. Stages are runs of layers.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeAlias

from rolemesh.engine.layout.adapters import (
    STACKS,
    AdapterShape,
    adapted_parameter,
    check_rank,
    chosen_targets,
    factor_shape,
    is_factor,
    split_factor,
)
from rolemesh.engine.layout.family_records import (
    DEEPSTACK_LEVELS,
    FUSED_CUTS,
    RECORDS,
    Cut,
    FamilyRecord,
    LayerKind,
    Part,
    known_families,
)
from rolemesh.engine.layout.manifest import DtypeName, Manifest, Parameter
from rolemesh.engine.layout.ranks import LayoutError

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

_IN_EXPERTS, _ROUTER = "mlp.experts.", "mlp.gate."
"""Begin the names within a layer of the stacks of experts, and of what belongs to the router."""

ROUTER_WEIGHT = "mlp.gate.weight"
"""What scores experts, by its name within a layer."""

_EXPERT_NUMBERS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields that give the number of experts: a family reads any of them, and writes one."""

_OUTER_CUTS: dict[str, Cut] = {
    EMBEDDING: "vocab",
    NORM: "whole",
    LM_HEAD: "vocab",
    "score.weight": "whole",
    "score.bias": "whole",
}


class UnsupportedFamilyError(ValueError):
    """A model that cannot be spread over ranks: names the family and what to do instead."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The experts of a mixture."""

    number: int
    """Of a layer."""
    inner_size: int
    """Inner width of one."""
    shared_size: int
    """Inner width of the MLP that every token goes through beside them; 0: there is none."""
    layers: frozenset[int]
    """Those that have experts; the others have one MLP."""


class RefusedSettingError(UnsupportedFamilyError):
    """A model of a known family that computes what nothing here does, on one rank neither."""


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
    switched_on: frozenset[str] = frozenset()
    """Fields of its config that give it parameters which not every model of the family has."""
    head: Head
    num_labels: int = 1
    """Rows of a score head."""
    has_head_bias: bool = False
    """The score head has a bias."""
    experts: ExpertShape | None = None
    """Of a mixture of experts."""
    num_deepstack_levels: int = 0
    """First layers that a tower's further features are added behind."""
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
        record = RECORDS.get(family)
        if record is None:
            raise UnsupportedFamilyError(
                f"model_type is {family!r}: only {known_families()} can be spread over ranks; "
                "give the layout pp=1, tp=1, dp=1"
            )
        if config.get("quantization_config") is not None:
            raise UnsupportedFamilyError(
                f"the {family} model has a quantization_config: quantized weights cannot be spread "
                "over ranks; give the layout pp=1, tp=1, dp=1, or a model in bfloat16 or float32"
            )
        given = {**record.defaults, **config}
        for name, why in record.refused.items():
            if given.get(name):
                raise RefusedSettingError(
                    f"the {family} model has {name} {given[name]!r}, and {why}: take another model"
                )
        hidden, heads = _size(given, "hidden_size"), _size(given, "num_attention_heads")
        kv_heads = given.get("num_key_value_heads") or heads
        head_dim = given.get("head_dim") or record.defaults.get("head_dim") or hidden // heads
        if heads % kv_heads:
            raise ValueError(
                f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}: "
                "fix config.json"
            )
        return cls(
            family=family,
            num_layers=_size(given, "num_hidden_layers"),
            hidden_size=hidden,
            intermediate_size=_size(given, "intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=_size(given, "vocab_size"),
            is_tied=head == "lm_head" and bool(given.get("tie_word_embeddings")),
            switched_on=frozenset(
                part.when for part in record.parts if part.when and given.get(part.when)
            ),
            head=head,
            num_labels=num_labels,
            has_head_bias=has_head_bias,
            experts=_experts(record, given),
            num_deepstack_levels=given.get(DEEPSTACK_LEVELS, 0),
        )

    @property
    def record(self) -> FamilyRecord:
        """What is known of its family."""
        return RECORDS[self.family]

    @property
    def embedding_scale(self) -> float:
        """What the embedding's rows are multiplied by."""
        return math.sqrt(self.hidden_size) if self.record.scales_embedding else 1.0

    @property
    def has_qk_norm(self) -> bool:
        """Queries and keys are normed."""
        return any(part.suffix == "self_attn.q_norm.weight" for part in layer_parts(self, 0))

    def kind(self, layer: int) -> LayerKind:
        """Whether a layer has one MLP, or experts."""
        return "sparse" if self.experts and layer in self.experts.layers else "dense"

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary rows that slices divide: the next multiple of VOCAB_BLOCK."""
        return -(-self.vocab_size // VOCAB_BLOCK) * VOCAB_BLOCK

    def manifest(self, dtype: DtypeName) -> Manifest:
        """All parameters in model order, a tied embedding once."""
        manifest = {}
        for name, _ in stage_tensors(self, pp=0, size=1):
            is_buffer = self.is_buffer(name)
            kept: DtypeName = "float32" if is_buffer else dtype
            manifest[name] = Parameter(parameter_shape(self, name), kept, is_buffer)
        return manifest

    def is_buffer(self, name: str) -> bool:
        """Whether a parameter is one that no gradient reaches, and every rank holds whole."""
        part = None if is_factor(name) else part_of_layer(self, name)
        return part is not None and part.is_buffer

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
        modules = {stack: module for module, stack in STACKS.items()}
        found = {
            modules.get(part.suffix, part.suffix.removesuffix(".weight")): layer
            for layer in range(self.num_layers)
            for part in layer_parts(self, layer)
            if part.suffix.endswith("_proj.weight") or part.suffix in modules
        }
        chosen = chosen_targets(targets, found)
        for module in chosen:
            name = adapted_parameter(f"model.layers.{found[module]}.{module}")
            check_rank(rank, module, parameter_shape(self, name))
        return replace(self, adapter=AdapterShape(rank, chosen))


def has_plan(config: Mapping[str, Any]) -> bool:
    """Whether the model of a config.json is of a family whose parameters are known here."""
    return config.get("model_type") in RECORDS


def known_shape(config: Mapping[str, Any]) -> DecoderShape | None:
    """Sizes of a language model, or None where it cannot be spread over ranks.

    Args:
        config: config.json as a dict, or `PretrainedConfig.to_dict()`.
    """
    try:
        return DecoderShape.from_config(config)
    except UnsupportedFamilyError:
        return None


def layer_parts(shape: DecoderShape, layer: int) -> tuple[Part, ...]:
    """The parameters that a layer has, in model order, without factors of adapters.

    Buffers come last.
    """
    parts = _parts_by_suffix(shape.family, shape.switched_on, shape.kind(layer))
    return tuple(parts.values())


@functools.cache
def _parts_by_suffix(
    family: str, switched_on: frozenset[str], kind: LayerKind
) -> Mapping[str, Part]:
    parts = [
        part
        for part in RECORDS[family].parts
        if (not part.when or part.when in switched_on) and part.only in (None, kind)
    ]
    return {part.suffix: part for part in sorted(parts, key=lambda part: part.is_buffer)}


def part_of_layer(shape: DecoderShape, name: str) -> Part | None:
    """What the record says of the parameter of that name; None outside of the layers.

    Raises:
        UnsupportedFamilyError: The family has no such parameter.
    """
    match = _LAYER.fullmatch(name)
    part = match and _parts_by_suffix(
        shape.family, shape.switched_on, shape.kind(int(match[1]))
    ).get(match[2])
    if part is None and name not in _OUTER_CUTS:
        raise UnsupportedFamilyError(
            f"parameter {name!r} belongs to no {shape.family} model of this config.json: give the "
            "layout pp=1, tp=1, dp=1"
        )
    return part


def cut_of(shape: DecoderShape, name: str) -> Cut:
    """How tensor slices cut the parameter of that Hugging Face name.

    A factor is cut on the side on which its matrix is.

    Raises:
        UnsupportedFamilyError: The family has no such parameter.
    """
    split = split_factor(name)
    if split is None:
        part = part_of_layer(shape, name)
        return _OUTER_CUTS[name] if part is None else part.cut
    cut = cut_of(shape, adapted_parameter(split[0]))
    is_by_columns = cut in ("columns", "experts_columns")
    return cut if is_by_columns == (split[1] == "A") else "whole"


def parameter_shape(shape: DecoderShape, name: str) -> tuple[int, ...]:
    """Global shape of a parameter, vocabulary not padded."""
    split = split_factor(name)
    if split is not None:
        if shape.adapter is None:
            raise ValueError(f"parameter {name!r} is a factor, but the shape has no adapter")
        beside = parameter_shape(shape, adapted_parameter(split[0]))
        return factor_shape(beside, split[1], shape.adapter.rank)
    part = part_of_layer(shape, name)
    hidden = shape.hidden_size
    if part is None:
        height = shape.vocab_size if _OUTER_CUTS[name] == "vocab" else shape.num_labels
        outer = {NORM: (hidden,), "score.bias": (height,)}
        return outer.get(name, (height, hidden))
    rows = sum(projection_rows(shape, part))
    if shape.experts is not None and part.suffix.startswith(_IN_EXPERTS):
        inner = shape.experts.inner_size
        is_down = part.cut == "experts_columns"
        return (shape.experts.number, rows, inner if is_down else hidden)
    if shape.experts is not None and part.suffix.startswith(_ROUTER):
        return (shape.experts.number,) if part.is_buffer else (shape.experts.number, hidden)
    if part.suffix.endswith("norm.weight"):
        return (shape.head_dim,) if part.sees_own_part else (rows,)
    if part.suffix.endswith(".bias"):
        return (rows,)
    if part.cut != "columns":
        return (rows, hidden)
    is_output = part.suffix == "self_attn.o_proj.weight"
    width = shape.num_heads * shape.head_dim if is_output else _inner_size(shape, part)
    return (hidden, width)


def projection_rows(shape: DecoderShape, part: Part) -> tuple[int, ...]:
    """Rows of a parameter of a layer, of a stack those of one expert: of each projection in it."""
    sizes: Mapping[Cut, int] = {
        "heads": shape.num_heads * shape.head_dim,
        "kv_heads": shape.num_kv_heads * shape.head_dim,
        "rows": _inner_size(shape, part),
    }
    return tuple(sizes.get(one, shape.hidden_size) for one in FUSED_CUTS.get(part.cut, (part.cut,)))


def _inner_size(shape: DecoderShape, part: Part) -> int:
    """Inner width of the MLP, or of the experts, that a parameter of a layer belongs to."""
    if shape.experts is not None and part.suffix.startswith(_IN_EXPERTS):
        return shape.experts.inner_size
    if shape.experts is not None and part.suffix.startswith("mlp.shared_experts."):
        return shape.experts.shared_size
    return shape.intermediate_size


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
    return tuple(
        f"model.layers.{layer}.{part.suffix}"
        for layer in layers
        for part in layer_parts(shape, layer)
    )


def layer_factors(shape: DecoderShape, layers: range) -> tuple[str, ...]:
    """Names of the adapter's factors in these layers, in model order; none without an adapter."""
    if shape.adapter is None:
        return ()
    return tuple(
        f"model.layers.{layer}.{name}"
        for layer in layers
        for module in shape.adapter.targets
        if _has_module(shape, layer, module)
        for name in shape.adapter.factors_of(module)
    )


def _has_module(shape: DecoderShape, layer: int, module: str) -> bool:
    parts = _parts_by_suffix(shape.family, shape.switched_on, shape.kind(layer))
    return adapted_parameter(module) in parts


def _head_names(shape: DecoderShape) -> tuple[str, ...]:
    """Parameters of the head that are its own."""
    if shape.head == "score":
        return ("score.weight", "score.bias") if shape.has_head_bias else ("score.weight",)
    return () if shape.is_tied else (LM_HEAD,)


def _experts(record: FamilyRecord, config: Mapping[str, Any]) -> ExpertShape | None:
    """The experts of a config.json in which defaults are filled in."""
    fields = record.experts
    if fields is None:
        return None
    number = next((name for name in _EXPERT_NUMBERS if name in config), "")
    inner_size = _size(config, fields.inner_size)
    first = config.get("first_k_dense_replace") or 0
    every = config.get("decoder_sparse_step") or 1
    dense = config.get("mlp_only_layers") or ()
    layers = (
        layer
        for layer in range(first, _size(config, "num_hidden_layers"))
        if (layer + 1) % every == 0 and layer not in dense
    )
    return ExpertShape(
        number=_size(config, number) if number else fields.default,
        inner_size=inner_size,
        shared_size=_size(config, fields.shared) * inner_size if fields.shared else 0,
        layers=frozenset(layers),
    )


def _size(config: Mapping[str, Any], key: str) -> int:
    number = config.get(key)
    if not isinstance(number, int) or number < 1:
        raise ValueError(f"{key} is {number!r} in the model's config: give a whole number above 0")
    return number
