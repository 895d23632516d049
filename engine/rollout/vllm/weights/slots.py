"""A trained adapter in a LoRA slot of a vLLM engine of this process: no file on the way.

Imports vLLM, so it is itself imported late. Facts of vLLM 0.32 that shape it:

- A slot is filled from a file the first time that a request names an id which vLLM does not know.
  Here the id is made known before any request names it, so that no file is ever looked for.
- A known id goes on with what it was filled with. Keys of the prefix cache belong to an adapter's
  name and path. So no id, name or path is used twice.
- What B (A x) is multiplied by is multiplied into B in place. Here B comes multiplied already, and
  the scale that vLLM is told is 1.
- Factors without a layer to stand beside are dropped in silence.
- On a GPU the kernels of slots take bfloat16 or float16 alone.

Not verified on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

import torch
from torch import nn
from vllm.config.lora import MaxLoRARanks
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name

from rolemesh.engine.layout.adapters import FACTORS, factor_name


def slot_rank(rank: int) -> int:
    """The smallest rank of a slot that holds an adapter of this rank.

    Raises:
        ValueError: VLLM has no slot of that size.
    """
    sizes: tuple[int, ...] = get_args(MaxLoRARanks)
    fitting = [size for size in sizes if size >= rank]
    if not fitting:
        raise ValueError(
            f"adapter.rank is {rank}, but vLLM's slots hold at most {max(sizes)}: give a smaller "
            "rank, rollout.adapters merged, or rollout type hf"
        )
    return min(fitting)


def check_slots(model: nn.Module, modules: Iterable[str]) -> None:
    """Raises ValueError where vLLM's model has no layer with a slot for a module.

    Args:
        model: VLLM's, with LoRA enabled.
        modules: Hugging Face names, e.g. "model.layers.0.self_attn.q_proj".
    """
    with_slots = set(_names_with_slots(model))
    without = [name for name in modules if _own_name(model, name) not in with_slots]
    if without:
        raise ValueError(
            f"vLLM's {type(model).__name__} takes no adapter beside "
            f"{', '.join(map(repr, without[:3]))} ({len(without)} matrices): name others in "
            "adapter.targets, or sample with rollout type hf"
        )


def slot_request(number: int) -> LoRARequest:
    """What a request names to have the adapter of an id.

    Args:
        number: The id, from 1; never used before in this engine.
    """
    # Never opened: vLLM asks for a path, and makes it part of what cached keys belong to. It begins
    # at the root, or vLLM would look for such a model on a hub.
    return LoRARequest(f"adapter-{number}", number, f"/in-memory/adapter-{number}")


@torch.no_grad()
def fill_slot(
    model: nn.Module, factors: Mapping[str, torch.Tensor], request: LoRARequest, scale: float
) -> None:
    """Puts an adapter into the model's one slot, and throws out the one before.

    Args:
        model: VLLM's.
        factors: By Hugging Face name, float32 on the host, whole; vLLM cuts them for this rank.
            Left as they are; vLLM keeps those named A.
        request: From `slot_request`.
        scale: What B (A x) is multiplied by.
    """
    manager: Any = model.lora_manager
    tensors = {name: tensor * scale if _is_b(name) else tensor for name, tensor in factors.items()}
    rank = next(tensor.shape[0] for name, tensor in factors.items() if not _is_b(name))
    adapter = LoRAModel.from_lora_tensors(
        request.lora_int_id,
        tensors,
        # Alpha as large as the rank: a scale of 1.
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=_mapper(model),
    )
    manager.remove_all_adapters()
    manager.add_adapter(adapter)
    manager.activate_adapter(adapter.id)


def redirect_requests(engine: Any, request: LoRARequest) -> None:
    """Lets all requests that have not ended go on with another adapter.

    They have been put back to the queue and hold no keys.

    Args:
        engine: VLLM's LLMEngine.
        request: Of the adapter, which has been put into the slot.
    """
    for one in engine.engine_core.engine_core.scheduler.requests.values():
        one.lora_request = request
        # Hashes of blocks name the adapter. They are made again for all tokens so far.
        one.block_hashes.clear()
        one.update_block_hashes()
    engine.collective_rpc(_redirect_worker, args=(request,))


def _redirect_worker(worker: Any, request: LoRARequest) -> None:
    # The runner of CPUs keeps what it was told of a request when it first came. The newer one of
    # GPUs (vllm/v1/worker/gpu/model_runner.py) is told all again when a request comes back.
    for state in getattr(worker.model_runner, "requests", {}).values():
        state.lora_request = request


def _is_b(name: str) -> bool:
    return name.endswith(".lora_B.weight")


def _mapper(model: nn.Module) -> Any:
    """Renames Hugging Face's names to vLLM's where the two differ; None where they do not."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()


def _own_name(model: nn.Module, module: str) -> str:
    name, _ = parse_fine_tuned_lora_name(factor_name(module, FACTORS[0]), _mapper(model))
    return str(name)


def _names_with_slots(model: nn.Module) -> Iterator[str]:
    """VLLM's names of matrices that may have an adapter, those within fused ones by themselves."""
    manager: Any = model.lora_manager
    yield from manager.modules
    for fused in manager.packed_modules.values():
        yield from fused
