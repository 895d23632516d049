"""An optimizer's moments in host memory, and their way to the GPU and back at each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rolemesh.engine.hardware.pinned_memory import CopyStream, PinnedMemory

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What torch's AdamW keeps for each element of a weight. Muon keeps the first one alone."""

STATE_NAMES = (*MOMENTS, "step")
"""What AdamW keeps for each parameter: the moments, and its own count of steps."""


def keeps(is_orthogonalised: bool, name: str) -> bool:
    """Whether one of STATE_NAMES is kept for a weight: all by AdamW, a mean by Muon."""
    return not is_orthogonalised or name == MOMENTS[0]


class HostMoments:
    """Steps groups of weights whose moments lie in host memory between steps.

    While one group is stepped the moments of the next one come, and those of the one before leave,
    each way on a stream of its own. Owned by the rank's compute thread.

    Invariants: between two calls all moments are in host memory, at the places that they keep; and
    at no time the GPU holds those of more than two groups.
    """

    def __init__(self, groups: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
        """Takes the host memory.

        Args:
            groups: The optimizer of each group of weights: AdamW, or Muon.
            device: Their GPU.
        """
        self._optimizers = groups
        self._device = device
        self._places: list[dict[torch.Tensor, dict[str, torch.Tensor]]] = []
        self._memories = []
        for optimizer in groups:
            weights = _weights(optimizer)
            names = MOMENTS if isinstance(optimizer, torch.optim.AdamW) else MOMENTS[:1]
            memory = PinnedMemory(device)
            places = iter(memory.places([weight for weight in weights for _ in names]))
            self._places.append(
                {weight: {name: next(places) for name in names} for weight in weights}
            )
            self._memories.append(memory)

    def step(self) -> None:
        """Makes one step of all groups, and leaves the GPU without moments."""
        coming, leaving = CopyStream(self._device), CopyStream(self._device)
        groups = [_Group(*pair) for pair in zip(self._optimizers, self._places, strict=True)]
        try:
            groups[0].fetch(coming, self._device)
            for number, group in enumerate(groups):
                if number:
                    # What is made next takes the memory of what has left.
                    groups[number - 1].let_go(self._device)
                if number + 1 < len(groups):
                    groups[number + 1].fetch(coming, self._device)
                group.step(self._device)
                group.send(leaving)
        finally:
            # Also after an error: nothing is to write to this memory later.
            coming.synchronize()
            leaving.synchronize()

    def put(self, optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> None:
        """Has moments that were put into the state of a weight lie at their places."""
        state = optimizer.state[weight]
        for name, place in self._places[self._optimizers.index(optimizer)][weight].items():
            state[name] = place.copy_(state[name])


@dataclass(eq=False)
class _Group:
    """The moments of one group during one step."""

    optimizer: torch.optim.Optimizer
    places: dict[torch.Tensor, dict[str, torch.Tensor]]

    def __post_init__(self) -> None:
        self._here: list[tuple[torch.Tensor, str, torch.Tensor]] = []
        self._arrived: torch.cuda.Event | None = None
        self._left: torch.cuda.Event | None = None

    def fetch(self, stream: CopyStream, device: torch.device) -> None:
        """Queues the way to the GPU. The state stays on the host until the step."""
        # Made on the thread's own stream, where the optimizer uses them.
        self._here = [
            (weight, name, torch.empty_like(state[name], device=device))
            for weight, state in self.optimizer.state.items()
            for name in self.places[weight]
        ]
        with stream.copying():
            for weight, name, moment in self._here:
                moment.copy_(self.places[weight][name], non_blocking=True)
        self._arrived = stream.mark()

    def step(self, device: torch.device) -> None:
        """Steps the weights, once the moments have come."""
        assert self._arrived is not None
        torch.cuda.current_stream(device).wait_event(self._arrived)
        for weight, name, moment in self._here:
            self.optimizer.state[weight][name] = moment
        self.optimizer.step()

    def send(self, stream: CopyStream) -> None:
        """Queues the way back, also of moments that this step has made."""
        self._here = []
        with stream.copying():
            for weight, state in self.optimizer.state.items():
                for name, place in self.places[weight].items():
                    self._here.append((weight, name, state[name]))
                    state[name] = place.copy_(state[name], non_blocking=True)
        self._left = stream.mark()

    def let_go(self, device: torch.device) -> None:
        """Gives the memory on the GPU to what the thread's own stream does after the way back."""
        assert self._left is not None
        torch.cuda.current_stream(device).wait_event(self._left)
        self._here = []


def _weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]
