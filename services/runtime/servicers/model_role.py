"""Base of every trained role: its trainer, and the trainer's state over the life of a run."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import torch

from rolemesh.engine.granted.own_functions import OwnFunctions
from rolemesh.engine.layout.manifest import Manifest
from rolemesh.engine.specs import AnyOptimizerSpec
from rolemesh.engine.train.cuts.slots import CutSlots
from rolemesh.engine.train.randomness import seed_random_state
from rolemesh.engine.transport.slots.slot_files import SlotOwner
from rolemesh.engine.transport.slots.slots import remove_slots
from rolemesh.services.runtime.calls.role import InitializeResult, Role
from rolemesh.services.runtime.experience.published_weights import PublishedWeights
from rolemesh.services.runtime.ranks.device import rank_device

if TYPE_CHECKING:
    from rolemesh.engine.rollout.agreement.probe import ProbeScores
    from rolemesh.engine.train.model_in_training import TrainedModel
    from rolemesh.engine.train.trainer import Trainer

logger = logging.getLogger(__name__)


class ModelRole(Role):
    """A role that holds a Trainer."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self.run_seed = 0
        self.extra_state: dict[str, Any] = {}
        """JSON-able state that is part of the checkpoint, e.g. the KL controller's."""
        self.own_functions = OwnFunctions()
        """Functions of the user that losses and estimators may be."""
        self.published = PublishedWeights()
        """The copy of the weights that others may fetch."""
        self._cut_slots: CutSlots | None = None
        self._last_cut_run = ""
        """Run of which this process has held cuts last."""

    @property
    def trainer(self) -> Trainer:
        """The trainer; raises NOT_INITIALIZED before Initialize."""
        return self.initialized(self._trainer)

    def train_with(
        self,
        model: TrainedModel,
        optimizer: AnyOptimizerSpec,
        run_seed: int,
        *,
        average: float | None = None,
    ) -> InitializeResult:
        """Makes the trainer of a model that was just loaded; see `ModelInTraining`."""
        # Here: a reward that is not trained is a role of this kind too, and holds no model.
        from rolemesh.engine.train.trainer import Trainer

        self.run_seed = run_seed
        # What draws from the process's own generators, and their state in a checkpoint, depends on
        # the run alone.
        seed_random_state("training", run_seed, self.name, model.mesh.rank)
        self._trainer = Trainer(model, optimizer, average=average)
        return InitializeResult(
            policy_version=self._trainer.policy_version,
            num_parameters=num_parameters(model),
        )

    replays_routes = False
    """Whether a mixture scores and trains rows by the experts that they were sampled with."""

    @property
    def manifest(self) -> Manifest:
        """All parameters that the trainer changes, whatever part of them this rank holds."""
        shape = self.trainer.model.shape
        if self.trainer.mesh.world.size == 1 or shape is None:
            return self.trainer.weights_layout.manifest
        return shape.trained_manifest("float32")

    def probe_scores(self) -> ProbeScores | None:
        """What the weights give a row, by which a sampler is checked; None: none samples with them.

        On the compute thread; all ranks call it together.
        """
        return None

    def policy_version(self) -> int:
        """Version of the weights; 0 before Initialize."""
        return 0 if self._trainer is None else self._trainer.policy_version

    def weights_replaced(self) -> None:
        """Told after a checkpoint or a cut came back: equal versions may be other weights now."""

    def cut_slots(self, owner: SlotOwner) -> CutSlots:
        """The slots of a rank in the run; opened on first use and kept until the run ends."""
        if self._cut_slots is None or self._cut_slots.owner != owner:
            self.take_place_of_earlier_run(owner.run_id)
            self._cut_slots = CutSlots(
                owner, self.trainer.mesh.layout.train.flag(), self.trainer.model.device
            )
        return self._cut_slots

    def settle_cut(self) -> None:
        """Returns when the newest cut is whole, whose copies may have gone on behind."""
        if self._cut_slots is not None:
            self._cut_slots.settle()

    def take_place_of_earlier_run(self, run_id: str) -> None:
        """Lets the slots go, and removes those of another run that this process held before.

        That run was given up when this one came, has its checkpoints, and two runs' cuts may be
        more than the host has memory for.
        """
        self.close_cut_slots()
        if self._last_cut_run not in ("", run_id):
            for name in remove_slots(self._last_cut_run, self.name):
                logger.warning("removed %s, a cut of run %s", name, self._last_cut_run)
        self._last_cut_run = run_id

    def close_cut_slots(self) -> None:
        """Lets the slots go; their files stay."""
        if self._cut_slots is not None:
            self._cut_slots.close()
            self._cut_slots = None

    def start_over(self) -> None:
        """Drops gradients and published weights."""
        if self._trainer is not None:
            self._trainer.drop_gradients()
            # The work that was given up may have been on the way to the sampler.
            self.weights_replaced()
        self.published.close()

    def sleep(self) -> int:
        """Moves weights and optimizer state to host memory."""
        return self.trainer.move_to(torch.device("cpu"))

    def wake(self) -> int:
        """Brings weights and optimizer state back."""
        return self.trainer.move_to(rank_device())

    def close(self) -> None:
        """Drops weights and optimizer state."""
        self._trainer = None
        self.extra_state = {}
        self.own_functions = OwnFunctions()
        self.published.end()
        self.close_cut_slots()


def num_parameters(model: TrainedModel) -> int:
    """Parameters of the whole model, whatever part of it this rank holds."""
    if model.shape is None:
        return sum(parameter.numel() for parameter in model.parameters())
    manifest = model.shape.manifest("float32")
    return sum(math.prod(parameter.shape) for parameter in manifest.values())
