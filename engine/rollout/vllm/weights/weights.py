"""New weights for a vLLM engine in the trainer's own process: no disk, no copy in between.

Imports vLLM, so it is itself imported late, by name, by vLLM's weight-transfer registry.
Three facts of vLLM 0.32 on a CPU shape it: linear weights are packed for the matrix kernel and
their parameters left empty, so nothing can be written in place; a head that is tied to the
embedding has a packed copy of its own, which a reload leaves as it was; and the logits of a
bfloat16 head are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rolemesh.engine.layout.manifest import RankShard
from rolemesh.engine.rollout.checksums import tensor_checksum
from rolemesh.engine.rollout.vllm.weights.experts import expert_weights, experts_packed_anew
from rolemesh.engine.rollout.vllm.weights.shards import place_shards
from rolemesh.engine.rollout.vllm.weights.whole import place_whole

# Columns of a packed matrix read back at a time: bounds the extra memory.
_READ_BACK_COLUMNS = 256


@dataclass
class InProcessInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed on within one process."""


@dataclass
class InProcessUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Weights by reference. Valid within this process only."""

    weights: Iterable[tuple[str, torch.Tensor]]
    """(Hugging Face name, whole tensor of any floating type), read once. The iterable raises if
    the set is not whole; its exception leaves the update."""
    loaded: set[str] = field(default_factory=set)
    """Receives the names of the sampler's parameters that were written."""
    are_shards: bool = False
    """The weights are this rank's parts under vLLM's names instead (see `shards.py`)."""
    shard: RankShard | None = None
    """Of a lone rank: where each weight goes (see `whole.py`); None: vLLM's loaders know."""


class InProcessWeightEngine(WeightTransferEngine):  # type: ignore[misc]
    """vLLM's side of an update within one process.

    Owned by the compute thread, like the engine. Tensors are copied and cast to the sampler's
    type; whole ones are split by tensor-parallel rank and fused by vLLM's own loaders. A failed
    update leaves a model that can run and take a next update, but whose weights are of no version.
    """

    init_info_cls = InProcessInitInfo
    update_info_cls = InProcessUpdateInfo

    def init_transfer_engine(self, init_info: InProcessInitInfo) -> None:
        """Does nothing: one process has no peers to meet."""

    def start_weight_update(self) -> None:
        """Does nothing: how the model is opened depends on what comes."""

    def receive_weights(self, update_info: InProcessUpdateInfo) -> None:
        """Reads the weights into the model and packs them for the kernels."""
        if update_info.are_shards:
            place_shards(self.model, update_info.weights, self.model_config.dtype)
        elif update_info.shard is not None:
            dtype = self.model_config.dtype
            place_whole(self.model, update_info.shard, update_info.weights, dtype)
        else:
            with experts_packed_anew(self.model):
                initialize_layerwise_reload(self.model)
                try:
                    update_info.loaded |= self.model.load_weights(iter(update_info.weights))
                finally:
                    # Also after a failure: layers wait on the meta device with their loaders
                    # wrapped, and a next update would go on in the middle of this one.
                    finalize_layerwise_reload(self.model, self.model_config)
        finish_heads(self.model)

    def finish_weight_update(self) -> None:
        """Does nothing: an update is one chunk."""

    def shutdown(self) -> None:
        """Does nothing: one process has no peers to leave."""


def finish_heads(model: nn.Module) -> None:
    """Packs what vLLM leaves as it was, tied heads, and gives bfloat16 heads float32 logits."""
    for head in _tied_heads(model):
        head.quant_method.process_weights_after_loading(head)
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and module.weight.dtype == torch.bfloat16:
            _widen_head(module)


