"""The device that a thread works on, its kind, what it can do, and giving its memory back.

Not for choosing one: a rank's service does that (`services/runtime/ranks/device.py`), and hands the
device down.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import cast

import torch

from rolemesh.engine.specs.by_device import Device, DeviceType, cpu_of

CUDNN_VARIABLE = "ROLEMESH_CUDNN_ATTENTION"
"""Environment variable of a rank: 1 lets torch take cuDNN's attention on a GPU."""

_SAME_BITS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "VLLM_BATCH_INVARIANT": "1"}
"""What cuBLAS and vLLM read when they start, unless the user's environment says otherwise."""

_set_here: set[str] = set()
"""Those that a run of this process has asked for."""

_assumed: ContextVar[str | None] = ContextVar("assumed_device_kind", default=None)
_assumed_bytes: ContextVar[int | None] = ContextVar("assumed_device_bytes", default=None)


def use_device(device: torch.device) -> None:
    """Makes a GPU the calling thread's current one, and starts CUDA where it has not begun.

    The current device is the thread's own, and a new thread begins with the first GPU: what asks
    for "the current device" (FSDP2, events, NCCL) would take that one on every rank. Does nothing
    for a CPU, or for "cuda" without an index, which means the current device.

    Attention is not left to cuDNN, which torch prefers on Hopper and Blackwell, unless
    `CUDNN_VARIABLE` says so.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
        # Of the whole process. It builds a plan for each size of a batch that it has not seen, and
        # those of passes are new nearly every time: others measured a second each.
        torch.backends.cuda.enable_cudnn_sdp(os.environ.get(CUDNN_VARIABLE) == "1")


def be_deterministic(device: torch.device, wanted: bool) -> None:
    """Lets a GPU compute the same bits from the same work, or as it is fastest, for all threads.

    Gradients of attention, of gathers and of an embedding are else summed by atomic operations, in
    whatever order they come. An operation that has no other way raises an error that names it.
    cuBLAS needs a workspace of its own for each stream, and vLLM kernels whose sums do not depend
    on how many rows there are; both read a variable when they start, so a process that has computed
    before must be started anew. A CPU's results are the same in any case.

    Args:
        device: Of this rank.
        wanted: Whether they must be the same.
    """
    if device.type != "cuda":
        return
    torch.use_deterministic_algorithms(wanted)
    for name, value in _SAME_BITS.items():
        if wanted and name not in os.environ:
            os.environ[name] = value
            _set_here.add(name)
        elif not wanted and name in _set_here:
            # The next run of this process must not pay for the one before.
            _set_here.remove(name)
            os.environ.pop(name, None)
    # Memory that is written to at once need not be filled first.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def current_device() -> torch.device:
    """The calling thread's GPU; without GPUs the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def sent(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor of host memory on a device, without waiting for what the device computes.

    Out of ordinary memory torch copies only when the device has done all that was asked of it
    before. So what goes to a GPU is copied into locked memory first, which torch keeps until the
    copy is done. A tensor that is there already is given back as it is.
    """
    device = torch.device(device)
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.numel():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@cache
def device_of(device_type: str) -> Device:
    """What settings depend on: the device of this process of that torch type.

    Measured without such instructions (AVX-512, torch 2.13, 1152 x 576 x 1536): a bfloat16 product
    takes 3 to 5 times as long as a float32 one.
    """
    if device_type != "cpu":
        return Device(cast(DeviceType, device_type))
    told = torch.cpu.get_capabilities()
    return cpu_of([name for name, has in told.items() if has], os.environ)


def give_back_memory(device: torch.device) -> None:
    """Hands memory that nothing uses any more to the system, and on a GPU to other processes.

    A model lies in cycles (modules, hooks), so only the collector frees it; and torch keeps what
    was freed until it is told not to.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that no process holds; 0 for a CPU, where nothing is given back by sleep."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def memory_left(device: torch.device) -> int | None:
    """Bytes of a GPU that no process holds; None where there is no GPU to ask.

    Where memory is estimated (`engine/fit`), those of the GPU for which it is.
    """
    if _assumed.get() is not None:
        return _assumed_bytes.get()
    return free_bytes(device) if device.type == "cuda" else None


def kind_of(device: torch.device) -> str:
    """The kind, "cuda" or "cpu", that code asks for which computes differently on a GPU.

    It is the device's type, but where memory is estimated (`engine/fit`): there tensors without
    values lie on the CPU, and stand for those of a GPU.
    """
    return _assumed.get() or device.type


@contextmanager
def assuming(kind: str, num_bytes: int | None = None) -> Iterator[None]:
    """Makes every device one of this kind within the block, for models without values.

    Args:
        kind: "cuda" or "cpu".
        num_bytes: Memory of the GPU, all of which is free; None: not known.
    """
    tokens = _assumed.set(kind), _assumed_bytes.set(num_bytes)
    try:
        yield
    finally:
        _assumed.reset(tokens[0])
        _assumed_bytes.reset(tokens[1])
