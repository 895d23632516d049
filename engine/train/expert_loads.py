"""Loads of the experts of a mixture in training: even as a metric, and counted for whoever asks.

Shape letters: L layers with experts, E experts of a layer.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rolemesh.engine.models.decoder import Decoder
from rolemesh.engine.models.layers.routing import load_metrics
from rolemesh.engine.parallel.agreement import gather_facts


@dataclass(frozen=True, slots=True)
class LayerLoads:
    """Choices of the experts of one layer."""

    layer: int
    """Number of the layer in the model, from 0."""
    choices: Sequence[int]
    """How often each of the E experts was chosen."""


class ExpertLoads:
    """Counts, over optimizer steps, how often each expert of a model was chosen.

    Owned by the rank's compute thread. Invariant: every rank of the model calls `step` and `take`
    in the same order, and has the same answers.

    Example::

        loads.step()   # after each of two optimizer steps: {"experts/load_ratio": 1.4, ...}
        loads.take()   # the sum of both: [LayerLoads(layer=1, choices=[310, 290, ...]), ...]
        loads.take()   # []
    """

    def __init__(self, model: Decoder) -> None:
        """Prepares.

        Args:
            model: With experts; its spec says whether an optimizer step moves their biases.

        Raises:
            ValueError: The model has no experts.
        """
        if model.routers is None:
            raise ValueError("loads of experts are counted of a model that has some")
        self._model = model
        self._routers = model.routers
        self._sums: list[torch.Tensor] = []
        """float64 [E] for each layer of the stage; empty where nothing was counted."""

    def step(self) -> dict[str, float]:
        """Moves the biases of experts, where that is wanted; how even the loads of the step were.

        Nothing where no choice was counted since the step before.
        """
        loads = self._routers.loads(self._model.mesh.dp)
        if self._model.spec.balancing is not None:
            self._routers.balance(loads, self._model.spec.balancing.rate)
        before = self._sums or [torch.zeros_like(load) for load in loads]
        self._sums = [a + b for a, b in zip(before, loads, strict=True)]
        stages = gather_facts(load_metrics(loads), self._model.mesh.pp, self._model.device)
        found = [facts for stage in stages for facts in stage]
        if not found:
            return {}
        ratios, entropies = zip(*found, strict=True)
        return {
            "experts/load_ratio": statistics.fmean(ratios),
            "experts/load_ratio_max": max(ratios),
            "experts/load_entropy": statistics.fmean(entropies),
        }

    def forget(self) -> None:
        """Drops what was counted, e.g. in an update that failed between two of its steps."""
        self._routers.forget()
        self._sums = []

    def take(self) -> list[LayerLoads]:
        """The sums of all L layers of the model since the last `take`, which are forgotten.

        Counts are whole numbers: no layout of ranks changes one.
        """
        own = [load.to(torch.int64).tolist() for load in self._sums]
        self._sums = []
        # Without a step since the last time there is nothing of any layer.
        facts = list(zip(self._routers.layers, own, strict=True)) if own else []
        stages = gather_facts(facts, self._model.mesh.pp, self._model.device)
        return [LayerLoads(layer, choices) for stage in stages for layer, choices in stage]
