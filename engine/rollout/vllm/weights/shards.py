"""A rank's own part of the weights, placed straight into its vLLM model.

Imports vLLM, so it is itself imported late. Tensors have vLLM's names and this rank's shapes, as
`layout.boxes.generate_layout` says; nothing is cut, fused or gathered here. On a CPU
each weight is packed again for the matrix kernel (vLLM 0.32 leaves a packed linear layer's
parameter empty); on a GPU it is written in place, which is not verified on one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rolemesh.engine.rollout.model_folder import WeightsStaleError, refuse_missing
from rolemesh.engine.rollout.vllm.weights.experts import STACKS, PlacedExperts


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor goes."""

    module: Any
    own_name: str
    shape: tuple[int, ...]
    """Before packing."""
    dtype: torch.dtype
    """Type to which the weight is rounded."""


@torch.no_grad()
def place_shards(
    model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> None:
    """Replaces every weight of this rank, one at a time.

    A tensor is let go before the next one is asked for. Padded rows of the vocabulary may hold
    anything; they become zeros. A head that is tied to the embedding is not packed here.

    Args:
        model: VLLM's.
        tensors: (name of vLLM's parameter, floating [shape on this rank]), read once.
        dtype: Of the model.

    Raises:
        WeightsStaleError: At a tensor that is unknown, repeated or of another shape, and at the end
            when one is missing. What came before it has been placed.
    """
    places = weight_places(model, dtype)
    missing = dict.fromkeys(places)
    experts = PlacedExperts()
    for name, tensor in tensors:
        place = places.get(name)
        if place is None:
            raise WeightsStaleError(
                f"shard update has {name!r}, which vLLM's model does not have: send its own "
                "parameters under its own names, tied ones once"
            )
        if name not in missing:
            raise WeightsStaleError(
                f"shard update has {name!r}, which came before: send each parameter once"
            )
        del missing[name]
        if tuple(tensor.shape) != place.shape:
            raise WeightsStaleError(
                f"shard update has {name!r} with shape {list(tensor.shape)}, but this rank's is "
                f"{list(place.shape)}: cut it for the generation layout of the engine"
            )
        _place(place, tensor, experts)
        # Without this the loop would hold the tensor while the next one is received.
        del tensor
    refuse_missing("shard update", list(missing), len(places))


def weight_places(model: nn.Module, dtype: torch.dtype) -> dict[str, Place]:
    """Where each parameter goes, by vLLM's name.

    Args:
        model: VLLM's.
        dtype: Of the model.
    """
    places = {}
    for name, parameter in model.named_parameters():
        prefix, _, own_name = name.rpartition(".")
        module = model.get_submodule(prefix)
        # What vLLM recorded before it packed; of biases it records nothing, and never empties one,
        # but may hold it wider than the model.
        recorded = get_layerwise_info(module).restore_metadata[0].get(own_name)
        places[name] = Place(
            module,
            own_name,
            tuple(parameter.shape if recorded is None else recorded.shape),
            dtype if recorded is None else recorded.dtype,
        )
    return places


def _place(place: Place, tensor: torch.Tensor, experts: PlacedExperts) -> None:
    if isinstance(place.module, RoutedExperts) and place.own_name in STACKS:
        experts.place(place.module, place.own_name, tensor.detach(), place.dtype)
        return
    with rewritten(place) as parameter:
        # Converts on the way: a converted tensor in between would be written and read once more.
        parameter.copy_(tensor.detach())
        if isinstance(place.module, VocabParallelEmbedding):
            parameter[place.module.shard_indices.num_org_elements :] = 0


@contextmanager
def rewritten(place: Place) -> Iterator[torch.Tensor]:
    """The parameter of a place, to be written as a whole, and packed for the kernels at the end.

    Yields:
        [shape of the place]; holds anything.
    """
    before: torch.Tensor = getattr(place.module, place.own_name)
    parameter = before
    if before.shape != place.shape:
        # Emptied by packing. The kernel may keep what it is given, so it gets a copy of its own.
        parameter = nn.Parameter(
            torch.empty(place.shape, dtype=place.dtype, device=before.device), requires_grad=False
        )
    yield parameter
    setattr(place.module, place.own_name, parameter)
    method = getattr(place.module, "quant_method", None)
    if (
        place.own_name == "weight"
        and parameter.device.type == "cpu"
        and isinstance(method, QuantizeMethodBase)
    ):
        try:
            method.process_weights_after_loading(place.module)
        except BaseException:
            # A load of every weight, which may follow, takes an emptied parameter for granted.
            setattr(place.module, place.own_name, before)
            raise
