"""The way from a policy's training layout to its generation layout, on the same ranks.

The transition of HybridFlow's 3D-HybridEngine (arXiv 2409.19256, section 5): what a rank trains is
part of what it generates with, so only the rest travels, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.transport.base import Transport
from rolemesh.engine.transport.gloo import GlooTransport
from rolemesh.engine.weights.layouts import generate_layout, train_layout
from rolemesh.engine.weights.manifest import DtypeName
from rolemesh.engine.weights.plan import make_plan
from rolemesh.engine.weights.transfer import WeightTransfer

TIMEOUT_S = 120.0
"""Longest wait for one bucket of weights."""


class Resharder:
    """Brings the trainer's parts of a policy to the sampler's parts. Owned by the compute thread.

    All ranks of the mesh make it and run it together. The plan is made once.
    """

    def __init__(self, model: CausalLm, dtype: DtypeName) -> None:
        """Plans, and connects the ranks.

        Args:
            model: the policy as it trains; its mesh has more than one rank.
            dtype: in which the sampler holds weights.

        Raises:
            UnsupportedFamilyError: the model's family has no plan.
        """
        if model.shape is None:
            raise RuntimeError("a model of several ranks has a shape: its loader sees to it")
        layout = model.mesh.layout
        self.plan = make_plan(
            train_layout(model.shape, layout.train),
            generate_layout(model.shape, layout, dtype),
        )
        self.transport = _transport(model)
        self._transfer = WeightTransfer(
            self.plan,
            model.mesh.rank,
            self.transport,
            timeout_s=TIMEOUT_S,
            device=model.device,
        )

    def run(
        self, weights: Mapping[str, torch.Tensor], *, policy_version: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The sampler's tensors, each as soon as it is whole; see `WeightTransfer.run`."""
        return self._transfer.run(weights, policy_version=policy_version)

    def close(self) -> None:
        """Disconnects the ranks."""
        self.transport.close()


def _transport(model: CausalLm) -> Transport:
    return GlooTransport(model.mesh)
