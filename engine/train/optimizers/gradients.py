"""Turns what the ranks' backward passes left into whole gradients, and measures them together."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from rolemesh.engine.layout.families import cut_of
from rolemesh.engine.layout.slices import is_stack, replica_ranks_of_kv
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.parallel.agreement import gather_facts
from rolemesh.engine.parallel.buckets import BUCKET_BYTES, sum_over
from rolemesh.engine.parallel.data_parallel import local_part
from rolemesh.engine.parallel.tensor_parallel import sum_partial_gradients


class Gradients:
    """The trained parameters of a rank as plain local tensors, and their gradients.

    Owned by the rank's compute thread. All ranks of the mesh call `gather` and `norm` together.

    Invariant: between `gather` and `drop` every replica of an element (over the data axis, over
    slices that share it, on both ends of the pipeline) has the same gradient bit by bit, so that
    equal weights stay equal.
    """

    def __init__(self, rank_model: RankModel) -> None:
        self.rank_model = rank_model
        """Whose they are."""
        self._mesh = rank_model.mesh
        self._parameters = {
            name: parameter
            for name, parameter in rank_model.model.named_weights()
            if parameter.requires_grad
        }
        self.weights: dict[str, nn.Parameter] = {
            name: parameter
            if local_part(parameter) is parameter
            else nn.Parameter(local_part(parameter.detach()))
            for name, parameter in self._parameters.items()
        }
        """By Hugging Face name, what the optimizer steps: this rank's part of each parameter."""
        self._shares = rank_model.model.partial_gradients()
        self._tied = rank_model.model.tied_weight()
        self._counted = {name for name in self.weights if self._counts(name)}

    def gather(self) -> None:
        """Makes every gradient whole: sums over slices, replicas and the ends of the pipeline.

        (Sums over ranks that cut a parameter among them happened in the backward passes.)
        """
        self.refresh()
        for name, parameter in self._parameters.items():
            weight = self.weights[name]
            if weight is not parameter:
                gradient = parameter.grad
                weight.grad = None if gradient is None else local_part(gradient)
        sum_partial_gradients(self.weights.items(), self._shares, self._mesh.tp)
        sum_over(self._present(of_experts=False), self._mesh.replicate)
        sum_over(self._present(of_experts=True), self._mesh.expert_replicate)
        if self._tied in self.weights:
            self._add_other_end(self.weights[self._tied])

    def refresh(self) -> None:
        """Looks up where the local parts lie now: moving a cut model to a device moves them."""
        for name, parameter in self._parameters.items():
            weight = self.weights[name]
            if weight is not parameter:
                weight.data = local_part(parameter.detach())

    def norm(self) -> tuple[torch.Tensor, list[str]]:
        """The L2 norm over every element of the model, each counted once.

        Returns:
            float32 scalar, equal on all ranks; and, where it is not finite, the parameters that
            made it so.
        """
        local = nn.utils.get_total_norm(
            [
                weight.grad
                for name, weight in self.weights.items()
                if weight.grad is not None and name in self._counted
            ]
        )
        culprits = [] if math.isfinite(float(local)) else self._not_finite()
        if self._mesh.world.size == 1:
            return local, culprits
        device = self.rank_model.device
        facts = gather_facts([float(local) ** 2, culprits], self._mesh.world, device)
        # Every rank adds in the same order, so that all clip alike.
        total = math.sqrt(sum(square for square, _ in facts))
        names = sorted({name for _, found in facts for name in found})
        return torch.tensor(total, dtype=torch.float32, device=device), names

    def drop(self) -> None:
        """Forgets all gradients."""
        for parameters in (self._parameters, self.weights):
            for parameter in parameters.values():
                parameter.grad = None

    def _counts(self, name: str) -> bool:
        """Whether this rank is the one among those with the same part that counts it."""
        mesh = self._mesh
        if mesh.world.size == 1:
            return True
        shape = self.rank_model.model.shape
        assert shape is not None  # more than one rank only with a plan
        cut = cut_of(shape, name)
        holders = 1
        if cut == "whole":
            holders = mesh.tp.size
        elif cut == "kv_heads":
            holders = replica_ranks_of_kv(shape, mesh.tp.size)
        is_copy = name == self._tied and not mesh.pp.is_first
        replicate = mesh.expert_replicate if self._is_stack(name) else mesh.replicate
        return replicate.is_first and mesh.tp.index % holders == 0 and not is_copy

    def _present(self, *, of_experts: bool) -> Iterator[torch.Tensor]:
        for name, weight in self.weights.items():
            if weight.grad is not None and self._is_stack(name) == of_experts:
                yield weight.grad

    def _is_stack(self, name: str) -> bool:
        """Whether a weight is a stack of experts, whose replicas may be other ranks."""
        shape = self.rank_model.model.shape
        return shape is not None and is_stack(shape, name)

    def _not_finite(self) -> list[str]:
        return [
            name
            for name, weight in self.weights.items()
            if weight.grad is not None and not bool(weight.grad.isfinite().all())
        ]

    def _add_other_end(self, weight: nn.Parameter) -> None:
        """Adds the gradient of a tied embedding's copy on the other end of the pipeline.

        The sum of two numbers does not depend on their order: both ends get the same bits.
        """
        assert weight.grad is not None  # every pass reaches embedding and head
        rows_bytes = max(1, weight.grad[:1].nbytes)
        for part in torch.split(weight.grad, max(1, BUCKET_BYTES // rows_bytes)):
            if part.numel():
                part += self.rank_model.pipeline.swap_with_other_end(part)
