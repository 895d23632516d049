"""How long the quickstart takes on this host's CPU, from products that a process measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rolemesh.coordinator.commands.findings.findings import Finding, Level, ok
from rolemesh.coordinator.commands.terminal.processes import PreviewError, told_by

# What a step of recipes/quickstart-ppo.yaml multiplies once its policy answers surely, so that rows
# share most tokens: generation 0.22 TFLOP, reference 0.13, values 0.03, the critic's update 0.09,
# the actor's 0.4. Of these the actor and the reference compute forward products in float32 on any
# CPU; all others are of the type that it is fast in (docs/model.md).
_FORWARD_FLOPS = 0.48e12
_BACKWARD_FLOPS = 0.40e12

_OTHER_FLOPS = 0.6e12
"""What a step takes beside its products, as float32 products of the same time: attention, what is
computed number by number, the optimizer, the sampler's program, and waiting. A CPU that multiplies
slowly does the rest slowly, too (docs/measurements.md, "Quickstart")."""

_EVALUATION_FLOPS = 2.6e12
"""Both evaluations, likewise: 24 s where 2 cores multiply 62 GFLOP/s each, 13 s with 104."""

_START_S = 50.0
"""Processes, models, the checkpoint and the export."""

_STEPS = 16

_MOST_CORES = 8
"""Products of 500 rows gain little from more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Products:
    """What a core multiplies, in operations a second."""

    forward: float
    """In float32."""
    backward: float
    """In the type that the CPU is fast in."""
    cores: int
    """That a service computes with."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        forward_s = (_FORWARD_FLOPS + _OTHER_FLOPS) / self.forward
        return (forward_s + _BACKWARD_FLOPS / self.backward) / min(self.cores, _MOST_CORES)

    @property
    def minutes(self) -> float:
        """Minutes of the quickstart, from its first line to its last."""
        evaluations_s = _EVALUATION_FLOPS / self.forward / min(self.cores, _MOST_CORES)
        return (_START_S + evaluations_s + _STEPS * self.step_s) / 60


def check_minutes(environment: Mapping[str, str] | None = None) -> Finding:
    """How long the quickstart takes here, by what a process measures in a second or two.

    Args:
        environment: Variables of that process beside those that every child gets.
    """
    module = "rolemesh.services.preview.products"
    try:
        (told,) = told_by(module, work="measures products", environment=environment or {})
    except PreviewError as error:
        text = f"not measured: {error}"
        return Finding(level=Level.SKIP, what="quickstart", text=text)
    products = Products(**told)
    rates = f"{products.forward / 1e9:.0f} GFLOP/s a core forward and {products.backward / 1e9:.0f}"
    return ok(
        "quickstart",
        f"about {max(1.0, products.minutes):.0f} minutes after the installation, "
        f"{products.step_s:.0f} s a step, where nothing else runs ({rates} backward)",
    )