def _widen_head(head: Any) -> None:
    """Makes a head on a CPU multiply its bfloat16 weights in float32.

    Rounded, a logit of 20 would move in steps of 1/8. On a GPU the option head_dtype does this, and
    the head has no kernel of its own.
    """
    kernel: Callable[..., torch.Tensor] | None = getattr(head, "cpu_linear", None)
    if kernel is None:
        return
    weight = head.weight if head.weight.dim() == 2 else None
    if weight is None or not weight.numel():
        weight = _read_back(kernel, _input_size(head, head.weight), head.weight)
    wide: Any = nn.Module()
    wide.weight = nn.Parameter(weight.detach().float(), requires_grad=False)
    # Packed as a float32 head of vLLM's own is: for 32 tokens 2.6 times as fast as torch's product.
    dispatch_cpu_unquantized_gemm(wide, remove_weight=True)

    def product(x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wide_bias = None if bias is None else bias.float()
        logits: torch.Tensor = wide.cpu_linear(x.float(), wide.weight, wide_bias)
        return logits

    head.cpu_linear = product


def _tied_heads(model: nn.Module) -> list[Any]:
    """Output heads whose weight is an embedding's, but which the kernels read from a pack."""
    modules = list(model.modules())
    embeddings = {
        id(module.weight)
        for module in modules
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    }
    return [
        module
        for module in modules
        if isinstance(module, ParallelLMHead)
        and id(module.weight) in embeddings
        and isinstance(module.quant_method, QuantizeMethodBase)
    ]


def parameter_names(model: nn.Module) -> set[str]:
    """Names that vLLM gives to the model's parameters, tied ones once."""
    return {name for name, _ in model.named_parameters()}


def model_checksums(model: nn.Module) -> dict[str, str]:
    """Hashes each weight as the kernels read it.

    Names are Hugging Face's: fused parameters are split again. With tensor parallelism the
    values are those of this rank's part.
    """
    return {
        name: tensor_checksum(tensor)
        for prefix, module in model.named_modules()
        for name, tensor in _module_weights(model, prefix, module)
    }


@torch.no_grad()
def _module_weights(
    model: nn.Module, prefix: str, module: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(module, RoutedExperts):
        yield from expert_weights(prefix, module)
        return
    for own_name, parameter in module.named_parameters(recurse=False):
        tensor = _as_the_kernels_read(module, own_name, parameter)
        if isinstance(module, VocabParallelEmbedding):
            # vLLM pads the vocabulary; the rows beyond it are no weights.
            tensor = tensor[: module.shard_indices.num_org_elements]
        parts = fused_parts(model, prefix, module)
        if parts:
            pieces = torch.split(tensor, list(parts.values()))
            for part, piece in zip(parts, pieces, strict=True):
                yield f"{part}.{own_name}", piece
        else:
            yield f"{prefix}.{own_name}" if prefix else own_name, tensor


def fused_parts(model: nn.Module, prefix: str, module: nn.Module) -> dict[str, int]:
    """Of a layer that vLLM has fused, rows on this rank by Hugging Face module, from the top.

    Args:
        model: VLLM's.
        prefix: Name of the layer in it.
        module: The layer.

    Returns:
        E.g. of "model.layers.0.mlp.gate_up_proj" {"model.layers.0.mlp.gate_proj": 96, ...}; empty
        where nothing is fused.
    """
    parent, _, leaf = prefix.rpartition(".")
    parts = getattr(model, "packed_modules_mapping", {}).get(leaf, ())
    sizes = getattr(module, "output_partition_sizes", ())
    if len(parts) < 2 or len(parts) != len(sizes):
        return {}
    names = (f"{parent}.{part}" if parent else part for part in parts)
    return dict(zip(names, sizes, strict=True))


def _as_the_kernels_read(module: nn.Module, own_name: str, parameter: torch.Tensor) -> torch.Tensor:
    """The weight that takes part in products, not the parameter that stands for it.

    On a CPU a linear layer's parameter is empty after packing, so that its hash would be the
    same for all weights, and a tied head's parameter may differ from its pack.
    """
    kernel: Callable[..., torch.Tensor] | None = getattr(module, "cpu_linear", None)
    is_embedding = isinstance(module, VocabParallelEmbedding) and not isinstance(
        module, ParallelLMHead
    )
    if own_name != "weight" or kernel is None or is_embedding:
        return parameter
    return _read_back(kernel, _input_size(module, parameter), parameter)


def _input_size(module: Any, parameter: torch.Tensor) -> int:
    if parameter.dim() == 2:
        return parameter.shape[1]
    # What vLLM recorded before it packed; only some classes of layers say it themselves.
    return int(get_layerwise_info(module).restore_metadata[0]["weight"].shape[1])


def _read_back(
    kernel: Callable[..., torch.Tensor], input_size: int, parameter: torch.Tensor
) -> torch.Tensor:
    """Multiplies the identity with a packed matrix.

    Each element of the product is one weight times 1 plus zeros, so the values are exact in any
    type; only the sign of -0.0 is lost.

    Returns:
        The type of parameter, [output, input].
    """
    columns: list[torch.Tensor] = []
    for start in range(0, input_size, _READ_BACK_COLUMNS):
        count = min(_READ_BACK_COLUMNS, input_size - start)
        unit = torch.zeros(count, input_size, dtype=parameter.dtype)
        unit[torch.arange(count), torch.arange(start, start + count)] = 1.0
        columns.append(kernel(unit, parameter, None).to(parameter.dtype))
    return torch.cat(columns).t().contiguous()
