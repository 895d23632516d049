"""Devices and networks as data: what each can do at most, and where the number stands.

Peaks, not what programs reach: `coefficients` says which share of a peak is reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rolemesh.coordinator.mapping.errors import PlanError

GB = 10**9
GBIT = GB / 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device of a kind, and what joins it to others."""

    name: str
    kind: Literal["gpu", "cpu"] = "gpu"
    memory_bytes: int
    """Memory, as the data sheet gives it."""
    flops: float
    """Products of matrices a second: bfloat16 with float32 sums, dense; float32 on a CPU."""
    memory_bandwidth: float
    """Bytes a second between the device and its memory."""
    link_bandwidth: float
    """Bytes a second that a device sends to others of its machine, one way."""
    host_bandwidth: float
    """Bytes a second between the device and host memory, one way."""
    per_machine: int = 8
    """Devices of the usual machine."""
    network_bandwidth: float
    """Bytes a second that such a machine sends to others, one way."""
    sources: Mapping[str, str]
    """Where each number stands, by field."""


_A100 = "NVIDIA A100 Tensor Core GPU data sheet, SXM column"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet, SXM column; halved, where it counts sparsity"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet, SXM column; halved, where it counts sparsity"
_B200 = "NVIDIA HGX B200 (1,000 W): 4.5 PFLOP/s with sparsity, halved"
_DGX_B200 = "NVIDIA DGX B200 data sheet, an eighth of the system's"
_L40S = "NVIDIA L40S data sheet; halved, where it counts sparsity"
_4090 = "NVIDIA Ada GPU Architecture whitepaper V2, appendix A (GeForce RTX 4090)"
_MI300X = "AMD Instinct MI300X data sheet"
_CPU = "assumed: 16 cores of 2.5 GHz with two AVX2 products and sums of 8 float32 a clock"


