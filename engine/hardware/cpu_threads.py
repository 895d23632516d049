"""Threads of a computation on a CPU: one, where the work is over before a second one is awake."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch

LEAST_SHARED_PRODUCT = 40_000_000
"""Multiply-adds of a matrix product from which on several threads are faster than one.

Threads of a service sleep at the end of each parallel operation (`OMP_WAIT_POLICY=PASSIVE`), and
waking them takes tens of microseconds. Measured on two cores, for passes with and without
gradients and for widths of 64 to 576 (tests/benchmarks/small_passes.py): two threads are equal to
one at 17 to 34 million, up to four times slower below, and faster above. Passes of shared prompts
have more small operations: of 37 million they are a quarter slower.
"""

LEAST_SHARED_TENSOR = 300_000
"""The same of tensors that are copied, or stepped by an optimizer, one after another: elements of
one of them in the mean."""


def largest_product(
    config: Any, num_tokens: int, longest: int, num_predicted: int, *, num_slices: int = 1
) -> int:
    """Multiply-adds of the largest matrix product of a pass through a model.

    Args:
        config: transformers config of the model.
        num_tokens: Tokens that are computed together.
        longest: Tokens that one of them attends to at most.
        num_predicted: Tokens whose logits are computed.
        num_slices: Ranks that share each layer.
    """
    text = config.get_text_config()
    hidden = text.hidden_size
    num_heads = _size(text, "num_attention_heads", 1)
    attended = num_heads * _size(text, "head_dim", hidden // num_heads)
    inner = _size(text, "intermediate_size", 4 * hidden)
    largest = max(
        num_tokens * hidden * max(inner, attended),
        num_tokens * longest * attended,
        num_predicted * hidden * text.vocab_size,
    )
    return int(largest) // num_slices


def _size(config: Any, name: str, default: int) -> int:
    """A size that not every family names, or not as one number."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else default


def threads_worth(
    multiply_adds: int, device: torch.device
) -> contextlib.AbstractContextManager[None]:
    """Computes with one thread where the largest matrix product is a small one.

    The number of threads is the calling thread's own. Other threads of the process keep theirs; one
    that first computes meanwhile gets one, too, which is right for what helps a compute thread. The
    number follows from the shapes alone, so that the same work gives the same bits.

    Args:
        multiply_adds: Of the largest product, see `largest_product`.
        device: Where it is computed; nothing is changed for a GPU.
    """
    return _one_thread_if(multiply_adds < LEAST_SHARED_PRODUCT, device)


def threads_for_each(
    tensors: Collection[torch.Tensor], device: torch.device
) -> contextlib.AbstractContextManager[None]:
    """Goes over tensors one by one, with one thread where they are small; see `threads_worth`."""
    in_all = sum(tensor.numel() for tensor in tensors)
    return _one_thread_if(in_all < LEAST_SHARED_TENSOR * len(tensors), device)


@contextlib.contextmanager
def _one_thread_if(is_small: bool, device: torch.device) -> Iterator[None]:
    threads = torch.get_num_threads()
    if not is_small or device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
