"""The matrices of a model's layers, by the names of its trained parameters."""

from __future__ import annotations

from torch import nn

from rolemesh.engine.layout.matrices import is_layer_matrix, stacked_rows
from rolemesh.engine.models.decoder import Decoder
from rolemesh.engine.parallel.data_parallel import layers_of

Rows = tuple[tuple[int, int], ...]
"""Rows [start, stop) of each matrix in a parameter [out, in]; a stack [n, out, in] counts as one of
[n * out, in]."""


def layer_matrices(model: Decoder) -> dict[str, Rows]:
    """Which trained parameters hold matrices of linear maps within layers, and which.

    Of a known family its record says so, and projections that one parameter stacks count each by
    itself. Of another one (which runs on one rank) they are the weights of linear modules within
    the layers, and stacks of experts: there a parameter is one matrix, or each expert of it is one.

    Returns:
        By Hugging Face name, of all stages and in the order of the model: the matrices in each.
    """
    if model.shape is not None:
        names = model.shape.trained_manifest("float32")
        return {
            name: stacked_rows(model.shape, name)
            for name in names
            if is_layer_matrix(model.shape, name)
        }
    found = {
        id(parameter)
        for layer in layers_of(model.lm)
        for module in layer.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if _is_matrix(module, name, parameter)
    }
    return {
        name: ((0, weight.shape[0]),)
        if weight.dim() == 2
        else tuple(
            (member * weight.shape[1], (member + 1) * weight.shape[1])
            for member in range(weight.shape[0])
        )
        for name, weight in model.trained_weights()
        if id(weight) in found
    }


def _is_matrix(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    if isinstance(module, nn.Linear):
        return name == "weight"
    # transformers stacks experts in parameters of a module of their own; a convolution, whose
    # weight has three dimensions too, is a module of torch's.
    is_torchs = type(module).__module__.startswith("torch.")
    return parameter.dim() == 3 and not is_torchs
