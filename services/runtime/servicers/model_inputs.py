"""What every model reads of an experience."""

from __future__ import annotations

from rolemesh.engine.specs.columns import IMAGES, INPUT_COLUMNS
from rolemesh.rpc.experience.references import names_of
from rolemesh.v1 import experience_pb2


def model_inputs(ref: experience_pb2.ExperienceRef) -> tuple[str, ...]:
    """Names of its tokens and prompt lengths, and of its images where it has some."""
    return (*INPUT_COLUMNS, IMAGES) if IMAGES in names_of(ref) else INPUT_COLUMNS
