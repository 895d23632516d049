"""Images at the embedding of a decoder: their features stand in the places of placeholders.

Shape letters: B rows, T tokens, D width; M places of images.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, Self

import torch

from rolemesh.engine.models.image_tower import Tower
from rolemesh.engine.packing.row_images import PackedImages


@dataclass(frozen=True, slots=True)
class Features:
    """What stands in the places of a pass."""

    places_M: torch.Tensor
    """int64, among the pass's tokens, rows one behind the other."""
    features_MD: torch.Tensor
    """float32."""

    @classmethod
    def of(cls, packed: PackedImages, tower: Tower) -> Self:
        """Those of packed rows."""
        whole_FD = torch.cat(tower.features(packed.images))
        return cls(packed.places_M, whole_FD.index_select(0, packed.index_M))


_shown: ContextVar[Features | None] = ContextVar("shown", default=None)


class Shown(AbstractContextManager["Shown", None]):
    """Has the embedding of a pass within the block show images; None: there are none."""

    def __init__(self, features: Features | None) -> None:
        self._features = features
        self._tokens: list[Token[Features | None]] = []

    def __enter__(self) -> Self:
        self._tokens.append(_shown.set(self._features))
        return self

    def __exit__(self, *error: object) -> None:
        _shown.reset(self._tokens.pop())


def show_images(embedding: Any) -> None:
    """Lets an embedding take features where a pass has some; they give it no gradient there."""
    embedding.register_forward_hook(_place)


def _place(_: Any, __: Sequence[Any], embedded_BTD: torch.Tensor) -> torch.Tensor | None:
    shown = _shown.get()
    if shown is None:
        return None
    rows = embedded_BTD.flatten(0, 1)
    placed = rows.index_copy(0, shown.places_M, shown.features_MD.to(rows.dtype))
    return placed.view_as(embedded_BTD)
