"""Routes of a mixture's tokens, as a sampler keeps them while it decodes.

Shape letters: D rows of a pass, T tokens of each, L layers with experts, K experts of a token,
W = L * K.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from rolemesh.engine.layout.families import DecoderShape
from rolemesh.engine.specs.columns import NO_ROUTE


class EngineRoutes(Protocol):
    """The routes of the requests of an engine of vLLM."""

    def taken(self, output: Any, engine_id: str, num_tokens: int) -> np.ndarray:
        """Gives out the routes of a request that has ended, or is about to be ended.

        Args:
            output: VLLM's RequestOutput.
            engine_id: By which the engine's own parts know the request.
            num_tokens: Of prompt and completion.

        Returns:
            uint8 [num_tokens, W].
        """
        ...

    def forget(self) -> None:
        """Drops those of requests that were given up."""
        ...

    def forget_cached(self) -> None:
        """Knows that the prefix cache is empty."""
        ...


def check_routes(shape: DecoderShape | None) -> DecoderShape:
    """The sizes of a model whose routes can be kept.

    Raises:
        ValueError: It has no experts, or more than a byte can number.
    """
    if shape is None or shape.experts is None:
        raise ValueError(
            "rollout.replay_routes is true, but the model has no experts whose routes are known "
            "here: leave it out"
        )
    if shape.experts.number > NO_ROUTE:
        raise ValueError(
            f"rollout.replay_routes is true, but the model has {shape.experts.number} experts, and "
            f"routes are kept in bytes: leave it out; {NO_ROUTE} experts are served"
        )
    return shape


class KeptRoutes:
    """The routes of one row, which grows. Tokens that are computed anew are written over."""

    def __init__(self, width: int) -> None:
        """Knows no route of W numbers yet."""
        self._routes = np.full((64, width), NO_ROUTE, dtype=np.uint8)

    def put(self, positions: np.ndarray, routes: np.ndarray) -> None:
        """Takes routes, uint8 [tokens, W], of tokens at these places of the row."""
        longest = int(positions.max(initial=-1)) + 1
        if longest > len(self._routes):
            size = max(longest, 2 * len(self._routes))
            more = np.full((size - len(self._routes), self._routes.shape[1]), NO_ROUTE, np.uint8)
            self._routes = np.concatenate([self._routes, more])
        self._routes[positions] = routes

    def borrow(self, num_tokens: int, other: KeptRoutes) -> None:
        """Takes from a row that begins alike the routes of the first tokens that it knows none of.

        Args:
            num_tokens: How many first tokens both have.
            other: Of that row.
        """
        own, theirs = self.of(num_tokens), other.of(num_tokens)
        is_unknown = (own == NO_ROUTE).all(1)
        self.put(np.flatnonzero(is_unknown), theirs[is_unknown])

    def of(self, num_tokens: int) -> np.ndarray:
        """uint8 [tokens, W] of the first so many; the last one that was drawn has none."""
        found = np.full((num_tokens, self._routes.shape[1]), NO_ROUTE, dtype=np.uint8)
        known = self._routes[:num_tokens]
        found[: len(known)] = known
        return found


def flat_routes(taken: Mapping[int, torch.Tensor]) -> np.ndarray:
    """What routers chose in a pass, by layer: [S, K] each, as uint8 [S, W]."""
    stacked = torch.cat([taken[place] for place in sorted(taken)], dim=1)
    routes: np.ndarray = stacked.to(torch.uint8).cpu().numpy()
    return routes
