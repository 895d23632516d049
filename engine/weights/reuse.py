"""Generation weights that hold the training shard inside them, instead of beside them.

For plain parameters (no DTensor) of which training and generation agree on element type and place.
The extra memory of the transition is then what was received, and no copy of the own shard
(arXiv 2409.19256, Table 2: zero redundancy). A rank that is alone receives nothing: its sampler
computes with the trainer's own tensors.

A sampler that shares must not go on with weights that training changes, and an optimizer must not
step a view (torch 2.13's fused AdamW on a CPU takes strided memory for dense, and writes to the
wrong elements). Both follow from two rules: each pass of the model that could be followed by a step
first ends the sharing, and none begins while gradients wait for a step. What else writes to weights
(loading a checkpoint) changes those of the sampler too: deliver again after it, as the actor does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rolemesh.engine.layout.manifest import ManifestError
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.weights.copies import Copy
from rolemesh.engine.weights.plan import Plan
from rolemesh.engine.weights.sharded_tensors import part


class SharedWeights:
    """Moves this rank's training parameters into its generation tensors, and back.

    Invariant: between `enter` and `leave` a moved parameter is a view of its own part of a
    generation tensor (contiguous for a cut of rows, strided for one of columns): writing to one
    writes to both. A parameter that is no single part of one generation tensor stays where it is.
    Owned by one thread.

    Example::

        shared = SharedWeights(plan, rank, parameters)
        for name, tensor in shared.enter(transfer.run(parameters)):
            sampler.place(name, tensor)  # without a copy of its own
        ...  # generate
        sampler.drop_weights()
        shared.leave()  # the parameters are compact again; generation tensors are freed
    """

    def __init__(self, plan: Plan, rank: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Finds out which parameters can move.

        Args:
            plan: From training to generation.
            rank: This rank.
            parameters: The training tensors themselves, by their names in the source layout and
                of its shapes. Give the same mapping to `WeightTransfer.run`: Their old storage is
                freed only when no other tensor refers to it.

        Raises:
            ManifestError: A parameter of the layout is missing.
        """
        self._parameters = parameters
        self._homes = _homes(plan.local[rank], parameters)
        self._moved: list[str] = []

    @property
    def is_entered(self) -> bool:
        """Whether some parameter lies in a generation tensor."""
        return bool(self._moved)

    def enter(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Passes generation tensors on; each takes its parameters in and frees their old storage.

        Args:
            tensors: Names and tensors of the target layout's shapes, as `WeightTransfer.run` yields
                them.

        Yields:
            The same. The sampler that takes them must keep them as they are, not copy them.

        Raises:
            RuntimeError: The parameters are in generation tensors already: call `leave` first.
        """
        if self._moved:
            raise RuntimeError("parameters are in generation tensors already: call leave first")
        for name, tensor in tensors:
            for home in self._homes.get(name, ()):
                self._move(home, tensor)
            yield name, tensor

    def leave(self) -> None:
        """Gives each moved parameter compact storage of its own again, one after the other.

        A generation tensor is freed with its last parameter, unless the sampler holds it. Nothing
        happens when no parameter was moved.
        """
        while self._moved:
            parameter = self._parameters[self._moved.pop()]
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)

    def _move(self, home: Copy, tensor: torch.Tensor) -> None:
        parameter = self._parameters[home.source_tensor]
        if parameter.dtype != tensor.dtype or parameter.device != tensor.device:
            return
        parameter.data = part(tensor, home.target_origin, home.box)
        self._moved.append(home.source_tensor)


class KeepingSampler(Protocol):
    """A sampler that generates with whole parameters and keeps the tensors it is handed.

    `HfBackend` is one.
    """

    def update_shard(
        self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> None:
        """Takes (Hugging Face name, floating [global shape]) as its weights, without a copy."""

    def drop_weights(self, reason: str) -> None:
        """Lets go of them, and refuses to generate until the next update."""


class LentWeights:
    """Has the sampler of a rank that is alone compute with the trainer's own tensors.

    Where element type or place differ the sampler makes a copy by itself. Invariant: no pass that
    makes gradients begins while the sampler has the tensors. Owned by the compute thread.

    Example::

        lent = LentWeights(trainer.model, backend)
        lent.lend(dict(trainer.named_weights()), policy_version=7)
        ...  # generate, score
        trainer.update(...)  # its first pass takes the tensors from the sampler
    """

    def __init__(self, model: CausalLm, sampler: KeepingSampler) -> None:
        """Watches the model; lends nothing yet.

        Args:
            model: As it trains, on one rank.
            sampler: Whose element type and place may differ.
        """
        self._sampler = sampler
        self._parameters = dict(model.trained_weights())
        self._is_lent = False
        self._hook = before_each_pass(model, self._before_pass)

    def lend(self, weights: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Gives the sampler the weights; copies of them while gradients wait for a step.

        Args:
            weights: float32 [global shape] by Hugging Face name.
            policy_version: Of the weights.

        Raises:
            WeightsStaleError: As `update_shard` of the sampler.
        """
        is_copied = has_gradients(self._parameters.values())
        self._sampler.update_shard(
            ((name, weight.clone() if is_copied else weight) for name, weight in weights.items()),
            policy_version,
        )
        self._is_lent = not is_copied

    def close(self) -> None:
        """Stops watching the model."""
        self._hook.remove()

    def _before_pass(self) -> None:
        # Scoring changes nothing.
        if self._is_lent and torch.is_grad_enabled():
            self._sampler.drop_weights("the trainer went on to train the tensors it had lent")
            self._is_lent = False


def before_each_pass(model: CausalLm, act: Callable[[], None]) -> RemovableHandle:
    """Has `act` called before this rank's layers run, to score as to train."""
    backbone: nn.Module = model.lm.base_model
    return backbone.register_forward_pre_hook(lambda module, inputs: act())


def has_gradients(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether a gradient of a parameter (of any shape) waits for an optimizer step."""
    return any(parameter.grad is not None for parameter in parameters)


def _homes(copies: Iterable[Copy], parameters: Mapping[str, torch.Tensor]) -> dict[str, list[Copy]]:
    """For each generation tensor: the copies that take a whole training tensor along."""
    homes: defaultdict[str, list[Copy]] = defaultdict(list)
    housed = set()
    for copy in copies:
        name = copy.source_tensor
        if name not in parameters:
            raise ManifestError(f"parameter {name!r} of the layout is missing: give all of them")
        shape = tuple(stop - start for start, stop in copy.box)
        # A tied embedding is copied into two tensors: it lives in the first.
        if shape == tuple(parameters[name].shape) and name not in housed:
            housed.add(name)
            homes[copy.target_tensor].append(copy)
    return dict(homes)
