"""A cut that a thread writes as a checkpoint while the compute thread goes on training.

No collective operation is needed: each rank writes its part of the checkpoint from its own slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rolemesh.engine.parallel.agreement import Peers
from rolemesh.engine.specs import AnyOptimizerSpec
from rolemesh.engine.train.cuts.format import WEIGHTS
from rolemesh.engine.train.cuts.slots import CutSlots, checked_cut, random_state_of, views_of
from rolemesh.engine.train.optimizers.host_moments import STATE_NAMES
from rolemesh.engine.train.state import AVERAGE, TrainedWeights, TrainerState
from rolemesh.engine.transport.slots.slot_readers import SlotReading
from rolemesh.engine.weights.checkpoints.writing import OtherParts, Progress, write_part


@dataclass(frozen=True, slots=True)
class HeldCut:
    """A cut that stays as it is until one of its methods has returned. One is called, once.

    Owner: the thread that calls it.
    """

    rank: int
    state: TrainerState
    _reading: SlotReading

    def write(self, directory: Path, others: OtherParts | None, progress: Progress) -> None:
        """Writes the checkpoint, as rank 0 or a rank that is alone; see `write_checkpoint`.

        Args:
            directory: Must not exist.
            others: Has ranks 1, 2, ... write their parts; None where there are none.
            progress: Told of this rank's files.

        Raises:
            SlotGivenUpError: The slots are let go; there is no checkpoint.
        """
        with self._read(progress) as checked:
            self.state.write(directory, others=others, progress=checked)

    def write_part(self, folder: Path, progress: Progress) -> None:
        """Writes the part of rank 1, 2, ... into a folder that rank 0 made; see `write_part`.

        Args:
            folder: That rank 0 made.
            progress: Told of this rank's files.

        Raises:
            SlotGivenUpError: The slots are let go; the part is not whole.
        """
        with self._read(progress) as checked:
            write_part(
                folder,
                self.state.groups(),
                rank=self.rank,
                random=self.state.random,
                progress=checked,
            )

    @contextmanager
    def _read(self, progress: Progress) -> Iterator[Progress]:
        """Progress that also ends the reader when it is given up."""

        def checked(stage: str, done: int, total: int) -> None:
            self._reading.check()
            progress(stage, done, total)

        try:
            yield checked
        finally:
            self._reading.end()


def hold_cut(
    slots: CutSlots,
    *,
    step: int,
    kind: str,
    weights: TrainedWeights,
    optimizer_spec: AnyOptimizerSpec,
) -> HeldCut:
    """Holds the cut of a step; see `ModelInTraining.hold_cut`.

    On the compute thread, so that none is being saved meanwhile. Of the weights and their average,
    shapes and layout are taken; the spec is what the checkpoint is to say of the optimizer.
    """
    index, slot, header = checked_cut(slots, step, kind, weights)
    held = views_of(slots, slot, header, weights)
    state = TrainerState(
        kind=kind,
        weights=replace(
            weights, tensors=held[WEIGHTS], peers=Peers.alone(), average=held.get(AVERAGE, {})
        ),
        optimizer={name: held[name] for name in STATE_NAMES},
        optimizer_steps=header.optimizer_steps,
        optimizer_spec=optimizer_spec,
        policy_version=header.policy_version,
        extra=header.extra,
        random=random_state_of(header),
    )
    return HeldCut(slots.owner.rank, state, slots.readers.begin(index))
