"""Systems: how a program holds weights and states, and what its roles do with shared devices.

`ROLEMESH` is this one. `HYBRIDFLOW` is the paper's system as it describes it (arXiv 2409.19256,
section 8): bfloat16 parameters, float32 gradients and Adam states, nothing offloaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

PROCESS_BYTES = 1 << 30
"""What a process holds on its GPU whatever it computes, asleep too: CUDA's context and kernels
(about 0.5 GiB on an H100), workspaces of cuBLAS, buffers of NCCL. Not measured here."""

TIGHT = 0.1
"""Share of a GPU that should be left: allocators lose some to fragments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """What is not the choice of a plan."""

    weight_bytes: int = 4
    """Of a parameter that is trained."""
    gradient_bytes: int = 4
    moment_bytes: float = 8
    """Adam's two moments, or in the mean over all weights Muon's one and those; with a float32 copy
    of the weights, where those are narrower."""
    frozen_bytes: int = 2
    """Of a parameter that is not trained."""
    gathered_bytes: int = 4
    """In which weights that are cut over the data axis are gathered."""
    activation_bytes: int = 4
    """Of a number of the residual stream."""
    sampled_bytes: int = 2
    """Of a weight, key or value of the sampler."""
    sleeps: bool = True
    """Whether a role leaves devices that it shares while another one computes."""
    has_kv_cache: bool = True
    """Whether sampling keeps keys and values; else each step computes the whole row."""
    cache_copies: int = 0
    """Times that a decoding step reads or writes keys and values beside attention."""
    shares_weights: bool = False
    """Whether sampling uses the trainer's weights where they lie."""
    reshard: Literal["plan", "zero", "vanilla", "copy", "none"] = "plan"
    """How weights come from training to sampling: by our planner's bytes; gathered over all ranks
    (DeepSpeed-Chat) or over a training replica (the paper's HybridFlow-V); sent to a second copy on
    other devices (OpenRLHF); not at all."""
    process_bytes: int = PROCESS_BYTES
    spare: float = TIGHT
    """Share of a device that a plan leaves free."""


ROLEMESH = System()
"""Of this code, with numerics "exact"."""

ROLEMESH_FAST = System(gathered_bytes=2, activation_bytes=2)
"""The same with numerics "fast"."""


def plain_transformers(system: System) -> System:
    """The same, but that plain transformers samples, in float32.

    For each step it makes the tensors of keys and values anew with one more token (a read and a
    write), and repeats them for the heads that share them (a read and, with two heads, two writes).
    """
    return replace(system, sampled_bytes=4, cache_copies=5)


HYBRIDFLOW = System(
    weight_bytes=2,
    moment_bytes=12,
    gathered_bytes=2,
    activation_bytes=2,
    sleeps=False,
)
"""The paper's, on Megatron-core and vLLM."""
