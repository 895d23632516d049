"""The way from a policy's training layout to its generation layout, on the same ranks.

The transition of HybridFlow's 3D-HybridEngine (arXiv 2409.19256, section 5): what a rank trains is
part of what it generates with, so only the rest travels, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Self

import torch
from torch.distributed.tensor import DTensor

from rolemesh.engine.layout.boxes import generate_layout, train_layout, whole_layout
from rolemesh.engine.layout.manifest import DtypeName
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.transport.base import Message
from rolemesh.engine.transport.selection import make_transport
from rolemesh.engine.weights.plan import make_plan
from rolemesh.engine.weights.reuse import (
    KeepingSampler,
    SharedWeights,
    before_each_pass,
    has_gradients,
)
from rolemesh.engine.weights.sharded_tensors import TORCH_DTYPES
from rolemesh.engine.weights.transfer import WeightTransfer

TIMEOUT_S = 120.0
"""Longest wait for one bucket of weights."""


class Resharder:
    """Brings the trainer's parts of a policy to the sampler's parts. Owned by the compute thread.

    All ranks of the mesh make it and run it together. The plan is made once. After a failed run the
    transport is of no more use: every further run fails too.

    For a sampler that keeps its tensors, in the trainer's element type and with plain parameters
    (fsdp 1), the parameters become parts of the generation tensors: the transition then takes the
    memory of what is received. They leave again, and the sampler's weights are freed, before the
    model's next pass (of all ranks: a replica without rows makes it with fillers). In all other
    cases generation weights lie beside the training shard.

    Example, on every rank::

        resharder = Resharder(model, "bfloat16")
        shards = resharder.run(dict(trainer.named_weights()), policy_version=7)
        backend.update_shard(shards, 7)
        resharder.received_bytes  # what this rank lacked
    """

    def __init__(
        self,
        model: CausalLm,
        dtype: DtypeName,
        *,
        keeper: KeepingSampler | None = None,
        is_whole: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Plans, and connects the ranks.

        Args:
            model: The policy as it trains, ready for passes; its mesh has more than one rank.
            dtype: In which the sampler holds weights.
            keeper: The sampler, if it generates with whole parameters on each rank and keeps the
                tensors that it is handed. None for vLLM, which has names and slices of its own, but
                takes an adapter's factors whole.
            is_whole: Whether each rank gets whole parameters by Hugging Face name, though there is
                no keeper.
            timeout_s: Longest wait for one bucket.

        Raises:
            UnsupportedFamilyError: The model's family has no plan.
            TransportUnavailableError: The ranks have no way to each other; says what is missing.
        """
        if model.shape is None:
            raise RuntimeError("a model of several ranks has a shape: its loader sees to it")
        layout = model.mesh.layout
        self.plan = make_plan(
            train_layout(model.shape, layout.train, trained_only=True),
            generate_layout(model.shape, layout, dtype)
            if keeper is None and model.shape.adapter is None and not is_whole
            else whole_layout(model.shape.trained_manifest(dtype), layout.world_size),
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
        self._keeper = keeper
        self._parameters = dict(model.trained_weights())
        self._shared: SharedWeights | None = None
        if keeper is not None and _is_shareable(self._parameters, dtype):
            self._shared = SharedWeights(self.plan, model.mesh.rank, self._parameters)
            self._hook = before_each_pass(model, self.take_back)

    @property
    def shares(self) -> bool:
        """Whether training parameters become parts of generation weights."""
        return self._shared is not None

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

        Ends only when every rank has taken its last one. So when a rank fails or vanishes, the
        consumer of this iterator fails on all ranks, also where everything has arrived, and no rank
        goes on with weights that the others do not have.

        Args:
            weights: The trainer's of this rank by name, float32, shaped as its training shard.
            policy_version: Of the weights, the same on all ranks.

        Raises:
            TransferMismatchError: Ranks have different policy versions.
            TransferFailedError: A rank vanished, gave up, or was late; names it and the seconds.
        """
        self._before = (self.transport.received_bytes, self.transport.sent_bytes)
        if self._shared is None or has_gradients(self._parameters.values()):
            yield from self._transfer.run(weights, policy_version=policy_version)
        else:
            # These tensors hold the storage that the parameters are about to leave.
            del weights
            self._shared.leave()
            transferred = self._transfer.run(self._parameters, policy_version=policy_version)
            yield from self._shared.enter(transferred)
        self._await_all(policy_version)

    def take_back(self) -> None:
        """Frees shared generation weights; the parameters have memory of their own again.

        Raises:
            RuntimeError: The sampler generates with them right now.
        """
        if self._shared is None or self._keeper is None or not self._shared.is_entered:
            return
        # First, or each generation tensor would outlive the parameters in it.
        self._keeper.drop_weights("the trainer went on to compute with the weights it had shared")
        self._shared.leave()

    def close(self) -> None:
        """Disconnects the ranks. The model's parameters have memory of their own afterwards."""
        if self._shared is not None:
            self._hook.remove()
            self._shared.leave()
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
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


def _is_shareable(parameters: Mapping[str, torch.Tensor], dtype: DtypeName) -> bool:
    """Whether the parameters could be parts of plain tensors of the type."""
    return all(
        parameter.dtype == TORCH_DTYPES[dtype] and not isinstance(parameter, DTensor)
        for parameter in parameters.values()
    )
