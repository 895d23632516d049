"""Experts that tensors without values choose: each as often as the others.

What a rank holds depends on which experts its own rows and those of its neighbours choose, which
only a run knows. Rows of a pass that spread evenly are the mean: a rank whose experts are chosen
more often holds more.

Shape letters: R ranks that share experts out, L experts of this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from rolemesh.engine.fit.alone import replaced
from rolemesh.engine.models.layers import experts
from rolemesh.engine.models.layers.experts import Dealt
from rolemesh.engine.parallel.experts import exchange as expert_exchange
from rolemesh.engine.parallel.mesh import RankGroup


@contextmanager
def evenly_spread() -> Iterator[None]:
    """Neighbours have as many rows for this rank's experts as it has; one product is for all.

    Which experts the rows of this rank choose, `Valueless` says.
    """
    with (
        replaced(expert_exchange, "_told", _as_this_one),
        replaced(experts, "_groups", _all_at_once),
        replaced(experts, "_reader", _without_copies),
    ):
        yield


def _as_this_one(asked_RL: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Rows that each rank has for this one's experts."""
    return asked_RL[group.index].expand_as(asked_RL)


def _all_at_once(counts: Sequence[int], _: torch.Tensor) -> list[tuple[slice, list[slice]]]:
    """All rows as those of one expert, so that no time goes by over products without values."""
    return [(slice(0, 1), [slice(0, sum(counts))])]


def _without_copies(x: torch.Tensor, dealt: Dealt | None) -> Callable[[slice], torch.Tensor]:
    """Rows of all experts, of which in truth those of one are copied at a time."""
    if dealt is None:
        return lambda place: x[place]
    return lambda place: x[:1].expand(place.stop - place.start, -1)
