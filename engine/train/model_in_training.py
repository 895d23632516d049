"""A model in training with its optimizer: how its weights are moved, saved, loaded and exported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from rolemesh.engine.layout.boxes import train_layout, whole_layout
from rolemesh.engine.layout.manifest import WeightLayout
from rolemesh.engine.models.adapters.adapter_files import TaskType, adapter_config
from rolemesh.engine.models.adapters.base_identity import BaseIdentity
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.folder import maker_without_values
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.models.scoring_model import ScoringModel
from rolemesh.engine.parallel.agreement import Peers
from rolemesh.engine.parallel.data_parallel import local_part
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.sleep_memory import SleepMemory, move_module
from rolemesh.engine.specs import AnyOptimizerSpec, ComputeDtype
from rolemesh.engine.train import state as trainer_state
from rolemesh.engine.train.cuts import slots as cut_slots
from rolemesh.engine.train.cuts.reader import HeldCut, hold_cut
from rolemesh.engine.train.cuts.slots import CutSlots, RestoredCut
from rolemesh.engine.train.expert_loads import ExpertLoads
from rolemesh.engine.train.optimizers.average import WeightAverage
from rolemesh.engine.train.optimizers.gradients import Gradients
from rolemesh.engine.train.optimizers.host_moments import STATE_NAMES
from rolemesh.engine.train.optimizers.optimizer import Optimizer
from rolemesh.engine.train.randomness import capture_random_state
from rolemesh.engine.train.state import TrainedWeights, TrainerState
from rolemesh.engine.weights.checkpoints.export import (
    gathered,
    write_adapter_folder,
    write_model_folder,
)
from rolemesh.engine.weights.sharded_tensors import ShardedTensors, tensors_manifest

TrainerKind = Literal["policy", "critic", "reward"]
_TASKS: dict[TrainerKind, TaskType] = {
    "policy": "CAUSAL_LM",
    "critic": "TOKEN_CLS",
    "reward": "SEQ_CLS",
}
"""What PEFT calls the models of a trainer."""
TrainedModel = CausalLm | ScoringModel


def kind_of(model: TrainedModel) -> TrainerKind:
    """What a trainer of this model is called, also in its checkpoints."""
    if isinstance(model, CausalLm):
        return "policy"
    return "critic" if model.head_spec.per == "token" else "reward"


def check_balancing(model: TrainedModel) -> None:
    """Raises ValueError where a model is to be balanced that has no bias of experts to move."""
    if model.spec.balancing is None:
        return
    shape = model.shape
    if shape is None or not any(part.is_buffer for part in shape.record.parts):
        raise ValueError(
            "model.balancing is given, but the router of this model has no bias of experts (that "
            "of glm4_moe has): leave it out"
        )
    if model.spec.adapter is not None:
        raise ValueError(
            "model.balancing is given beside model.adapter, but the bias of experts belongs to the "
            "base, which an adapter leaves as it is: leave one of the two out"
        )


class GradientPendingError(RuntimeError):
    """A checkpoint was asked for between forward_backward and optim_step."""


class ModelInTraining:
    """A model with its optimizer: its weights and moments, which can be moved, saved and exported.

    `Trainer` adds what changes the weights. Owned by the rank's compute thread.

    Invariant: weights, moments, `policy_version` and the average, where one is wanted, belong
    together, in memory and in a checkpoint.
    Accumulated gradients are in no checkpoint and move nowhere: with them `save` and `move_to`
    refuse.
    """

    def __init__(
        self, model: TrainedModel, optimizer: AnyOptimizerSpec, *, average: float | None = None
    ) -> None:
        """Takes a model that was just loaded.

        Args:
            model: Trainable.
            optimizer: Of its weights.
            average: Part of the moving average of its weights that a step leaves; None: no
                average is kept.

        Raises:
            ValueError: Loads of experts are to be balanced, which the model's router does not let.
        """
        check_balancing(model)
        self.kind = kind_of(model)
        self.model = model
        self.rank_model = RankModel(model)
        self.policy_version = 0
        self._gradients = Gradients(self.rank_model)
        self._optimizer = Optimizer(optimizer, self._gradients)
        self._average = None if average is None else WeightAverage(average, self._changing_weights)
        self._has_gradient = False
        self._expert_loads = None if model.routers is None else ExpertLoads(model)
        self._sleep_memory = SleepMemory()
        adapter = model.spec.adapter
        self._base: BaseIdentity | None = None
        # An estimate saves nothing, and would wait for the end of all files.
        if adapter is not None and self.mesh.rank == 0 and maker_without_values() is None:
            self._base = BaseIdentity(model.spec.path, scale=adapter.scale)
        self._cut_slots: CutSlots | None = None
        """Those of the newest cut, whose copies may still go on."""

    @property
    def mesh(self) -> RankMesh:
        """This rank's place."""
        return self.rank_model.mesh

    def drop_gradients(self) -> None:
        """Forgets accumulated gradients, and what was counted with them."""
        self._gradients.drop()
        self._has_gradient = False
        if self._expert_loads is not None:
            self._expert_loads.forget()

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Trained weights by Hugging Face name, float32, detached, tied ones once. Not copies.

        Buffers that are in the model's files come last. With an adapter they are its factors, and a
        score head. With many ranks: this rank's parts, which are those of
        `layout.boxes.train_layout`. Some may be empty.
        """
        yield from self._changing_weights().items()
        yield from self.model.saved_buffers()

    def averaged_weights(self) -> Mapping[str, torch.Tensor]:
        """The moving average of `named_weights` without the buffers; empty where none is kept."""
        return {} if self._average is None else self._average.tensors

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Has the model score with the average of its weights meanwhile.

        With many ranks all of them call it.

        Raises:
            ValueError: No average is kept.
        """
        if self._average is None:
            raise ValueError(
                "no average of these weights is kept: give the actor teacher.average when it is "
                "initialised"
            )
        # Copies of a cut may still read the weights.
        self._settle_cut()
        with self._average.in_place_of_weights():
            yield

    @cached_property
    def weights_layout(self) -> WeightLayout:
        """What each rank holds of `named_weights`."""
        if self.mesh.world.size == 1:
            buffers = dict(self.model.saved_buffers())
            return whole_layout(tensors_manifest(dict(self.named_weights()), buffers))
        assert self.model.shape is not None  # the loader of a model of several ranks sees to it
        return train_layout(self.model.shape, self.mesh.layout.train, trained_only=True)

    def optimizer_state(self, name: str) -> dict[str, torch.Tensor]:
        """A moment or step count (one of STATE_NAMES) by weight; see `Optimizer.state`.

        Moments are cut as `named_weights` are.
        """
        return self._optimizer.state(name)

    def move_to(self, device: torch.device) -> int:
        """Moves weights and optimizer state, e.g. to host memory while another role computes.

        Returns:
            Bytes that changed places; 0 when they were there already.

        Raises:
            GradientPendingError: Gradients are accumulated, which would stay behind.
        """
        self._refuse_pending("sleep")
        self._settle_cut()
        moved = move_module(self.rank_model, device, self._sleep_memory)
        self.model.device = device
        moved += self._optimizer.move_to(device)
        return moved + (0 if self._average is None else self._average.move_to(device))

    def save(self, directory: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Writes a checkpoint: weights, average, optimizer, schedule, random state, policy_version.

        With many ranks all of them call it, each writes its part, and any layout can load it.

        Args:
            directory: Must not exist; on a disk that all ranks see. It is on disk and whole when
                this returns.
            extra: JSON-able state of the caller, returned by `load`; rank 0's is kept.

        Raises:
            GradientPendingError: Gradients are accumulated, which a checkpoint does not hold.
            CheckpointRoomError: The disk has no room; nothing has the name.
            FolderExistsError: The directory exists.
            RuntimeError: Another rank failed (its number and cause); nothing has the name.
        """
        self._refuse_pending("save")
        self._state(extra or {}).write(Path(directory))

    def load(self, directory: Path) -> dict[str, Any]:
        """Takes over a checkpoint, whole or not at all; training goes on bit for bit.

        With many ranks all of them call it; the layout need not be the one that saved.

        Returns:
            The extra state given to `save`.

        Raises:
            ValueError: There is no checkpoint, or it belongs to another model or role. As the
                next, on all ranks alike.
            CheckpointCorruptError: A file is missing, cut or changed; names it.
        """
        self.drop_gradients()
        self._settle_cut()
        self.policy_version, extra = trainer_state.load(
            Path(directory),
            kind=self.kind,
            weights=self._trained_weights(),
            optimizer=self._optimizer,
        )
        return extra

    def save_cut(
        self,
        slots: CutSlots,
        step: int,
        extra: Mapping[str, Any],
        progress: Callable[[str, int, int], None],
    ) -> int:
        """Copies what a checkpoint holds into shared memory that outlives the process.

        With many ranks all of them call it. On a GPU it returns when the copies are queued: the cut
        has the state of this moment, and is whole when they have come, before anything changes the
        state. Until then, and if the process ends first, the older cut is the newest whole one.

        Args:
            slots: Of this rank.
            step: That the state comes after; names the cut.
            extra: JSON-able state of the caller, of this rank.
            progress: Called with bytes done and in all; if it raises, there is no cut of the step.

        Returns:
            Bytes of the cut over all ranks.

        Raises:
            GradientPendingError: Gradients are accumulated, which a cut does not hold.
            SlotRoomError: There is no room on some rank; raised on all, and older cuts stay.
            SlotHeldError: A process that still lives holds a slot of some rank, or the slot is
                being written as a checkpoint; raised on all.
            CutCopyError: The copies of the cut before failed on some rank; raised on all.
        """
        self._refuse_pending("a cut is saved")
        self._cut_slots = slots
        return cut_slots.save_cut(slots, step, self._state(extra), progress)

    def restore_cut(self, slots: CutSlots, step: int, *, keeps_later: bool = False) -> RestoredCut:
        """Takes over a cut, whole or not at all; training goes on bit for bit.

        With many ranks all of them call it.

        Args:
            slots: Of this rank.
            step: Of the cut.
            keeps_later: Whether cuts of later steps stay; else they are dropped.

        Raises:
            CutNotFoundError: A rank has no whole cut of that step. As the next, on all ranks alike.
            CutMismatchError: The cut is of another model, layout or kind.
            SlotHeldError: A process that still lives holds a slot of some rank.
        """
        restored = cut_slots.restore_cut(
            slots,
            step,
            self.kind,
            self._trained_weights(),
            self._optimizer,
            keeps_later=keeps_later,
        )
        self.drop_gradients()
        self.policy_version = restored.policy_version
        return restored

    def hold_cut(self, slots: CutSlots, step: int) -> HeldCut:
        """Holds a cut, which another thread is to write as a checkpoint. Changes nothing here.

        With many ranks each calls it for itself.

        Args:
            slots: Of this rank.
            step: Of the cut.

        Raises:
            CutNotFoundError: This rank has no whole cut of that step.
            CutMismatchError: The cut is of another model, layout or kind.
            SlotHeldError: A process that still lives holds a slot.
        """
        return hold_cut(
            slots,
            step=step,
            kind=self.kind,
            weights=self._trained_weights(),
            optimizer_spec=self._optimizer.spec,
        )

    def export(self, directory: Path, dtype: ComputeDtype | None = None) -> None:
        """Writes a Hugging Face folder, tokenizer included; replaces an older one whole.

        With an adapter it is the adapter's alone, in PEFT's format. Else a policy is saved as a
        causal LM, a critic as a token classifier with one label, a reward model as a sequence
        classifier. With many ranks all of them call it, and the files do not depend on the layout.

        Args:
            directory: The folder, on a disk that all ranks see.
            dtype: Type of the saved weights; None: bfloat16, but float32 for an adapter, and for a
                reward model, whose scores are then those that it gives here.
        """
        weights = self._trained_weights()
        if self.model.spec.adapter is not None:
            sharded = ShardedTensors(weights.layout, weights.tensors)
            write_adapter_folder(
                Path(directory),
                config=adapter_config(
                    self.model.spec.adapter,
                    self.model.adapter_targets,
                    self.model.spec.path,
                    _TASKS[self.kind],
                ),
                manifest=weights.layout.manifest,
                parameters=gathered(sharded, dtype or "float32", self.mesh),
                source=self.model.spec.path,
                peers=weights.peers,
            )
            return
        if dtype is None:
            dtype = "float32" if self.kind == "reward" else "bfloat16"
        write_model_folder(
            Path(directory),
            config=self.model.config,
            architecture=type(self.model.lm).__name__,
            manifest=weights.layout.manifest,
            parameters=gathered(ShardedTensors(weights.layout, weights.tensors), dtype, self.mesh),
            source=self.model.spec.path,
            shape=self.model.shape,
            dtype=dtype,
            peers=weights.peers,
        )

    def _settle_cut(self) -> None:
        """Comes before anything changes weights or moments, or gives their memory back."""
        if self._cut_slots is not None:
            self._cut_slots.settle()

    def _refuse_pending(self, what: str) -> None:
        if self._has_gradient:
            raise GradientPendingError(
                f"gradients are accumulated: call optim_step or drop_gradients before {what}"
            )

    def _changing_weights(self) -> dict[str, torch.Tensor]:
        """Those of `named_weights` that training changes, where they lie now."""
        return {name: local_part(weight.detach()) for name, weight in self.model.trained_weights()}

    def _trained_weights(self) -> TrainedWeights:
        peers = Peers.of(self.mesh.world, self.model.device)
        return TrainedWeights(
            dict(self.named_weights()),
            self.weights_layout,
            peers,
            self._base,
            self.model.spec.adapter,
            self._optimizer.orthogonalised,
            self.averaged_weights(),
        )

    def _state(self, extra: Mapping[str, Any]) -> TrainerState:
        return TrainerState(
            kind=self.kind,
            weights=self._trained_weights(),
            optimizer={name: self._optimizer.state(name) for name in STATE_NAMES},
            optimizer_steps=self._optimizer.num_steps,
            optimizer_spec=self._optimizer.spec,
            policy_version=self.policy_version,
            extra=extra,
            random=capture_random_state(),
        )
