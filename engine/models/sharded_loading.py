"""Loads one rank's part of a model: only its stage's layers, only its slices, nothing whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from rolemesh.engine.layout.boxes import train_layout
from rolemesh.engine.layout.families import DecoderShape, parameter_shape, stage_tensors
from rolemesh.engine.layout.manifest import Box, ranges
from rolemesh.engine.layout.slices import slice_boxes, slice_sizes, stacked_dimension
from rolemesh.engine.models.adapters.adapters import AdapterValues, attach_empty
from rolemesh.engine.models.buffers import saved_buffers, set_buffer
from rolemesh.engine.models.folder import (
    MakeEmpty,
    maker_without_values,
    refuse_missing,
)
from rolemesh.engine.models.parameter_files import ParameterFiles, wrong_shape
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.parallel.stages import global_name, keep_stage, stage_config
from rolemesh.engine.parallel.tensor_parallel import cut_tensors, set_parameter
from rolemesh.engine.specs import ModelSpec


class EmptyTensors:
    """Stands in for `FolderTensors` where only sizes count: every parameter is there, empty."""

    def __init__(self, shape: DecoderShape, make_empty: MakeEmpty) -> None:
        self._shape = shape
        self._make_empty = make_empty

    def stored_name(self, name: str) -> str | None:
        """The parameter's own name."""
        return name

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return parameter_shape(self._shape, key)

    def read(self, key: str, box: Box) -> torch.Tensor:
        """A tensor of a box's sizes."""
        return self._make_empty([stop - start for start, stop in box])


class _AdaptedTensors:
    """Those of a folder, and beside them what an adapter begins with."""

    def __init__(self, folder: ParameterFiles, values: AdapterValues, shape: DecoderShape) -> None:
        self._folder = folder
        self._values = values
        self._shape = shape

    def stored_name(self, name: str) -> str | None:
        """Where it is the adapter's, the parameter's own name."""
        return name if self._values.has(name) else self._folder.stored_name(name)

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of the whole tensor; of an adapter's, what it must be."""
        if self._values.has(key):
            return parameter_shape(self._shape, key)
        return self._folder.shape(key)

    def read(self, key: str, box: Box) -> torch.Tensor:
        """A box, float32, in memory of its own."""
        if self._values.has(key):
            return self._values.read(key, parameter_shape(self._shape, key), box)
        return self._folder.read(key, box)


@contextmanager
def _open(
    spec: ModelSpec, shape: DecoderShape
) -> Iterator[ParameterFiles | EmptyTensors | _AdaptedTensors]:
    make_empty = maker_without_values()
    if make_empty is not None:
        yield EmptyTensors(shape, make_empty)
        return
    with ParameterFiles(spec.path, shape) as files:
        if spec.adapter is None:
            yield files
            return
        values = AdapterValues(spec.adapter)
        values.refuse_others(shape.trained_manifest("float32"))
        yield _AdaptedTensors(files, values, shape)


