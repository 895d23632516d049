"""Faster code in the place of what stands between the products of transformers' layers.

Of families whose record names the classes: where `kernels/choice.py` says so for a tensor, norms,
SwiGLU and rotary positions are one kernel of Triton's each (`kernels/layers.py`); on a CPU, float32
norms and rotary positions are those of `layers_on_cpu.py`; everywhere else transformers' own code
runs.

It is transformers' classes that are changed, not the modules of one model: what cuts layers over
ranks, has them recomputed, or has them see rounded weights takes the forward pass of a class, in
whatever order, and so takes this one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from rolemesh.engine.hardware.devices import kind_of
from rolemesh.engine.kernels.choice import triton_serves
from rolemesh.engine.layout.family_records import RECORDS
from rolemesh.engine.models.layers import layers_on_cpu

_TYPES = frozenset({torch.float32, torch.bfloat16})


@functools.cache
def fuse_layers(family: str) -> None:
    """Lets a family's layers take what is faster, where it serves; once a process.

    Args:
        family: One of those of `layout/family_records.py`, by its Hugging Face name. Where its
            record names no classes, nothing is done.
    """
    name = RECORDS[family].kernel_classes
    if not name:
        return
    modeling: Any = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    norm = getattr(modeling, f"{name}RMSNorm")
    norm.forward = _norm_forward(norm.forward)
    # A family may have experts alone.
    if mlp := getattr(modeling, f"{name}MLP", None):
        mlp.forward = _mlp_forward(mlp.forward)
    modeling.apply_rotary_pos_emb = _rotary(modeling.apply_rotary_pos_emb)


def _serve(*tensors: torch.Tensor) -> bool:
    """Whether Triton's kernels take these, which lie on one device."""
    return triton_serves(tensors[0].device) and all(one.dtype in _TYPES for one in tensors)


def _serve_on_cpu(*tensors: torch.Tensor) -> bool:
    """Whether `layers_on_cpu` takes these, which lie on one device."""
    is_on_cpu = kind_of(tensors[0].device) == "cpu"
    return is_on_cpu and all(one.dtype == torch.float32 for one in tensors)


def _parts(*tensors: torch.Tensor) -> Any:
    """The module whose norms and rotary positions take these; None: transformers' own do."""
    if _serve(*tensors):
        from rolemesh.engine.kernels import layers

        return layers
    return layers_on_cpu if _serve_on_cpu(*tensors) else None


def _norm_forward(reference: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reference)
    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        weight = self.weight
        parts = _parts(hidden_states, weight)
        if parts is None:
            return reference(self, hidden_states)
        return parts.rms_norm(hidden_states, weight, self.variance_epsilon)

    return forward


def _mlp_forward(reference: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reference)
    def forward(self: Any, x: torch.Tensor) -> Any:
        # Asked of the input: products may be of a narrower type, which the kernels take, too.
        if self.config.hidden_act not in ("silu", "swish") or not _serve(x):
            return reference(self, x)
        from rolemesh.engine.kernels.layers import swiglu

        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))

    return forward


def _rotary(reference: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reference)
    def apply(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        unsqueeze_dim: int = 1,
    ) -> Any:
        is_whole = unsqueeze_dim == 1 and cos.dim() == 3 and cos.shape[-1] == q.shape[-1]
        parts = _parts(q, k, cos, sin) if is_whole else None
        if parts is None:
            return reference(q, k, cos, sin, unsqueeze_dim)
        return parts.rotate(q, cos, sin), parts.rotate(k, cos, sin)

    return apply
