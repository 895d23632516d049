"""Parts of parameters that a tensor slice holds in one box."""

from __future__ import annotations

from rolemesh.engine.layout.families import DecoderShape
from rolemesh.engine.layout.manifest import Box
from rolemesh.engine.layout.slices import slice_boxes


def slice_box(shape: DecoderShape, name: str, *, tp: int, size: int) -> Box:
    """The one box of `slice_boxes`; fails for projections that files hold in one tensor."""
    [box] = slice_boxes(shape, name, tp=tp, size=size)
    return box
