"""Sizes of decoders from config.json: parameters, products and bytes of keys and values.

Families that ranks can share (`engine/layout/families.py`) and mixtures of experts that run on one
rank today. Embeddings are looked up, so that they have parameters and no products. The factors of
an adapter are counted apart: its base is a model as any other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from rolemesh.coordinator.mapping.errors import PlanError
from rolemesh.engine.layout.families import DecoderShape, Head, cut_of
from rolemesh.engine.layout.family_records import known_families
from rolemesh.engine.specs import AdapterSpec

_EXPERT_FAMILIES = {"mixtral": "llama", "qwen2_moe": "qwen2", "qwen3_moe": "qwen3"}
"""Mixtures of experts, and the dense family whose attention they have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The mixture in each layer."""

    number: int
    chosen: int
    """Experts that a token goes through."""
    inner_size: int
    """Inner width of an expert."""
    shared_size: int = 0
    """Inner width of what every token goes through; 0: there is no such."""
    is_gated: bool = False
    """The shared part is weighed by a gate."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder, as far as seconds and bytes follow from it."""

    shape: DecoderShape
    """Its sizes, and those of its adapter; of a mixture, those of a dense model with the same
    attention."""
    experts: Experts | None = None
    dense_layers: tuple[int, ...] = ()
    """Layers of a mixture that have a plain MLP."""

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        *,
        head: Head = "lm_head",
        num_layers: int | None = None,
        adapter: AdapterSpec | None = None,
    ) -> Self:
        """Reads the sizes of a model.

        Args:
            config: config.json as a dict.
            head: What stands on top: the projection to the vocabulary, or one to a score.
            num_layers: Layers that are kept; None for all.
            adapter: That is trained beside it. Of a mixture, beside its attention alone.

        Raises:
            PlanError: No such family is known here, a size is missing, or the adapter does not fit.
        """
        family = str(config.get("model_type"))
        sizes = dict(config)
        if num_layers is not None:
            sizes["num_hidden_layers"] = num_layers
        try:
            if family not in _EXPERT_FAMILIES:
                shape = DecoderShape.from_config(sizes, head=head)
                return cls(shape=_adapted(shape, adapter))
            experts = _experts(family, config)
            sizes["model_type"] = _EXPERT_FAMILIES[family]
            sizes.setdefault("intermediate_size", experts.inner_size)
            shape = _adapted(DecoderShape.from_config(sizes, head=head), adapter)
        except (ValueError, KeyError) as error:
            known = (known_families(), *_EXPERT_FAMILIES)
            raise PlanError(
                f"config.json of model_type {family!r} cannot be planned with ({error}): families "
                f"are {', '.join(known)}"
            ) from error
        every = int(config.get("decoder_sparse_step") or 1)
        given = tuple(config.get("mlp_only_layers") or ())
        dense = [
            layer for layer in range(shape.num_layers) if layer in given or (layer + 1) % every != 0
        ]
        return cls(shape=shape, experts=experts, dense_layers=tuple(dense))

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        *,
        head: Head = "lm_head",
        num_layers: int | None,
        adapter: AdapterSpec | None = None,
    ) -> Self:
        """Reads config.json of a Hugging Face folder; no weights.

        Raises:
            PlanError: There is no config.json, or as from_config.
        """
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise PlanError(
                f"{folder} has no config.json that can be read ({error}): a plan needs it, and no "
                "weights"
            ) from error
        return cls.from_config(
            config.get("text_config", config), head=head, num_layers=num_layers, adapter=adapter
        )

    @property
    def can_be_cut(self) -> bool:
        """Whether ranks can share it: a mixture of experts runs on one rank."""
        return self.experts is None

    @cached_property
    def layer_parameters(self) -> float:
        """Of one layer; of a mixture, the mean over layers."""
        return sum(self._layer(layer)[0] for layer in range(self.shape.num_layers)) / (
            self.shape.num_layers
        )

    @cached_property
    def num_parameters(self) -> int:
        """All parameters, a tied embedding once; none of an adapter."""
        layers = sum(self._layer(layer)[0] for layer in range(self.shape.num_layers))
        return layers + self.outer_parameters

    @cached_property
    def outer_parameters(self) -> int:
        """Those outside the layers: embedding, last norm, head."""
        manifest = _one_layer(self.shape)
        return sum(math.prod(sizes) for name, sizes in manifest if not _is_of_layer(name))

    @property
    def layers_share(self) -> float:
        """Share of all parameters that the layers have, which are matrices but for few vectors."""
        return 1 - self.outer_parameters / self.num_parameters

    @cached_property
    def active_parameters(self) -> int:
        """Parameters of matrices that a token is multiplied with: no embedding, chosen experts."""
        layers = sum(self._layer(layer)[1] for layer in range(self.shape.num_layers))
        return layers + self.head_parameters

    @cached_property
    def head_parameters(self) -> int:
        """Parameters of the head's matrix, whether it is tied or not."""
        rows = self.shape.vocab_size if self.shape.head == "lm_head" else self.shape.num_labels
        return rows * self.shape.hidden_size

    @cached_property
    def factor_parameters(self) -> int:
        """Those of an adapter's factors; 0 without one."""
        return sum(self._layer_factors(layer) for layer in range(self.shape.num_layers))

    @cached_property
    def trained_parameters(self) -> int:
        """Those that training changes: all, or an adapter's factors and a score head."""
        if self.shape.adapter is None:
            return self.num_parameters
        return self.factor_parameters + self.trained_head_parameters

    @property
    def trained_head_parameters(self) -> int:
        """Of a score head, which is trained as a whole whatever else is; of no other."""
        return self.head_parameters if self.shape.head == "score" else 0

    def forward_flops(self, tokens: float, context: float) -> float:
        """Floating-point operations of a forward pass.

        Two for each matrix parameter and token, those of an adapter's factors among them, and for
        the scores of attention and their sums 4 x layers x query width x context (arXiv 2205.05198,
        appendix A, without the half that a causal kernel leaves out).

        Args:
            tokens: Tokens that are computed.
            context: Positions that a token attends to, in the mean over tokens.
        """
        matrices = self.active_parameters + self.factor_parameters
        return tokens * (2 * matrices + self._attention_flops(context))

    def backward_flops(self, tokens: float, context: float) -> float:
        """Floating-point operations of a backward pass.

        As many as forward for the gradients of inputs, and as many again for those of weights, of
        which an adapter leaves those of the frozen matrices out. In attention both factors of a
        product are inputs.

        Args:
            tokens: Tokens that are computed.
            context: Positions that a token attends to, in the mean over tokens.
        """
        trained = self.active_parameters
        if self.shape.adapter is not None:
            trained = self.trained_parameters
        forward = self.forward_flops(tokens, context)
        return forward + tokens * (2 * trained + self._attention_flops(context))

    def _attention_flops(self, context: float) -> float:
        """Operations of a token in all layers for scores of attention and their sums."""
        width = self.shape.num_heads * self.shape.head_dim
        return 4 * self.shape.num_layers * width * context

    def _layer_factors(self, layer: int) -> int:
        """Parameters of an adapter's factors in a layer."""
        is_mixed = self.experts is not None and layer not in self.dense_layers
        return sum(
            number for name, number in _factors(self.shape) if not (is_mixed and ".mlp." in name)
        )

    def _layer(self, layer: int) -> tuple[int, int]:
        """Parameters of a layer: all, and those of matrices that a token is multiplied with."""
        shape = self.shape
        total = active = 0
        for name, parameter in _one_layer(shape):
            if not _is_of_layer(name):
                continue
            if self.experts is not None and layer not in self.dense_layers and ".mlp." in name:
                continue
            total += math.prod(parameter)
            active += math.prod(parameter) if len(parameter) == 2 else 0
        if self.experts is None or layer in self.dense_layers:
            return total, active
        experts, hidden = self.experts, shape.hidden_size
        one = 3 * hidden * experts.inner_size
        beside = 3 * hidden * experts.shared_size + hidden * experts.number
        beside += hidden if experts.is_gated else 0
        return total + experts.number * one + beside, active + experts.chosen * one + beside


