"""Coefficients of the cost model: which share of its peaks a machine reaches, and fixed times.

Everything that a measurement can correct stands here, in one flat record of numbers. The defaults
are public figures or assumptions, and say which; none was fitted to a result that they predict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """What the simulators multiply peaks with, and what they add."""

    matmul: float = 0.55
    """Share of `Device.flops` in the layers of a pass. Megatron-LM reports 0.44 to 0.52 of an A100
    with all communication (arXiv 2104.04473, table 1), which is counted apart here."""
    memory: float = 0.8
    """Share of `Device.memory_bandwidth` when weights, keys and values are read. Assumed."""
    link: float = 0.78
    """Share of `Device.link_bandwidth` in a collective operation: about 235 of 300 GB/s that
    nccl-tests show as bus bandwidth on 8 A100."""
    network: float = 0.85
    """Share of the network's bandwidth in a collective operation. Assumed."""
    host: float = 0.8
    """Share of `Device.host_bandwidth` in copies to and from locked host memory. Assumed."""
    link_latency_s: float = 20e-6
    """A collective operation within a machine, without its bytes. Assumed."""
    network_latency_s: float = 60e-6
    """The same between machines. Assumed."""
    hidden: float = 0.7
    """Share of a pass's computation behind which gathers of weights may hide. Assumed."""
    decode_step_s: float = 2e-3
    """What the sampler's host program takes for a decoding step. Assumed."""
    decode_row_s: float = 10e-6
    """The same for each sequence that is decoded. Assumed."""
    call_s: float = 0.01
    """A call of a service, without its work. Assumed."""
    stream_bandwidth: float = 1e9
    """Bytes a second of a gRPC stream between two processes. Assumed; measured on two
    busy cores: 0.6e9 (docs/measurements.md)."""
    judge_row_s: float = 1e-4
    """A row that a rule judges, without a model. Assumed."""
    layer_s: float = 0.0
    """What a rank's host program takes for one layer in a forward pass; 0: hidden behind what the
    device computes, as in long passes on a GPU. A backward pass counts as its products do."""
    pass_s: float = 0.0
    """The same for a pass beside its layers: packing rows, what stands around the layers; 0 as
    `layer_s`."""
    touched: float = 0.0
    """Bytes of memory that a layer's forward pass moves beside its products, for each number of its
    residual stream (norms, activations, sums); 0: hidden in `matmul`."""
    optimizer_s: float = 0.0
    """An optimizer step, without the memory that it reads and writes; 0: nothing beside that."""
    row_s: float = 0.0
    """What a call that computes on rows takes for each of them, without its work; 0: nothing."""
    crowd: float = 0.0
    """Part by which each further rank that computes on the same CPUs at the same time slows a rank:
    they share units, caches and memory; 0: devices are a rank's own, as GPUs are."""
    step_s: float = 0.0
    """A step of a run beside its calls: commit, records, a cut of the state; 0: nothing."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not value >= 0 or (one.name in SHARES and not 0 < value <= 1):
                bound = "above 0 and at most 1" if one.name in SHARES else "0 or more"
                raise ValueError(f"coefficient {one.name} is {value}: give a number {bound}")
        if not self.stream_bandwidth:
            raise ValueError("coefficient stream_bandwidth is 0: give a number above 0")

    def to_dict(self) -> dict[str, float]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, float]) -> Self:
        """The record of `to_dict`; what is left out keeps its default.

        Raises:
            ValueError: There is no such coefficient, or a number cannot be.
        """
        known = {one.name for one in fields(cls)}
        for name in values:
            if name not in known:
                raise ValueError(
                    f"{name!r} is no coefficient: give some of {', '.join(sorted(known))}"
                )
        return cls(**values)


SHARES = frozenset({"matmul", "memory", "link", "network", "host", "hidden"})
"""Names of shares of a peak."""

RATES = (SHARES - {"hidden"}) | {"stream_bandwidth"}
"""Names of those that seconds are divided by."""
