"""One rank of a role without its neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.testing._internal.distributed.fake_pg import FakeStore

from rolemesh.engine.layout.ranks import HybridLayout
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.train import mini_batch


@contextmanager
def alone(layout: HybridLayout, rank: int) -> Iterator[RankMesh]:
    """The place of a rank whose neighbours are not there: collective operations do nothing.

    Args:
        layout: Of the role.
        rank: Which of its ranks.
    """
    mesh = RankMesh.connect(layout, rank=rank, store=FakeStore(), backend="fake", timeout_s=60.0)
    with ExitStack() as stack:
        stack.callback(mesh.close)
        if not mesh.pp.is_last:
            # The last stage tells the others what the loss was.
            told = {"loss": 0.0}
            stack.enter_context(replaced(mini_batch, "_metrics_of_all", lambda *_, **__: told))
        yield mesh


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Has a module another function of that name, as long as the block lasts."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
