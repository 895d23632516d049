"""Images in a decoder: features stand in the places of placeholders.

Some towers give more than one set of them. The first stands at the embedding; each of the others is
added behind one of the first layers (DeepStack, arXiv 2406.04334).

Shape letters: B rows, T tokens, D width, W of all sets side by side; M places of images, N those
whose hidden states this rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, Self

import torch

from rolemesh.engine.models.images.image_tower import Tower
from rolemesh.engine.packing.row_images import PackedImages


@dataclass(frozen=True, slots=True)
class Features:
    """What stands in the places of a pass."""

    places_M: torch.Tensor
    """int64, among the pass's tokens, rows one behind the other."""
    features_MD: torch.Tensor
    """float32, of the embedding."""
    deep_places_N: torch.Tensor
    """int64, among the tokens whose hidden states this rank has between its layers."""
    deep_ND: tuple[torch.Tensor, ...]
    """float32, added behind the first layers, one each."""

    @classmethod
    def of(cls, packed: PackedImages, tower: Tower, share: range | None = None) -> Self:
        """Those of packed rows.

        Args:
            packed: The places, and the images in them.
            tower: Makes features of images.
            share: The tokens whose hidden states a tensor slice holds; None: all.
        """
        whole_FW = torch.cat(tower.features(packed.images))
        features_MW = whole_FW.index_select(0, packed.index_M)
        first_MD, *deep = torch.split(features_MW, tower.width, dim=1)
        places = packed.places_M
        if not deep or share is None:
            return cls(places, first_MD, places, tuple(deep))
        own_N = ((places >= share.start) & (places < share.stop)).nonzero().flatten()
        deep_ND = tuple(one_MD.index_select(0, own_N) for one_MD in deep)
        return cls(places, first_MD, places[own_N] - share.start, deep_ND)


_shown: ContextVar[Features | None] = ContextVar("shown", default=None)


class Shown(AbstractContextManager["Shown", None]):
    """Has a decoder's pass within the block show images; None: there are none."""

    def __init__(self, features: Features | None) -> None:
        self._features = features
        self._tokens: list[Token[Features | None]] = []

    def __enter__(self) -> Self:
        self._tokens.append(_shown.set(self._features))
        return self

    def __exit__(self, *error: object) -> None:
        _shown.reset(self._tokens.pop())


def show_images(decoder: Any, num_deepstack_levels: int) -> None:
    """Lets a decoder take features where a pass has some.

    Hooks stand outside of what recomputation runs again, so nothing is added twice. The embedding
    gets no gradient at places of images; layers get that of the sum.

    Args:
        decoder: A transformers model without a head, or its first stage.
        num_deepstack_levels: First layers that something is added behind.
    """
    decoder.embed_tokens.register_forward_hook(_place)
    for level, layer in enumerate(decoder.layers[:num_deepstack_levels]):
        layer.register_forward_hook(_adding(level))


def _place(_: Any, __: Sequence[Any], embedded_BTD: torch.Tensor) -> torch.Tensor | None:
    shown = _shown.get()
    if shown is None:
        return None
    rows = embedded_BTD.flatten(0, 1)
    placed = rows.index_copy(0, shown.places_M, shown.features_MD.to(rows.dtype))
    return placed.view_as(embedded_BTD)


def _adding(level: int) -> Any:
    def add(_: Any, __: Sequence[Any], hidden_BTD: torch.Tensor) -> torch.Tensor | None:
        shown = _shown.get()
        if shown is None:
            return None
        added_BTD = torch.zeros_like(hidden_BTD, requires_grad=False)
        features_ND = shown.deep_ND[level].to(added_BTD.dtype)
        added_BTD.flatten(0, 1).index_copy_(0, shown.deep_places_N, features_ND)
        return hidden_BTD + added_BTD

    return add
