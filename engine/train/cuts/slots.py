"""Cuts: the whole state of a trainer after a step, in slots of shared memory.

A cut is for going on after a crash, on the same host, with the same layout. What is to last, or to
be loaded by another layout, is a checkpoint (`state.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rolemesh.engine.hardware.pinned_memory import pin
from rolemesh.engine.train.cuts.copies import CutCopies, CutCopyError, Progress
from rolemesh.engine.train.cuts.format import (
    WEIGHTS,
    CutHeader,
    CutMismatchError,
    CutPlan,
    check_header,
    encoded,
    parsed,
)
from rolemesh.engine.train.optimizers.host_moments import STATE_NAMES
from rolemesh.engine.train.randomness import restore_random_state
from rolemesh.engine.train.state import AVERAGE, TrainedWeights, TrainerState
from rolemesh.engine.transport.slots.slot_files import (
    NUM_SLOTS,
    SlotHeldError,
    SlotOwner,
    SlotRoomError,
)
from rolemesh.engine.transport.slots.slot_readers import SlotReaders
from rolemesh.engine.transport.slots.slots import Slot, read_header

if TYPE_CHECKING:
    from rolemesh.engine.train.optimizers.optimizer import Optimizer


class CutNotFoundError(LookupError):
    """There is no whole cut of that step."""


@dataclass(frozen=True, slots=True)
class RestoredCut:
    """What was put back beside weights and optimizer."""

    policy_version: int
    extra: dict[str, Any]
    """State that the caller had given, on this rank."""
    num_bytes: int
    """Of the tensors of all ranks."""


class CutSlots:
    """The slots of one rank of a run, while a process works on it. Owner: the compute thread.

    On a GPU a slot's memory is locked once, when it is first written, and the copies of a cut go on
    behind what the rank does next: `settle` comes before anything changes what is copied.

    Invariant: at any moment, also when the process is killed, a cut that was saved and whose slot
    is not being written is whole.

    Example::

        slots = CutSlots(SlotOwner("run", "actor", 0, 1), layout="pp=1,tp=1,...")
        trainer.save_cut(slots, 7, extra={}, progress=progress)
        trainer.restore_cut(slots, 7)  # in this process, or in one that came after it
        slots.close()  # the cuts stay
    """

    def __init__(self, owner: SlotOwner, layout: str, device: torch.device | str = "cpu") -> None:
        """Prepares; opens nothing yet.

        Args:
            owner: The rank.
            layout: Of training, as a cut says it.
            device: On which the rank trains.
        """
        self.owner = owner
        self.layout = layout
        self.device = torch.device(device)
        self.copies_behind = self.device.type != "cpu"
        """Whether the rank goes on while its state is copied."""
        self.readers = SlotReaders()
        """Threads that write checkpoints from slots."""
        self._open: dict[int, Slot] = {}
        self._unpin: dict[int, Callable[[], None]] = {}
        """Of the open slots whose memory is locked for the GPU."""
        self._copies: CutCopies | None = None
        """Those of the newest cut, while they go on."""
        self._waited_s = 0.0
        self._plan: CutPlan | None = None
        self._planned_for: dict[str, tuple[torch.Size, torch.dtype, bool, bool]] = {}

    def plan(self, weights: TrainedWeights) -> CutPlan:
        """Where everything lies in a slot; the same plan for the same model and optimizer."""
        shapes = {
            name: (
                weight.shape,
                weight.dtype,
                name in weights.orthogonalised,
                name in weights.average,
            )
            for name, weight in weights.tensors.items()
        }
        if self._plan is None or self._planned_for != shapes:
            self._plan, self._planned_for = CutPlan.of(weights), shapes
        return self._plan

    def reserve(self, num_bytes: int) -> Mapping[int, Slot]:
        """Takes all slots, and makes those that are missing or of another size.

        Raises:
            SlotHeldError: A process that still lives holds one.
            SlotRoomError: There is no room; slots that were there stay.
        """
        made: list[int] = []
        try:
            for index in range(NUM_SLOTS):
                slot = self._slot(index)
                if slot is not None and slot.num_bytes == num_bytes:
                    continue
                if slot is not None:
                    self._let_go(index)
                self._open[index] = Slot.create(self.owner, index, num_bytes)
                made.append(index)
        except BaseException:
            for index in made:
                self._open.pop(index).remove()
            raise
        for index, slot in self._open.items():
            if index not in self._unpin:
                self._unpin[index] = pin(slot.memory, self.device)
        return self._open

    def index_for(self, step: int) -> int:
        """The slot that the cut of a step takes: its own, else the one whose cut is older.

        A slot without a whole cut counts as the oldest.
        """
        held = {index: -1 if header is None else header.step for index, header in self._headers()}
        missing = [index for index in range(NUM_SLOTS) if index not in held]
        own = [index for index, known in held.items() if known == step]
        return (own or missing or [min(held, key=lambda index: held[index])])[0]

    def find(self, step: int) -> tuple[int, Slot, CutHeader]:
        """The whole cut of a step: the number of its slot, the slot and the header.

        Raises:
            CutNotFoundError: There is none.
            SlotHeldError: A process that still lives holds a slot.
        """
        for index, header in self._headers():
            if header is not None and header.step == step:
                return index, self._open[index], header
        held = [one.step for one in whole_cuts(self.owner, self.layout)]
        raise CutNotFoundError(
            f"rank {self.owner.rank} has no whole cut of step {step} of run "
            f"{self.owner.run_id!r} (it has those of steps {held}): go on from one that ListCuts "
            "names, or from a checkpoint"
        )

    def forget_after(self, step: int) -> None:
        """Drops cuts of later steps; their slots stay for the next ones."""
        for index, header in self._headers():
            if header is not None and header.step > step:
                self._open[index].clear()

    def begin(self, copies: CutCopies) -> None:
        """Begins to copy a cut: on a GPU behind what comes next, on a CPU at once.

        Raises:
            Exception: What `copies` raises; the cut is not whole then.
        """
        self._waited_s = 0.0
        if not self.copies_behind:
            copies.make()
            return
        self._copies = copies
        copies.begin(self.device)

    def settle(self) -> None:
        """Waits for the copies of the newest cut, which is whole then.

        Raises:
            CutCopyError: They failed, and there is no cut of that step.
        """
        if self._copies is not None:
            copies, self._copies = self._copies, None
            self._waited_s += copies.wait()

    @property
    def waited_s(self) -> float:
        """Seconds that were spent in waiting for the newest cut's copies after it was begun."""
        return self._waited_s

    def close(self) -> None:
        """Lets the slots go; the cuts stay. Ends whatever reads them first."""
        try:
            self.settle()
        finally:
            self.readers.give_up()
            for index in list(self._open):
                self._let_go(index)

    def _headers(self) -> Iterator[tuple[int, CutHeader | None]]:
        """What each slot that is there says; raises as `_slot`."""
        self.settle()
        for index in range(NUM_SLOTS):
            slot = self._slot(index)
            if slot is not None:
                yield index, parsed(slot.header())

    def _slot(self, index: int) -> Slot | None:
        """A slot; raises SlotHeldError where a process that still lives holds it."""
        known = self._open.get(index)
        if known is not None and not known.is_named:
            self._let_go(index)  # removed by hand
            known = None
        if known is None:
            known = Slot.open(self.owner, index)
            if known is not None:
                self._open[index] = known
        return known

    def _let_go(self, index: int) -> None:
        if index in self._unpin:
            self._unpin.pop(index)()
        self._open.pop(index).close()


