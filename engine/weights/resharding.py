"""The way from a policy's training layout to its generation layout, on the same ranks.

The transition of HybridFlow's 3D-HybridEngine (arXiv 2409.19256, section 5): what a rank trains is
part of what it generates with, so only the rest travels, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Self

import torch

from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.transport.base import Message
from rolemesh.engine.transport.selection import make_transport
from rolemesh.engine.weights.layouts import generate_layout, train_layout
from rolemesh.engine.weights.manifest import DtypeName
from rolemesh.engine.weights.plan import make_plan
from rolemesh.engine.weights.transfer import WeightTransfer

TIMEOUT_S = 120.0
"""Longest wait for one bucket of weights."""


class Resharder:
    """Brings the trainer's parts of a policy to the sampler's parts. Owned by the compute thread.

    All ranks of the mesh make it and run it together. The plan is made once. After a failed run the
    transport is of no more use: every further run fails too.

    Example, on every rank::

        resharder = Resharder(model, "bfloat16")
        shards = resharder.run(dict(trainer.named_weights()), policy_version=7)
        backend.update_shard(shards, 7)
        resharder.received_bytes  # what this rank lacked
    """

    def __init__(self, model: CausalLm, dtype: DtypeName, *, timeout_s: float = TIMEOUT_S) -> None:
        """Plans, and connects the ranks.

        Args:
            model: the policy as it trains; its mesh has more than one rank.
            dtype: in which the sampler holds weights.
            timeout_s: longest wait for one bucket.

        Raises:
            UnsupportedFamilyError: the model's family has no plan.
            TransportUnavailableError: the ranks have no way to each other; says what is missing.
        """
        if model.shape is None:
            raise RuntimeError("a model of several ranks has a shape: its loader sees to it")
        layout = model.mesh.layout
        self.plan = make_plan(
            train_layout(model.shape, layout.train),
            generate_layout(model.shape, layout, dtype),
        )
        self._timeout_s = timeout_s
        self.transport = make_transport(model.mesh, model.device)
        self._device = model.device
        self._transfer = WeightTransfer(
            self.plan,
            model.mesh.rank,
            self.transport,
            timeout_s=timeout_s,
            device=model.device,
        )
        self._before = (0, 0)

    @property
    def received_bytes(self) -> int:
        """Weights that this rank took from others in the last run so far; 0 before the first."""
        return self.transport.received_bytes - self._before[0]

    @property
    def sent_bytes(self) -> int:
        """Weights that this rank gave to others in the last run so far; 0 before the first."""
        return self.transport.sent_bytes - self._before[1]

    def run(
        self, weights: Mapping[str, torch.Tensor], *, policy_version: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The sampler's tensors, each as soon as it is whole.

        Ends only when every rank has taken its last one. So when a rank fails or vanishes, whoever
        consumes this fails on all ranks, also where everything has arrived, and no rank goes on
        with weights that the others do not have.

        Args:
            weights: the trainer's of this rank.
            policy_version: of the weights, the same on all ranks.

        Raises:
            TransferMismatchError: ranks have different policy versions.
            TransferFailedError: a rank vanished, gave up, or was late; names it and the seconds.
        """
        self._before = (self.transport.received_bytes, self.transport.sent_bytes)
        yield from self._transfer.run(weights, policy_version=policy_version)
        self._await_all(policy_version)

    def close(self) -> None:
        """Disconnects the ranks."""
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _await_all(self, policy_version: int) -> None:
        """Returns once every rank has taken all of its tensors."""
        peers = [peer for peer in range(self.transport.world_size) if peer != self.transport.rank]
        out = torch.ones(1, dtype=torch.uint8, device=self._device)
        self.transport.exchange(
            [Message(peer, out) for peer in peers],
            [Message(peer, torch.empty_like(out)) for peer in peers],
            label=f"the last weights of policy_version {policy_version}",
            is_control=True,
        ).wait(self._timeout_s)
