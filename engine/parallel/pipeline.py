"""Runs the stages of a pipeline over micro-batches: forward only, or forward and backward.

The order is 1F1B, the non-interleaved schedule of arXiv 2104.04473, section 2.2.1 (first given in
arXiv 1806.03377): a stage never holds more than `num_stages - stage` micro-batches. Every
micro-batch has its own number of tokens, which all stages know, so no shape is ever sent.

Shape letters: B rows, T longest row, D width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from rolemesh.engine.parallel.mesh import RankMesh


@dataclass(frozen=True, slots=True)
class Compute:
    """Run one micro-batch through this stage."""

    direction: Literal["forward", "backward"]
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Send to and receive from one neighbour, as one grouped operation.

    Both ends list it at the same place among their exchanges with each other, so that it may
    block on either side, as a group of NCCL calls on one stream does.
    """

    neighbour: int
    """The other stage."""
    send: int | None = None
    """Micro-batch of what is sent."""
    receive: int | None = None
    """Micro-batch of what is received."""


Action: TypeAlias = Compute | Exchange


def one_forward_one_backward(stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """What a stage does in a pass that trains.

    The stage runs ahead of its first backward by as many forwards as there are stages after it,
    then takes turns, then drains.

    Example: stage 0 of 2 with 3 micro-batches computes F0 F1 B0 F2 B1 B2.
    """
    before = stage - 1 if stage > 0 else None
    after = stage + 1 if stage < num_stages - 1 else None
    num_ahead = min(num_stages - 1 - stage, num_micro_batches)
    actions: list[Action] = []

    def exchange(
        neighbour: int | None, *, send: int | None = None, receive: int | None = None
    ) -> None:
        if neighbour is not None:
            actions.append(Exchange(neighbour, send=send, receive=receive))

    for ahead in range(num_ahead):
        exchange(before, receive=ahead)
        actions.append(Compute("forward", ahead))
        exchange(after, send=ahead)
    if num_ahead < num_micro_batches:
        exchange(before, receive=num_ahead)
    for newest in range(num_ahead, num_micro_batches):
        oldest = newest - num_ahead
        actions.append(Compute("forward", newest))
        exchange(after, send=newest, receive=oldest)
        actions.append(Compute("backward", oldest))
        following = newest + 1 if newest + 1 < num_micro_batches else None
        exchange(before, send=oldest, receive=following)
    for oldest in range(num_micro_batches - num_ahead, num_micro_batches):
        exchange(after, receive=oldest)
        actions.append(Compute("backward", oldest))
        exchange(before, send=oldest)
    return actions


def forward_only(stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """What a stage does in a pass that only scores."""
    actions: list[Action] = []
    for micro_batch in range(num_micro_batches):
        if stage > 0:
            actions.append(Exchange(stage - 1, receive=micro_batch))
        actions.append(Compute("forward", micro_batch))
        if stage < num_stages - 1:
            actions.append(Exchange(stage + 1, send=micro_batch))
    return actions


StageForward: TypeAlias = Callable[[int, torch.Tensor | None], torch.Tensor | None]
"""Runs a micro-batch (by number) through this stage, from the hidden states of the stage before
(float32 [1, S, D]; None on the first stage). Gives this stage's hidden states, and on the last
stage the loss: a scalar to run backward on, or None in a pass without gradients."""


class Pipeline:
    """This rank's place among the stages of its pipeline.

    Owned by the rank's compute thread. With one stage nothing is sent, and a pass is the plain
    loop: forward and backward of one micro-batch after the other.

    Example::

        pipeline = Pipeline(mesh, width=model.width, device=model.device)
        pipeline.train([(4, 37), (2, 90)], forward)  # gradients are in the parameters now
    """

    def __init__(self, mesh: RankMesh, *, width: int, device: torch.device) -> None:
        """Opens the connections; every rank of the pipeline calls it.

        Args:
            mesh: This rank's groups.
            width: D, of the hidden states that travel.
            device: Where they are.
        """
        self._group = mesh.pp
        # Torch's numbers of the stages' ranks.
        self._peers = [mesh.torch_rank(rank) for rank in mesh.pp.ranks]
        self._width = width
        self.device = device
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._is_broken = False
        if self._group.size > 1:
            # A group's first operation must be one of all its ranks, or a grouped send and receive
            # is undefined (torch.distributed.batch_isend_irecv).
            dist.all_reduce(torch.zeros(1, device=device), group=self._group.process_group)

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self._group.is_last

    def train(
        self,
        num_tokens: Sequence[int],
        forward: StageForward,
        done: Callable[[int], None],
    ) -> None:
        """Forward and backward of all micro-batches, in 1F1B order.

        Args:
            num_tokens: S of each micro-batch, equal on all stages.
            forward: Runs a micro-batch through this stage.
            done: Called with a micro-batch's number when this stage is done with it.

        Raises:
            RuntimeError: An earlier pass over several stages was broken off.
        """
        actions = one_forward_one_backward(self._group.index, self._group.size, len(num_tokens))
        self._run(actions, num_tokens, forward, done, trains=True)

    @torch.no_grad()
    def score(
        self,
        num_tokens: Sequence[int],
        forward: StageForward,
        done: Callable[[int], None],
    ) -> None:
        """Forward of all micro-batches in order, without gradients; see `train`."""
        actions = forward_only(self._group.index, self._group.size, len(num_tokens))
        self._run(actions, num_tokens, forward, done, trains=False)

    def swap_with_other_end(self, mine: torch.Tensor) -> torch.Tensor:
        """Sends a tensor from first to last stage and from last to first.

        Both call it, with tensors of one shape; no other stage does.

        Returns:
            The other end's.
        """
        other = self._group.size - 1 - self._group.index
        theirs = torch.empty_like(mine)
        self._exchange(other, send=mine, receive=theirs)
        self._finish_sends()
        return theirs

    def _run(
        self,
        actions: Sequence[Action],
        num_tokens: Sequence[int],
        forward: StageForward,
        done: Callable[[int], None],
        *,
        trains: bool,
    ) -> None:
        if self._is_broken:
            raise RuntimeError(
                "an earlier pass over this pipeline was broken off, and what its stages sent would "
                "be taken for this pass's: close the mesh and load the model on a new one"
            )
        # It stays broken unless this pass succeeds. A single stage gets nothing from other stages,
        # so it cannot mistake an old tensor for a new one.
        self._is_broken = self._group.size > 1
        # By micro-batch: what came from the stage before, what this stage made of it, and the
        # gradient of the one or the other that waits to be used or sent.
        inputs: dict[int, torch.Tensor] = {}
        outputs: dict[int, torch.Tensor] = {}
        gradients: dict[int, torch.Tensor] = {}
        for action in actions:
            if isinstance(action, Exchange):
                self._run_exchange(action, num_tokens, inputs, outputs, gradients, trains=trains)
                continue
            number = action.micro_batch
            if action.direction == "forward":
                hidden_1SD = inputs.get(number)
                if hidden_1SD is not None and trains:
                    hidden_1SD.requires_grad_()
                output = forward(number, hidden_1SD)
                if output is not None:
                    outputs[number] = output if self.is_last else output.float()
                del hidden_1SD, output
            else:
                torch.autograd.backward(outputs.pop(number), gradients.pop(number, None))
                if number in inputs:
                    gradient_1SD = inputs[number].grad
                    assert gradient_1SD is not None  # a leaf that the stage's output came from
                    gradients[number] = gradient_1SD
            if action.direction == "backward" or not trains:
                inputs.pop(number, None)
                done(number)
        self._finish_sends()
        self._is_broken = False

    def _run_exchange(
        self,
        action: Exchange,
        num_tokens: Sequence[int],
        inputs: dict[int, torch.Tensor],
        outputs: dict[int, torch.Tensor],
        gradients: dict[int, torch.Tensor],
        *,
        trains: bool,
    ) -> None:
        """Hidden states go to the next stage and gradients come from it; before, vice versa."""
        is_next = action.neighbour > self._group.index
        sent = received = None
        if action.send is not None and is_next:
            # While training, its graph stays here for the backward pass.
            sent = outputs[action.send].detach() if trains else outputs.pop(action.send)
        elif action.send is not None:
            sent = gradients.pop(action.send)
        if action.receive is not None:
            shape_1SD = (1, num_tokens[action.receive], self._width)
            received = torch.empty(shape_1SD, dtype=torch.float32, device=self.device)
            (gradients if is_next else inputs)[action.receive] = received
        self._exchange(action.neighbour, send=sent, receive=received)

    def _exchange(
        self, neighbour: int, *, send: torch.Tensor | None, receive: torch.Tensor | None
    ) -> None:
        """Posts both at once and waits for what is received; a send may still be under way."""
        group = self._group.process_group
        peer = self._peers[neighbour]
        operations = []
        if send is not None:
            send = send.contiguous()
            operations.append(dist.P2POp(dist.isend, send, peer, group))
        if receive is not None:
            operations.append(dist.P2POp(dist.irecv, receive, peer, group))
        works = dist.batch_isend_irecv(operations)
        if receive is not None:
            # Last posted; a back end that groups gives one work for all.
            works[-1].wait()
        if send is not None:
            self._sent.append((works[0], send))  # the buffer must live until it is sent
        while self._sent and self._sent[0][0].is_completed():
            self._finish_oldest_send()

    def _finish_sends(self) -> None:
        while self._sent:
            self._finish_oldest_send()

    def _finish_oldest_send(self) -> None:
        work, _ = self._sent.popleft()
        work.wait()
