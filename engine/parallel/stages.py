"""Pipeline stages: a transformers decoder with a run of its layers.

Shape letters: B rows, T longest row, D width.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from torch import nn

from rolemesh.engine.layout.families import DecoderShape, stage_layers
from rolemesh.engine.parallel.mesh import RankGroup

_LAYER = re.compile(r"(model\.layers\.)(\d+)(\..+)")


def stage_config(config: Any, shape: DecoderShape, group: RankGroup) -> Any:
    """A copy of a transformers config with this stage's layers alone, numbered from 0."""
    layers = stage_layers(shape, pp=group.index, size=group.size)
    config = copy.deepcopy(config)
    config.num_hidden_layers = len(layers)
    # Families with several kinds of attention list one kind a layer.
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[layers.start : layers.stop]
    return config


def keep_stage(lm: Any, shape: DecoderShape, group: RankGroup) -> None:
    """Drops what other stages compute, in place: embedding, last norm, head.

    Args:
        lm: A transformers model made of `stage_config`.
        shape: Sizes of the whole model.
        group: The stages; this rank's is `group.index`.
    """
    if not group.is_first:
        # Only the module goes: a tied head, on the last stage, keeps the weight.
        lm.base_model.embed_tokens = None
    if not group.is_last:
        lm.base_model.norm = nn.Identity()
        setattr(lm, shape.head, None)


def global_name(name: str, shape: DecoderShape, group: RankGroup) -> str:
    """Hugging Face name of a stage's parameter: its layers are numbered from 0, the model's not."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    first = stage_layers(shape, pp=group.index, size=group.size).start
    return f"{match[1]}{first + int(match[2])}{match[3]}"
