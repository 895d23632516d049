"""Sizes of decoders from config.json: parameters, products and bytes of keys and values.

Of families that ranks can share (`engine/layout/families.py`), mixtures of experts among them.
Embeddings are looked up, so that they have parameters and no products. The factors of an adapter
are counted apart: its base is a model as any other.
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
from rolemesh.engine.layout.families import (
    DecoderShape,
    Head,
    cut_of,
    layer_factors,
    layer_parameters,
    parameter_shape,
)
from rolemesh.engine.layout.family_records import known_families
from rolemesh.engine.layout.slices import is_stack
from rolemesh.engine.specs import AdapterSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """Parameters of a layer, or of several together. Buffers are left out."""

    whole: int = 0
    """Those that every tensor slice holds all of."""
    cut: int = 0
    """Those that tensor slices divide, but for the experts'."""
    experts: int = 0
    """Those of all experts, which tensor slices divide too."""
    active: int = 0
    """Those of matrices that a token is multiplied with: of the experts, the chosen ones."""
    factors: int = 0
    """Those of an adapter."""
    whole_factors: int = 0
    """Of these, what every tensor slice holds all of."""

    @property
    def total(self) -> int:
        """All but an adapter's."""
        return self.whole + self.cut + self.experts

    def on_slice(self, tp: int) -> float:
        """What one of tp tensor slices holds, without experts and adapter."""
        return self.cut / tp + self.whole

    def factors_on_slice(self, tp: int) -> float:
        """What one of tp tensor slices holds of an adapter."""
        return (self.factors - self.whole_factors) / tp + self.whole_factors

    def __add__(self, other: LayerSizes) -> LayerSizes:
        return LayerSizes(
            whole=self.whole + other.whole,
            cut=self.cut + other.cut,
            experts=self.experts + other.experts,
            active=self.active + other.active,
            factors=self.factors + other.factors,
            whole_factors=self.whole_factors + other.whole_factors,
        )


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder, as far as seconds and bytes follow from it."""

    shape: DecoderShape
    """Its sizes, and those of its adapter."""
    chosen: int = 0
    """Experts that a token goes through; 0: it has none."""

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
            adapter: That is trained beside it. Of a mixture, beside all but its experts.

        Raises:
            PlanError: No such family is known here, a size is missing, or the adapter does not fit.
        """
        sizes = dict(config)
        if num_layers is not None:
            sizes["num_hidden_layers"] = num_layers
        try:
            shape = DecoderShape.from_config(sizes, head=head)
            if adapter is not None:
                shape = shape.with_adapter(adapter.rank, adapter.targets)
            return cls(shape=shape, chosen=_chosen(shape, config))
        except (ValueError, KeyError) as error:
            raise PlanError(
                f"config.json of model_type {str(config.get('model_type'))!r} cannot be planned "
                f"with ({error}): families are {known_families()}"
            ) from error

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

    @cached_property
    def layers(self) -> tuple[LayerSizes, ...]:
        """Parameters of each layer."""
        shape = self.shape
        kinds = [shape.kind(layer) for layer in range(shape.num_layers)]
        sizes = {kind: self._layer(kinds.index(kind)) for kind in set(kinds)}
        return tuple(sizes[kind] for kind in kinds)

    @cached_property
    def in_layers(self) -> LayerSizes:
        """Parameters of all layers together."""
        return sum(self.layers, LayerSizes())

    @cached_property
    def num_parameters(self) -> int:
        """All parameters, a tied embedding once; none of an adapter."""
        return self.in_layers.total + self.outer_parameters

    @cached_property
    def outer_parameters(self) -> int:
        """Those outside the layers: embedding, last norm, head."""
        return sum(_outer(self.shape).values())

    @cached_property
    def outer_whole(self) -> int:
        """Of these, what every tensor slice holds all of."""
        outer = _outer(self.shape)
        return sum(number for name, number in outer.items() if cut_of(self.shape, name) == "whole")

    @property
    def layers_share(self) -> float:
        """Share of all parameters that the layers have, which are matrices but for few vectors."""
        return 1 - self.outer_parameters / self.num_parameters

    @cached_property
    def active_parameters(self) -> int:
        """Parameters of matrices that a token is multiplied with: no embedding, chosen experts."""
        return self.in_layers.active + self.head_parameters

    def read_parameters(self, tokens: float, ep: int = 1) -> float:
        """Parameters of matrices that a pass reads, of experts only those that some token chose.

        Args:
            tokens: Of the pass.
            ep: Ranks that share the experts out; a pass on each of them reads its own part.
        """
        experts = self.shape.experts
        if experts is None:
            return self.active_parameters
        one = len(experts.layers) * 3 * self.shape.hidden_size * experts.inner_size
        # Chosen equally often: an owner has as many rows for its experts as each rank sends out.
        read = min(experts.number / ep, max(self.chosen, tokens * self.chosen))
        return self.active_parameters + (read - self.chosen) * one

    @cached_property
    def head_parameters(self) -> int:
        """Parameters of the head's matrix, whether it is tied or not."""
        rows = self.shape.vocab_size if self.shape.head == "lm_head" else self.shape.num_labels
        return rows * self.shape.hidden_size

    @cached_property
    def factor_parameters(self) -> int:
        """Those of an adapter's factors; 0 without one."""
        return self.in_layers.factors

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

    def _layer(self, layer: int) -> LayerSizes:
        """Counts the parameters of a layer."""
        shape, at = self.shape, range(layer, layer + 1)
        whole = cut = experts = active = 0
        for name in layer_parameters(shape, at):
            sizes = parameter_shape(shape, name)
            number = math.prod(sizes)
            if shape.is_buffer(name):
                continue
            if is_stack(shape, name):
                experts += number
                active += number // sizes[0] * self.chosen
                continue
            active += number if len(sizes) == 2 else 0
            if cut_of(shape, name) == "whole":
                whole += number
            else:
                cut += number
        factors = {
            name: math.prod(parameter_shape(shape, name)) for name in layer_factors(shape, at)
        }
        return LayerSizes(
            whole=whole,
            cut=cut,
            experts=experts,
            active=active,
            factors=sum(factors.values()),
            whole_factors=sum(
                number for name, number in factors.items() if cut_of(shape, name) == "whole"
            ),
        )


def _outer(shape: DecoderShape) -> dict[str, int]:
    """Parameters outside the layers, by their names."""
    one = replace(shape, num_layers=1, adapter=None)
    return {
        name: math.prod(parameter.shape)
        for name, parameter in one.manifest("float32").items()
        if not name.startswith("model.layers.")
    }


def _chosen(shape: DecoderShape, config: Mapping[str, Any]) -> int:
    if shape.experts is None:
        return 0
    chosen = config.get("num_experts_per_tok")
    if not isinstance(chosen, int) or not 1 <= chosen <= shape.experts.number:
        raise ValueError(
            f"num_experts_per_tok is {chosen!r}: give how many of the {shape.experts.number} "
            "experts a token goes through"
        )
    return chosen