def whole_cuts(owner: SlotOwner, layout: str) -> list[CutHeader]:
    """Reads which whole cuts a rank has that fit its layout, by ascending step; holds nothing."""
    headers = [parsed(read_header(owner, index)) for index in range(NUM_SLOTS)]
    found = [one for one in headers if one is not None and one.layout == layout]
    return sorted(found, key=lambda header: header.step)


def save_cut(slots: CutSlots, step: int, state: TrainerState, progress: Progress) -> int:
    """Copies a trainer's state into a slot; see `ModelInTraining.save_cut`."""
    plan = slots.plan(state.weights)
    held = {WEIGHTS: state.weights.tensors, **state.optimizer}
    if state.weights.average:
        held[AVERAGE] = state.weights.average
    total = sum(tensor.nbytes for tensors in held.values() for tensor in tensors.values())

    def reserve() -> tuple[Slot, int]:
        index = slots.index_for(step)
        if slots.readers.is_read(index):
            raise SlotHeldError(
                f"the cut of step {step} takes the place of one that is being written as a "
                "checkpoint: save it once SaveCheckpoint has answered"
            )
        return slots.reserve(plan.num_bytes)[index], total

    slot, totals = state.weights.peers.agree(reserve, (SlotRoomError, SlotHeldError, CutCopyError))
    slot.clear()
    random_tensors, random = state.random
    header = CutHeader(
        format="rolemesh-cut-1",
        run_id=slots.owner.run_id,
        kind=state.kind,
        step=step,
        policy_version=state.policy_version,
        layout=slots.layout,
        rank=slots.owner.rank,
        optimizer_steps=state.optimizer_steps,
        num_bytes=total,
        tensors={
            group: {name: plan.entries[group][name] for name in tensors}
            for group, tensors in held.items()
        },
        extra=dict(state.extra),
        random_tensors={
            name: generator.numpy().tobytes().hex() for name, generator in random_tensors.items()
        },
        random=dict(random),
        base=None if state.weights.base is None else state.weights.base.facts(),
    )
    text = encoded(header.model_dump())
    if len(text) > plan.text_bytes:
        raise ValueError(
            f"the state beside the tensors takes {len(text)} bytes, and a cut has room for "
            f"{plan.text_bytes}: keep less in the role's extra state"
        )
    pairs = [
        (plan.places[group][name].view(slot.memory), tensor)
        for group, tensors in held.items()
        for name, tensor in tensors.items()
    ]
    slots.begin(CutCopies(step, pairs, partial(slot.finish, text), progress))
    return sum(totals)