def _device(
    *, name: str, kind: Literal["gpu", "cpu"] = "gpu", per_machine: int = 8, **known: Any
) -> Device:
    """A device of numbers that each come with their source."""
    numbers = {field: number for field, (number, _) in known.items()}
    sources = {field: source for field, (_, source) in known.items()}
    return Device(name=name, kind=kind, per_machine=per_machine, sources=sources, **numbers)


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _device(
            name="a100-40",
            memory_bytes=(40 * GB, _A100),
            flops=(312e12, _A100),
            memory_bandwidth=(1.555e12, _A100),
            link_bandwidth=(300 * GB, f"{_A100}: NVLink 600 GB/s, both ways"),
            host_bandwidth=(32 * GB, f"{_A100}: PCIe 4.0 x16, 64 GB/s both ways"),
            network_bandwidth=(
                8 * 200 * GBIT,
                "DGX A100: 8 x ConnectX-6 of 200 Gbit/s for computing",
            ),
        ),
        _device(
            name="a100-80",
            memory_bytes=(80 * GB, _A100),
            flops=(312e12, _A100),
            memory_bandwidth=(2.039e12, _A100),
            link_bandwidth=(300 * GB, f"{_A100}: NVLink 600 GB/s, both ways"),
            host_bandwidth=(32 * GB, f"{_A100}: PCIe 4.0 x16, 64 GB/s both ways"),
            network_bandwidth=(
                8 * 200 * GBIT,
                "DGX A100: 8 x ConnectX-6 of 200 Gbit/s for computing",
            ),
        ),
        _device(
            name="h100",
            memory_bytes=(80 * GB, _H100),
            flops=(989.4e12, f"{_H100}: 1,979 TFLOP/s"),
            memory_bandwidth=(3.35e12, _H100),
            link_bandwidth=(450 * GB, f"{_H100}: NVLink 900 GB/s, both ways"),
            host_bandwidth=(64 * GB, f"{_H100}: PCIe 5.0 x16, 128 GB/s both ways"),
            network_bandwidth=(8 * 400 * GBIT, "DGX H100: 8 x ConnectX-7 of 400 Gbit/s"),
        ),
        _device(
            name="h200",
            memory_bytes=(141 * GB, _H200),
            flops=(989.4e12, f"{_H200}: 1,979 TFLOP/s"),
            memory_bandwidth=(4.8e12, _H200),
            link_bandwidth=(450 * GB, f"{_H200}: NVLink 900 GB/s, both ways"),
            host_bandwidth=(64 * GB, f"{_H200}: PCIe 5.0 x16, 128 GB/s both ways"),
            network_bandwidth=(8 * 400 * GBIT, "DGX H200: 8 x ConnectX-7 of 400 Gbit/s"),
        ),
        _device(
            name="b200",
            memory_bytes=(180 * GB, f"{_DGX_B200}: 1,440 GB"),
            flops=(2250e12, _B200),
            memory_bandwidth=(8e12, f"{_DGX_B200}: 64 TB/s"),
            link_bandwidth=(900 * GB, f"{_DGX_B200}: 14.4 TB/s, both ways"),
            host_bandwidth=(64 * GB, "DGX B200: PCIe 5.0 x16, 128 GB/s both ways"),
            network_bandwidth=(8 * 400 * GBIT, "DGX B200: 8 x ConnectX-7 of 400 Gbit/s"),
        ),
        _device(
            name="l40s",
            memory_bytes=(48 * GB, _L40S),
            flops=(362.05e12, f"{_L40S}: 733 TFLOP/s"),
            memory_bandwidth=(864e9, _L40S),
            link_bandwidth=(32 * GB, f"{_L40S}: no NVLink, so PCIe 4.0 x16, 64 GB/s both ways"),
            host_bandwidth=(32 * GB, f"{_L40S}: PCIe 4.0 x16, 64 GB/s both ways"),
            per_machine=4,
            network_bandwidth=(200 * GBIT, "assumed: one adapter of 200 Gbit/s for 4 GPUs"),
        ),
        _device(
            name="rtx4090",
            memory_bytes=(24 * GB, _4090),
            flops=(165.2e12, f"{_4090}: bfloat16 with float32 accumulate"),
            memory_bandwidth=(1.008e12, _4090),
            link_bandwidth=(32 * GB, f"{_4090}: no NVLink, so PCIe 4.0 x16, 64 GB/s both ways"),
            host_bandwidth=(32 * GB, f"{_4090}: PCIe 4.0 x16, 64 GB/s both ways"),
            per_machine=4,
            network_bandwidth=(25 * GBIT, "assumed: one adapter of 25 Gbit/s"),
        ),
        _device(
            name="mi300x",
            memory_bytes=(192 * GB, _MI300X),
            flops=(1307.4e12, _MI300X),
            memory_bandwidth=(5.3e12, _MI300X),
            link_bandwidth=(448 * GB, f"{_MI300X}: 7 links to the others of 128 GB/s, both ways"),
            host_bandwidth=(64 * GB, f"{_MI300X}: PCIe 5.0 x16, 128 GB/s both ways"),
            network_bandwidth=(8 * 400 * GBIT, "assumed: 8 adapters of 400 Gbit/s"),
        ),
        _device(
            name="cpu",
            kind="cpu",
            memory_bytes=(64 * GB, "assumed"),
            flops=(16 * 2.5e9 * 32, _CPU),
            memory_bandwidth=(40e9, "assumed: two channels of DDR4-2666"),
            link_bandwidth=(10 * GB, "assumed: copies through /dev/shm"),
            host_bandwidth=(10 * GB, "assumed: copies through /dev/shm"),
            per_machine=1,
            network_bandwidth=(10 * GBIT, "assumed: 10 Gbit/s"),
        ),
    )
}
"""By the name that commands take."""


def device_of(name: str) -> Device:
    """The device of a name; raises PlanError where there is none."""
    if name not in DEVICES:
        raise PlanError(f"{name!r} is no device: give one of {', '.join(DEVICES)}")
    return DEVICES[name]
