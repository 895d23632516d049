"""The moving average of a model's trained weights, and passes that are made with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch

from rolemesh.engine.hardware.cpu_threads import threads_for_each
from rolemesh.engine.sleep_memory import SleepMemory

SWAP_BYTES = 64 * 2**20
"""Of weights that change places with their average at a time."""


class WeightAverage:
    """The exponential moving average of this rank's parts of the trained weights.

    Elementwise, so that it is cut as they are, in any layout; with an adapter it is that of the
    factors. Owned by the rank's compute thread.

    Invariant: outside of `in_place_of_weights` the model has its own weights, bit by bit, whatever
    a pass with the average raised.

    Example: with the decay 0.9, an average of 1.0 and a weight of 2.0 a step gives 1.1.
    """

    def __init__(self, decay: float, weights: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Begins with the weights as they are.

        Args:
            decay: Part a of the average that a step leaves, above 0 and below 1.
            weights: Gives this rank's parts of the trained weights where they lie now, float32, by
                Hugging Face name; some may be empty.
        """
        self.decay = decay
        self._weights = weights
        self.tensors = {name: weight.clone() for name, weight in weights().items()}
        """The average, by Hugging Face name, each of the shape of its weight."""
        self._sleep_memory = SleepMemory()

    @torch.no_grad()
    def step(self) -> None:
        """Takes the weights in: average = a * average + (1 - a) * weights, in float32.

        As average + (1 - a) * (weights - average), which leaves an average that equals its weight
        exactly as it is.
        """
        weights = self._weights()
        with self._threads():
            for name, average in self.tensors.items():
                average.lerp_(weights[name], 1 - self.decay)

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Has the model compute with the average meanwhile. Not while its gradients are made.

        The values change places where they lie, some rows after others, so that nothing that knows
        the weights (cut parameters, a sampler that reads the same memory) has to be told, and no
        second copy of them is held.
        """
        # Taken before anything changes, and kept: the way back must not want for memory.
        spare = self._spare()
        self._swap(spare)
        try:
            yield
        finally:
            self._swap(spare)

    def move_to(self, device: torch.device) -> int:
        """Moves the average to where the weights go. Returns bytes."""
        elsewhere = [name for name, one in self.tensors.items() if one.device != device]
        if not elsewhere:
            return 0
        moved = self._sleep_memory.move([self.tensors[name] for name in elsewhere], device)
        self.tensors |= dict(zip(elsewhere, moved, strict=True))
        return sum(one.nbytes for one in moved)

    def _spare(self) -> torch.Tensor:
        """Memory for the longest piece, float32 [elements]."""
        pieces = (piece for one in self.tensors.values() for piece in _pieces(one))
        one = next(iter(self.tensors.values()))
        return one.new_empty(max((piece.numel() for piece in pieces), default=0))

    @torch.no_grad()
    def _swap(self, spare: torch.Tensor) -> None:
        weights = self._weights()
        with self._threads():
            for name, average in self.tensors.items():
                for here, there in zip(_pieces(weights[name]), _pieces(average), strict=True):
                    kept = spare[: here.numel()].view(here.shape)
                    kept.copy_(here)
                    here.copy_(there)
                    there.copy_(kept)

    def _threads(self) -> AbstractContextManager[None]:
        tensors = self.tensors.values()
        return threads_for_each(tensors, next(iter(tensors)).device)


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows of a tensor of any shape, as views of SWAP_BYTES at most, or one row each."""
    if not tensor.numel():
        return ()
    rows = tensor[None] if tensor.dim() == 0 else tensor
    return torch.split(rows, max(1, SWAP_BYTES // rows[:1].nbytes))