def _adapted(shape: DecoderShape, adapter: AdapterSpec | None) -> DecoderShape:
    return shape if adapter is None else shape.with_adapter(adapter.rank, adapter.targets)


def _one_layer(shape: DecoderShape) -> list[tuple[str, tuple[int, ...]]]:
    """Names and sizes of the parameters of a decoder that has one layer, without an adapter's."""
    one = replace(shape, num_layers=1, adapter=None)
    return [(name, parameter.shape) for name, parameter in one.manifest("float32").items()]


def _is_of_layer(name: str) -> bool:
    return name.startswith("model.layers.")


def whole_parameters(shape: DecoderShape) -> tuple[int, int]:
    """Parameters that every tensor slice holds all of: of a layer, and outside the layers."""
    sizes = {name: math.prod(sizes) for name, sizes in _one_layer(shape)}
    whole = [(name, number) for name, number in sizes.items() if cut_of(shape, name) == "whole"]
    inside = sum(number for name, number in whole if _is_of_layer(name))
    return inside, sum(number for _, number in whole) - inside


def whole_factors(shape: DecoderShape) -> int:
    """Parameters of an adapter in a layer that every tensor slice holds all of."""
    return sum(number for name, number in _factors(shape) if cut_of(shape, name) == "whole")


def _factors(shape: DecoderShape) -> list[tuple[str, int]]:
    """Names of the factors in a layer, and their parameters."""
    if shape.adapter is None:
        return []
    trained = replace(shape, num_layers=1).trained_manifest("float32")
    return [(name, math.prod(one.shape)) for name, one in trained.items() if _is_of_layer(name)]


def _experts(family: str, config: Mapping[str, Any]) -> Experts:
    if family == "mixtral":
        return Experts(
            number=config["num_local_experts"],
            chosen=config["num_experts_per_tok"],
            inner_size=config["intermediate_size"],
        )
    shared = int(config.get("shared_expert_intermediate_size") or 0)
    return Experts(
        number=config["num_experts"],
        chosen=config["num_experts_per_tok"],
        inner_size=config["moe_intermediate_size"],
        shared_size=shared if family == "qwen2_moe" else 0,
        is_gated=family == "qwen2_moe" and shared > 0,
    )
