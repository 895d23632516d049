"""What the routers of a mixture choose: counted, kept, or as it was chosen before.

Replaying routes (R3, arXiv 2510.11370): a policy is trained with the experts that its tokens went
through when they were sampled. The router's own scores, of which gradients are asked, weigh them.

Balancing without a loss term (arXiv 2408.15664; 2412.19437, section 2.1.2): after each optimizer
step the bias by which experts are chosen grows by a constant where an expert had less than the mean
load, and falls where it had more.

Shape letters: S packed tokens, N completion tokens, L layers with experts, K experts of a token, E
experts, W = L * K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist

from rolemesh.engine.layout.families import DecoderShape, stage_layers
from rolemesh.engine.packing.packed_rows import PackedRows, Rectangle
from rolemesh.engine.parallel.mesh import RankGroup
from rolemesh.engine.specs.columns import NO_ROUTE


@dataclass(slots=True)
class Routes:
    """Of one pass: what routers are told, and what they tell."""

    given_SW: torch.Tensor | None = None
    """uint8, the experts of each token in all layers of the model; None: routers choose."""
    counted_N: torch.Tensor | None = None
    """int64, places among S whose choices are counted; None: none is."""
    taken: dict[int, torch.Tensor] | None = None
    """Receives the choices of each layer, int64 [S, K], by its place among those with experts."""
    is_again: bool = False
    """Whether the pass is recomputed, so that its choices have been counted."""


_routes: ContextVar[Routes | None] = ContextVar("routes", default=None)


class Routed(AbstractContextManager["Routed", None]):
    """Has the routers of a pass within the block follow routes. It may be entered anew."""

    def __init__(self, routes: Routes | None) -> None:
        self._routes = routes
        self._tokens: list[Token[Routes | None]] = []

    def __enter__(self) -> Self:
        self._tokens.append(_routes.set(self._routes))
        return self

    def __exit__(self, *error: object) -> None:
        _routes.reset(self._tokens.pop())


def routed_again() -> Routed:
    """A context in which what runs now may be recomputed later, with the routes of now."""
    now = _routes.get()
    return Routed(None if now is None else replace(now, is_again=True))


def routes_of(rows: PackedRows, *, counts: bool, rectangle: Rectangle | None = None) -> Routes:
    """Those of a pass over rows.

    Args:
        rows: With the routes that are replayed, if any are. Of rows that are cut, S and N count
            this rank's part alone.
        rectangle: The same rows padded, where the model takes them so: S is then of all of it.
        counts: Whether the choices for completion tokens are counted, each row's by itself: so what
            rows share, and with which others they are packed, changes no count.
    """
    layout, cut = rows.layout, rows.cut
    if cut is not None:
        counted_M = cut.completions.tokens_M.index_M if counts else None
        return Routes(given_SW=cut.routes_LW, counted_N=counted_M)
    places_N = layout.states_U.index_M[layout.rows_N.index_M] if counts else None
    given_SW = rows.routes_SW
    if rectangle is not None:
        places_N = None if places_N is None else rectangle.index_S[places_N]
        if given_SW is not None:
            padded_SW = given_SW.new_full((rectangle.tokens_BT.numel(), len(given_SW[0])), NO_ROUTE)
            padded_SW[rectangle.index_S] = given_SW
            given_SW = padded_SW
    return Routes(given_SW=given_SW, counted_N=places_N)


class Routers:
    """The routers of a decoder, or of the stage that a rank holds.

    Owned by the rank's compute thread.
    """

    def __init__(self, lm: Any, shape: DecoderShape, stages: RankGroup) -> None:
        """Listens to the routers.

        Args:
            lm: A transformers model of a family with experts.
            shape: Sizes of the whole model.
            stages: The pipeline's.

        Raises:
            ValueError: The model has no experts.
        """
        if shape.experts is None:
            raise ValueError(f"the {shape.family} model has no experts")
        self.num_experts = shape.experts.number
        layers = stage_layers(shape, pp=stages.index, size=stages.size)
        self.num_layers = len(shape.experts.layers)
        """L, of the whole model."""
        self.layers = [layer for layer in shape.experts.layers if layer in layers]
        """Numbers, in the model, of the layers with experts of this stage."""
        first = sum(layer < layers.start for layer in shape.experts.layers)
        self._gates = [layer.mlp.gate for layer in lm.base_model.layers if _has_experts(layer.mlp)]
        config = lm.config
        self.num_chosen: int = config.num_experts_per_tok
        """K."""
        self._is_sigmoid = shape.record.router == "sigmoid"
        self._normalises = shape.family == "mixtral" or bool(config.norm_topk_prob)
        self._scale = float(getattr(config, "routed_scaling_factor", 1.0))
        self._counts: dict[int, torch.Tensor] = {}
        for number, gate in enumerate(self._gates):
            gate.register_forward_hook(self._hook(number, first + number))

    @property
    def width(self) -> int:
        """Numbers of a token's route: L * K."""
        return self.num_layers * self.num_chosen

    def biases(self) -> list[torch.Tensor]:
        """The biases by which experts are chosen, float32 [E], of this stage's layers; or none."""
        return [
            gate.e_score_correction_bias
            for gate in self._gates
            if hasattr(gate, "e_score_correction_bias")
        ]

    def forget(self) -> None:
        """Drops what was counted since the last optimizer step."""
        self._counts.clear()

    @torch.no_grad()
    def loads(self, replicas: RankGroup) -> list[torch.Tensor]:
        """Choices of each expert since the last step, of all replicas: float64 [E] a layer.

        Every rank of the group calls it. What was counted is forgotten.
        """
        device = self._gates[0].weight.device if self._gates else torch.device("cpu")
        nothing = torch.zeros(self.num_experts, dtype=torch.float64, device=device)
        counts = [self._counts.get(number, nothing) for number in range(len(self._gates))]
        self.forget()
        if not counts:
            return []
        together = torch.stack(counts)
        if replicas.process_group is not None:
            dist.all_reduce(together, group=replicas.process_group)
        return list(together)

    @torch.no_grad()
    def balance(self, loads: Sequence[torch.Tensor], rate: float) -> None:
        """Moves each bias by `rate` towards even loads, float64 [E] a layer."""
        for bias, load in zip(self.biases(), loads, strict=True):
            bias += rate * torch.sign(load.mean() - load).to(bias.dtype)

    def _hook(self, number: int, place: int) -> Any:
        def follow(_: Any, args: Any, output: tuple[torch.Tensor, ...]) -> Any:
            routes = _routes.get()
            if routes is None:
                return None
            logits_SE, weights_SK, chosen_SK = output
            if routes.given_SW is not None:
                own = slice(place * self.num_chosen, (place + 1) * self.num_chosen)
                chosen_SK = _as_given(routes.given_SW[:, own], chosen_SK)
                weights_SK = self.weights_of(logits_SE, chosen_SK).to(weights_SK.dtype)
            if routes.counted_N is not None and not routes.is_again:
                chosen = chosen_SK[routes.counted_N].flatten()
                counts = torch.bincount(chosen, minlength=self.num_experts).double()
                self._counts[number] = self._counts.get(number, 0) + counts
            if routes.taken is not None:
                routes.taken[place] = chosen_SK
            return logits_SE, weights_SK, chosen_SK

        return follow

    def weights_of(self, logits_SE: torch.Tensor, chosen_SK: torch.Tensor) -> torch.Tensor:
        """What the router's scores give the chosen experts, floating [S, K], as it weighs its own.

        Args:
            logits_SE: Floating.
            chosen_SK: int64.
        """
        if self._is_sigmoid:
            weights_SK = logits_SE.float().sigmoid().gather(1, chosen_SK)
            if self._normalises:
                weights_SK = weights_SK / (weights_SK.sum(-1, keepdim=True) + 1e-20)
            return weights_SK * self._scale
        weights_SK = logits_SE.softmax(-1, dtype=torch.float32).gather(1, chosen_SK)
        return weights_SK / weights_SK.sum(-1, keepdim=True) if self._normalises else weights_SK


def load_metrics(loads: Sequence[torch.Tensor]) -> list[tuple[float, float]]:
    """How even loads are, [E] a layer: (largest over mean, entropy over that of even loads).

    Nothing of a layer in which nothing was counted.
    """
    found = []
    for load in loads:
        if load.any():
            entropy = float(torch.special.entr(load / load.sum()).sum()) / math.log(len(load))
            found.append((float(load.max() / load.mean()), entropy))
    return found


def _has_experts(mlp: Any) -> bool:
    return hasattr(mlp, "experts")


def _as_given(given_SK: torch.Tensor, own_SK: torch.Tensor) -> torch.Tensor:
    """The experts that are known for a token, else its own.

    Where slices share tokens, zeros behind the last one fill the shares up.
    """
    chosen_SK = own_SK.clone()
    given_SK = given_SK.to(torch.int64)
    is_known = given_SK[:, :1] != NO_ROUTE
    chosen_SK[: len(given_SK)] = torch.where(is_known, given_SK, own_SK[: len(given_SK)])
    return chosen_SK