def load_shard(
    auto_class: Any,
    spec: ModelSpec,
    *,
    config: Any,
    shape: DecoderShape,
    mesh: RankMesh,
    may_miss: tuple[str, ...] = (),
    shares_tokens: bool = False,
) -> tuple[Any, frozenset[str]]:
    """Builds this rank's stage and slice and fills it from the folder's files.

    Args:
        auto_class: e.g. transformers.AutoModelForCausalLM.
        spec: Of a folder with safetensors, and maybe of an adapter.
        config: Of the whole model.
        shape: Sizes of the whole model, with the adapter; `check_layout` has passed.
        mesh: The rank's place.
        may_miss: Prefixes of parameters that the folder may lack; they become zeros.
        shares_tokens: See `cut_tensors`.

    Returns:
        The model, float32, with layers numbered from 0 (see `stages.global_name`), and the
        parameters of this rank that the folder lacked. Where the data axis cuts parameters, they
        stay on the meta device until that is done and `read_parts` fills what is left of them.

    Raises:
        ModelFolderError: A parameter is missing from the files, or has another shape.
    """
    with torch.device("meta"):
        lm = auto_class.from_config(
            stage_config(config, shape, mesh.pp),
            dtype=torch.float32,
            attn_implementation="sdpa",
            trust_remote_code=False,
        )
    base = lm.base_model
    # The frequencies of the rotary embedding are not in the files, so they are computed here.
    base.rotary_emb = type(base.rotary_emb)(config=base.config)
    if shape.record.scales_embedding:
        base.embed_tokens.embed_scale = torch.tensor(shape.embedding_scale)
    keep_stage(lm, shape, mesh.pp)
    cut_tensors(
        lm, shape, mesh.tp, stages=mesh.pp, owners=mesh.experts, shares_tokens=shares_tokens
    )
    if spec.adapter is not None:
        attach_empty(lm, spec.adapter, shape)

    parameters = dict(stage_tensors(shape, pp=mesh.pp.index, size=mesh.pp.size))
    local_names = {
        global_name(name, shape, mesh.pp): name
        for name, _ in (*lm.named_parameters(), *saved_buffers(lm))
    }
    if local_names.keys() != parameters.keys():
        raise AssertionError(
            f"{type(lm).__name__} and the plan of {shape.family} differ in "
            f"{sorted(local_names.keys() ^ parameters.keys())}"
        )
    folder = spec.path
    with _open(spec, shape) as tensors:
        keys = {name: tensors.stored_name(parameter) for name, parameter in parameters.items()}
        missing = frozenset(name for name, key in keys.items() if key is None)
        refuse_missing(missing, may_miss, folder, type(lm).__name__)
        for name, parameter in parameters.items():
            key = keys[name]
            expected = parameter_shape(shape, parameter)
            if key is not None and tensors.shape(key) != expected:
                raise wrong_shape(folder, key, tensors.shape(key), expected)
            if mesh.fsdp.size > 1 and not shape.is_buffer(parameter):
                continue
            tp, size = mesh.tp.index, mesh.tp.size
            owned = (mesh.experts.index, mesh.experts.size)
            if key is None:
                value = torch.zeros(slice_sizes(shape, parameter, tp=tp, size=size, experts=owned))
            else:
                boxes = slice_boxes(shape, parameter, tp=tp, size=size, experts=owned)
                parts = [tensors.read(key, box) for box in boxes]
                stacked = stacked_dimension(shape, parameter)
                value = parts[0] if len(parts) == 1 else torch.cat(parts, stacked)
            if shape.is_buffer(parameter):
                set_buffer(lm, local_names[name], value)
            else:
                set_parameter(lm, local_names[name], value)
    if base.embed_tokens is not None:
        base.embed_tokens.padding_idx = None  # see `folder.load_model`
    lm.eval()
    return lm, missing


@torch.no_grad()
def read_parts(
    parts: Mapping[str, torch.Tensor], spec: ModelSpec, *, shape: DecoderShape, mesh: RankMesh
) -> None:
    """Fills what this rank holds of each parameter after the data axis has cut them, in place.

    Args:
        parts: This rank's, by Hugging Face name, float32, shaped as `layout.boxes.train_layout`
            says; some may be empty.
        spec: Of which `load_shard` made the model.
        shape: Sizes of the whole model.
        mesh: The rank's place.
    """
    shard = train_layout(shape, mesh.layout.train).ranks[mesh.rank]
    with _open(spec, shape) as tensors:
        for piece in shard.pieces:
            if shape.is_buffer(piece.parameter):
                continue  # is whole, and filled
            key = tensors.stored_name(piece.parameter)
            if key is None:  # one that may be missing
                parts[piece.tensor].zero_()
            else:
                place = parts[piece.tensor][ranges(piece.origin, piece.box)]
                place.copy_(tensors.read(key, piece.box))
