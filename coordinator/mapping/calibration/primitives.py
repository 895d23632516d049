"""Primitives that were measured on a machine, and how the simulators predict each of them.

`services/preview/primitives.py` measures; what it prints is read here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rolemesh.coordinator.mapping.calibration.fitting import Observation
from rolemesh.coordinator.mapping.job.layouts import Layout
from rolemesh.coordinator.mapping.job.models import Model
from rolemesh.coordinator.mapping.job.systems import ROLEMESH, plain_transformers
from rolemesh.coordinator.mapping.job.work import Lengths, Work
from rolemesh.coordinator.mapping.machines.cluster import DeviceGroup, group_of
from rolemesh.coordinator.mapping.machines.coefficients import Coefficients
from rolemesh.coordinator.mapping.machines.devices import Device
from rolemesh.coordinator.mapping.simulators.generation import Sampling
from rolemesh.coordinator.mapping.simulators.passes import scoring_seconds, update_seconds

Kind = Literal["matmul", "memory", "host", "reduce", "score", "update", "decode"]

_SIZES: Mapping[str, tuple[str, ...]] = {
    "matmul": ("rows", "inner", "columns"),
    "memory": ("bytes",),
    "host": ("bytes",),
    "reduce": ("bytes", "ranks"),
    "score": ("rows", "prompt_tokens", "completion_tokens"),
    "update": ("rows", "prompt_tokens", "completion_tokens"),
    "decode": ("rows", "prompt_tokens", "completion_tokens"),
}
"""Numbers that each kind has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Primitive:
    """One thing that was timed.

    matmul: a product [rows, inner] x [inner, columns]. memory: bytes read and written on the
    device. host: bytes copied between device and host memory. reduce: an all-reduce of bytes over
    ranks of this machine. score, update: a forward pass, and an update of one optimizer step, of
    the model of `config` over rows. decode: as many completions.
    """

    kind: Kind
    sizes: Mapping[str, int]
    config: Mapping[str, Any] | None = None
    """config.json of the model, of score, update and decode."""
    seconds: float
    """Median of the repetitions."""

    def __post_init__(self) -> None:
        if self.kind not in _SIZES:
            raise ValueError(f"kind is {self.kind!r}: give one of {', '.join(_SIZES)}")
        names = _SIZES[self.kind]
        if set(self.sizes) != set(names):
            raise ValueError(
                f"sizes of {self.kind} are {', '.join(sorted(self.sizes)) or 'none'}: give "
                f"{', '.join(names)}"
            )
        for name, value in (("seconds", self.seconds), *self.sizes.items()):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name} of {self.kind} is {value!r}: give a number above 0")
        if (self.config is not None) != (self.kind in ("score", "update", "decode")):
            raise ValueError(
                f"config of {self.kind} is {'missing' if self.config is None else 'given'}: a "
                "model's work has it, and nothing else"
            )

    @property
    def name(self) -> str:
        """For tables, e.g. "matmul 1024 x 256 x 512"."""
        shape = " x ".join(str(self.sizes[name]) for name in _SIZES[self.kind])
        if self.config is None:
            return f"{self.kind} {shape}"
        width, layers = self.config["hidden_size"], self.config["num_hidden_layers"]
        return f"{self.kind} {shape}, {layers} layers of {width}"

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        config = {} if self.config is None else {"config": dict(self.config)}
        return {"kind": self.kind, "sizes": dict(self.sizes), **config, "seconds": self.seconds}

    @property
    def is_of_models(self) -> bool:
        """Whether it is work that the calls of a run show too, and in place."""
        return self.config is not None

    def observation(self, device: Device) -> Observation:
        """How the simulators predict it on a device."""
        return Observation(self.name, self.seconds, self._predicted(device))

    def _predicted(self, device: Device) -> Callable[[Coefficients], float]:
        sizes = self.sizes

        def group(coefficients: Coefficients, count: int = 1) -> DeviceGroup:
            return group_of(device, count, coefficients=coefficients, per_machine=count)

        match self.kind:
            case "matmul":
                flops = 2.0 * sizes["rows"] * sizes["inner"] * sizes["columns"]
                return lambda one: group(one).compute_s(flops)
            case "memory":
                return lambda one: group(one).read_s(sizes["bytes"])
            case "host":
                return lambda one: group(one).host_s(sizes["bytes"])
            case "reduce":
                ranks = sizes["ranks"]
                return lambda one: group(one, ranks).reduce_s(sizes["bytes"], ranks, 1)
        assert self.config is not None
        model = Model.from_config(self.config)
        work = Work(
            prompts=sizes["rows"],
            prompt_tokens=sizes["prompt_tokens"],
            completions=Lengths.fixed(sizes["completion_tokens"]),
            mini_batch_rows=sizes["rows"],
            shares_prompts=False,
        )
        layout = Layout(micro_batch_tokens=int(work.rows * work.row_tokens))
        if self.kind == "score":
            return lambda one: scoring_seconds(model, layout, work, group(one), ROLEMESH).total
        if self.kind == "update":
            return lambda one: update_seconds(model, layout, work, group(one), ROLEMESH).total
        room = float(device.memory_bytes)
        rows = sizes["rows"]
        system = plain_transformers(ROLEMESH)
        return lambda one: (
            Sampling(model, layout, work, group(one), system, rows).seconds(room).total
        )


def measured_peaks(device: Device, primitives: Sequence[Primitive]) -> Device:
    """A CPU with the best of what was measured for what `devices.py` assumes of it.

    A GPU keeps the peaks of its data sheet: what it reaches of them is for the coefficients.
    """
    if device.kind != "cpu":
        return device

    def best(kind: Kind, work: Callable[[Mapping[str, int]], float], known: float) -> float:
        rates = [work(one.sizes) / one.seconds for one in primitives if one.kind == kind]
        return max(rates, default=known)

    return replace(
        device,
        flops=best("matmul", lambda s: 2.0 * s["rows"] * s["inner"] * s["columns"], device.flops),
        memory_bandwidth=best("memory", lambda s: s["bytes"], device.memory_bandwidth),
        host_bandwidth=best("host", lambda s: s["bytes"], device.host_bandwidth),
        link_bandwidth=best(
            "reduce",
            lambda s: 2.0 * s["bytes"] * (s["ranks"] - 1) / s["ranks"],
            device.link_bandwidth,
        ),
        sources=dict.fromkeys(device.sources, "measured here, the best of all sizes"),
    )
