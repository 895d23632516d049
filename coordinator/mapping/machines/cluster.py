"""A cluster: groups of equal devices on machines, and what travels between them costs.

Ranks of a group are neighbours: they fill one machine after the other, and a pool begins with a
machine or lies inside one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rolemesh.coordinator.mapping.errors import PlanError
from rolemesh.coordinator.mapping.machines.coefficients import Coefficients
from rolemesh.coordinator.mapping.machines.devices import Device


@dataclass(frozen=True, kw_only=True)
class DeviceGroup:
    """Devices of one kind, and how fast they compute and talk.

    Seconds of a collective operation follow the ring: each rank sends (n - 1) / n of the bytes over
    its slowest link. All groups of a layout talk at the same time, so those that leave a machine
    share its network.
    """

    device: Device
    count: int
    coefficients: Coefficients = field(default_factory=Coefficients)
    per_machine: int
    """Devices of one machine."""
    network_bandwidth: float
    """Bytes a second that a machine sends to others, one way."""

    def __post_init__(self) -> None:
        for name, value in (
            ("count", self.count),
            ("per_machine", self.per_machine),
            ("network_bandwidth", self.network_bandwidth),
        ):
            if value <= 0:
                raise PlanError(f"{name} of {self.device.name} is {value}: give a number above 0")

    def compute_s(self, flops: float) -> float:
        """Seconds of matrix products on one device."""
        return flops / (self.device.flops * self.coefficients.matmul)

    def read_s(self, num_bytes: float) -> float:
        """Seconds in which a device reads or writes its memory."""
        return num_bytes / (self.device.memory_bandwidth * self.coefficients.memory)

    def layers_s(self, layers: int, numbers: float) -> float:
        """Seconds that layers take in a forward pass beside their products.

        Args:
            layers: On one rank.
            numbers: Of the residual stream of a rank: tokens x width.
        """
        touched = self.read_s(self.coefficients.touched * numbers)
        return layers * (self.coefficients.layer_s + touched)

    def host_s(self, num_bytes: float) -> float:
        """Seconds in which a device copies to or from host memory."""
        return num_bytes / (self.device.host_bandwidth * self.coefficients.host)

    def inside(self, size: int, stride: int) -> int:
        """Ranks of a communication group that stand on one machine."""
        return min(size, max(1, self.per_machine // stride))

    def gather_s(self, num_bytes: float, size: int, stride: int) -> float:
        """Seconds of an all-gather or a reduce-scatter.

        Args:
            num_bytes: Of the whole that is gathered, or summed.
            size: Ranks of the group.
            stride: Distance of its neighbours.
        """
        if size == 1:
            return 0.0
        sent = num_bytes * (size - 1) / size
        inside = self.inside(size, stride)
        link_s = sent / (self.device.link_bandwidth * self.coefficients.link)
        if inside == size:
            return link_s + self.coefficients.link_latency_s
        # So many groups have ranks on one machine, and a ring leaves it once.
        groups = self.per_machine / inside
        network_s = sent * groups / (self.network_bandwidth * self.coefficients.network)
        return max(link_s, network_s) + self.coefficients.network_latency_s

    def reduce_s(self, num_bytes: float, size: int, stride: int) -> float:
        """Seconds of an all-reduce: a reduce-scatter, then an all-gather."""
        return 2 * self.gather_s(num_bytes, size, stride)

    def send_s(self, num_bytes: float, stride: int, senders: int) -> float:
        """Seconds in which each rank sends to the one at a distance.

        Args:
            num_bytes: Of one rank.
            stride: Distance.
            senders: Ranks of a machine that send to another one at the same time.
        """
        if stride < self.per_machine:
            bandwidth = self.device.link_bandwidth * self.coefficients.link
            return num_bytes / bandwidth + self.coefficients.link_latency_s
        bandwidth = self.network_bandwidth * self.coefficients.network
        return num_bytes * senders / bandwidth + self.coefficients.network_latency_s

    def fetch_s(self, num_bytes: float, size: int, stride: int) -> float:
        """Seconds in which each rank fetches what the others of its group have, each part once.

        Args:
            num_bytes: What a rank lacks, spread evenly over the others.
            size: Ranks of the group.
            stride: Distance of its neighbours.
        """
        if size == 1 or not num_bytes:
            return 0.0
        inside = self.inside(size, stride)
        near = num_bytes * (inside - 1) / (size - 1)
        seconds = near / (self.device.link_bandwidth * self.coefficients.link)
        if inside == size:
            return seconds + self.coefficients.link_latency_s
        far = (num_bytes - near) * self.per_machine
        far_s = far / (self.network_bandwidth * self.coefficients.network)
        return max(seconds, far_s) + self.coefficients.network_latency_s


def group_of(
    device: Device,
    count: int,
    *,
    coefficients: Coefficients | None = None,
    per_machine: int | None = None,
    network_bandwidth: float | None = None,
) -> DeviceGroup:
    """A group with the usual machine of its device, where nothing else is said.

    Raises:
        PlanError: A number is not above 0.
    """
    return DeviceGroup(
        device=device,
        count=count,
        coefficients=coefficients or Coefficients(),
        per_machine=device.per_machine if per_machine is None else per_machine,
        network_bandwidth=(
            device.network_bandwidth if network_bandwidth is None else network_bandwidth
        ),
    )
