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


def keep_layers(config: Any, layers: range, *, of: int) -> None:
    """Cuts a transformers config to a run of its layers, in place, numbered from 0.

    Every list with one entry a layer is cut with their number: families list kinds of attention,
    layers without positions and more. Lists of tokens may happen to be as long, and stay.

    Args:
        config: Of a model.
        layers: Those that are kept.
        of: Layers of the model.
    """
    config.num_hidden_layers = len(layers)
    for name, value in list(vars(config).items()):
        is_list = isinstance(value, list | tuple) and not name.endswith("_token_id")
        if is_list and len(value) == of:
            setattr(config, name, value[layers.start : layers.stop])


def stage_config(config: Any, shape: DecoderShape, group: RankGroup) -> Any:
    """A copy of a transformers config with this stage's layers alone, numbered from 0.

    On later stages without a factor on what enters the first layer.
    """
    layers = stage_layers(shape, pp=group.index, size=group.size)
    config = copy.deepcopy(config)
    keep_layers(config, layers, of=shape.num_layers)
    if shape.experts is not None:
        # By number, not by list: kinds of layers that the stage's own numbers would not name.
        dense = [at for at, layer in enumerate(layers) if shape.kind(layer) == "dense"]
        for name, value in (
            ("mlp_only_layers", dense),
            ("decoder_sparse_step", 1),
            ("first_k_dense_replace", len(dense)),
        ):
            if hasattr(config, name):
                setattr(config, name, value)
    if shape.record.enters_times and not group.is_first:
        setattr(config, shape.record.enters_times, 1.0)
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