def restore_cut(
    slots: CutSlots,
    step: int,
    kind: str,
    weights: TrainedWeights,
    optimizer: Optimizer,
    *,
    keeps_later: bool,
) -> RestoredCut:
    """Puts the cut of a step back, in place; see `ModelInTraining.restore_cut`.

    Everything is checked before anything changes.
    """

    def check() -> tuple[tuple[Slot, CutHeader], list[int]]:
        _, slot, header = checked_cut(slots, step, kind, weights)
        if weights.base is not None and (refusal := weights.base.refusal(header.base)):
            raise CutMismatchError(f"the cut of step {step} {refusal}")
        return (slot, header), [header.policy_version, header.num_bytes]

    (slot, header), facts = weights.peers.agree(
        check, (CutNotFoundError, CutMismatchError, SlotHeldError, CutCopyError)
    )
    versions = [version for version, _ in facts]
    if len(set(versions)) > 1:
        raise CutMismatchError(
            f"the ranks hold cuts of step {step} at the versions {versions}: go on from a "
            "checkpoint"
        )
    held = views_of(slots, slot, header, weights)
    with torch.no_grad():
        for group, tensors in ((WEIGHTS, weights.tensors), (AVERAGE, weights.average)):
            for name, tensor in tensors.items():
                tensor.copy_(held[group][name])
    optimizer.restore({name: held[name] for name in STATE_NAMES}, header.optimizer_steps)
    restore_random_state(*random_state_of(header))
    if not keeps_later:
        slots.forget_after(step)
    return RestoredCut(
        header.policy_version, header.extra, sum(num_bytes for _, num_bytes in facts)
    )


def checked_cut(
    slots: CutSlots, step: int, kind: str, weights: TrainedWeights
) -> tuple[int, Slot, CutHeader]:
    """The whole cut of a step, if it is of this model: as `CutSlots.find` gives it.

    Args:
        slots: Of this rank.
        step: Of the cut.
        kind: "policy", "critic" or "reward", which must be the cut's.
        weights: The model's own.

    Raises:
        CutNotFoundError: There is no whole cut of that step.
        CutMismatchError: It is of another model, layout or kind.
        SlotHeldError: A process that still lives holds the slot.
    """
    plan = slots.plan(weights)
    index, slot, header = slots.find(step)
    check_header(header, plan, kind, slots.layout, step)
    if slot.num_bytes != plan.num_bytes:
        raise CutMismatchError(
            f"the cut of step {step} takes {slot.num_bytes} bytes, but the state of this "
            f"model takes {plan.num_bytes}: restore it with the version, and the type of "
            "optimizer that saved it"
        )
    return index, slot, header


def views_of(
    slots: CutSlots, slot: Slot, header: CutHeader, weights: TrainedWeights
) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a checked cut where they lie in its slot, by group and name."""
    places = slots.plan(weights).places
    return {
        group: {name: places[group][name].view(slot.memory) for name in names}
        for group, names in header.tensors.items()
    }


def random_state_of(header: CutHeader) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The generators of a cut, as `capture_random_state` gave them."""
    tensors = {
        name: torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
        for name, state in header.random_tensors.items()
    }
    return tensors, header.random
