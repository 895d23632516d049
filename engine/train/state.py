"""Contents of a trainer's checkpoint, and how they are put back, on one rank or many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from rolemesh.engine.layout.manifest import Manifest, RankShard, WeightLayout
from rolemesh.engine.models.adapters.base_identity import BaseIdentity
from rolemesh.engine.parallel.agreement import Peers
from rolemesh.engine.specs import AdapterSpec, AnyOptimizerSpec
from rolemesh.engine.train.optimizers.host_moments import MOMENTS, STATE_NAMES, keeps
from rolemesh.engine.train.randomness import restore_random_state, seed_random_state
from rolemesh.engine.weights.checkpoints.checkpoint import (
    SHARED_ERRORS,
    CheckpointMismatchError,
    CheckpointReader,
    RandomState,
    open_checkpoint,
)
from rolemesh.engine.weights.checkpoints.disk_layout import (
    scalar_layout,
    scalar_shard,
    tensor_parameters,
)
from rolemesh.engine.weights.checkpoints.writing import (
    OtherParts,
    Progress,
    silent,
    write_checkpoint,
)
from rolemesh.engine.weights.copies import Copy
from rolemesh.engine.weights.sharded_tensors import ShardedTensors

if TYPE_CHECKING:
    from rolemesh.engine.train.optimizers.optimizer import Optimizer

AVERAGE = "average"
"""Group of a checkpoint, and of a cut: the moving average of the weights, where one is kept."""

_States: TypeAlias = dict[str, dict[str, torch.Tensor]]
"""What the optimizer keeps on this rank, by one of STATE_NAMES and by tensor."""

_Checked: TypeAlias = tuple[CheckpointReader, list[Copy], list[Copy], _States, RandomState | None]
"""A checkpoint; where weights and their average come from; the optimizer's; the generators."""


@dataclass(frozen=True, slots=True)
class TrainedWeights:
    """A trainer's weights, and where this rank's parts of them stand in the model."""

    tensors: Mapping[str, torch.Tensor]
    """This rank's: float32, by Hugging Face name; some may be empty."""
    layout: WeightLayout
    """What each rank holds."""
    peers: Peers
    """The ranks."""
    base: BaseIdentity | None = None
    """On rank 0, what an adapter stands on; None where all weights are trained."""
    adapter: AdapterSpec | None = None
    """What adapter the weights are; None where all weights are trained."""
    orthogonalised: frozenset[str] = frozenset()
    """Those of the whole model that Muon steps."""
    average: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """This rank's part of their moving average, float32, by name; empty where none is kept."""

    def keeps(self, tensor: str, name: str) -> bool:
        """Whether the optimizer keeps one of STATE_NAMES for a weight."""
        return keeps(tensor in self.orthogonalised, name)

    def moments_layout(self, name: str) -> WeightLayout:
        """Layout of what the optimizer keeps for each weight that has it: one of STATE_NAMES."""
        layout = self.layout
        if self.orthogonalised:
            layout = layout.of(lambda parameter: self.keeps(parameter, name))
        return layout if name in MOMENTS else scalar_layout(layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What a checkpoint says of a trainer, as one rank has it: live, or in a cut."""

    kind: str
    """ "policy", "critic" or "reward"."""
    weights: TrainedWeights
    optimizer: Mapping[str, Mapping[str, torch.Tensor]]
    """By one of STATE_NAMES and by weight: float32, shaped as `Optimizer.state` says."""
    optimizer_steps: int
    optimizer_spec: AnyOptimizerSpec
    policy_version: int
    extra: Mapping[str, Any]
    """JSON-able state of the caller; rank 0's is kept."""
    random: RandomState

    def groups(self) -> dict[str, ShardedTensors]:
        """The tensors, as they are written."""
        weights = self.weights
        groups = {"weights": ShardedTensors(weights.layout, weights.tensors)}
        kept = {f"optimizer-{name}": self.optimizer[name] for name in STATE_NAMES}
        layouts = {f"optimizer-{name}": weights.moments_layout(name) for name in STATE_NAMES}
        if weights.average:
            kept[AVERAGE], layouts[AVERAGE] = weights.average, weights.layout
        for group, tensors in kept.items():
            # A weight of which this rank has no element has nothing that could be stepped.
            some = {name: one for name, one in tensors.items() if weights.tensors[name].numel()}
            groups[group] = ShardedTensors(layouts[group], some)
        return groups

    def values(self) -> dict[str, Any]:
        """The rest, as it is written."""
        return {
            "kind": self.kind,
            "policy_version": self.policy_version,
            # The schedule is a function of the spec and this count.
            "optimizer_steps": self.optimizer_steps,
            "optimizer": self.optimizer_spec.model_dump(mode="json"),
            "extra": dict(self.extra),
            **self._adapter_values(),
        }

    def _adapter_values(self) -> dict[str, Any]:
        """What an adapter is, and stands on: with them a checkpoint can be exported by itself."""
        base, adapter = self.weights.base, self.weights.adapter
        if base is None or adapter is None:
            return {}
        # Where its first values came from is over.
        spec = adapter.model_dump(mode="json", exclude={"start"})
        return {"base": base.facts(), "adapter": spec}

    def write(
        self, directory: Path, *, others: OtherParts | None = None, progress: Progress = silent
    ) -> None:
        """Writes the checkpoint; see `write_checkpoint`, also for who calls it."""
        write_checkpoint(
            directory,
            self.groups(),
            self.values(),
            random=self.random,
            peers=self.weights.peers,
            others=others,
            progress=progress,
        )


def load(
    directory: Path,
    *,
    kind: str,
    weights: TrainedWeights,
    optimizer: Optimizer,
) -> tuple[int, dict[str, Any]]:
    """Puts a checkpoint back, in place; everything is checked before anything changes.

    All ranks call it, of whatever layout: each reads its own parts. Rank r takes the random
    generators of the rank r that saved; ranks beyond those have new ones, seeded by checkpoint and
    rank.

    Args:
        directory: That `TrainerState.write` wrote.
        kind: "policy" or "critic", which must be the checkpoint's.
        weights: The model's own, written in place with their average; without one, that of the
            checkpoint is left alone.
        optimizer: Gets moments and counts. Its spec stays: a run may go on with another rate.

    Returns:
        policy_version and extra.

    Raises:
        ValueError: No checkpoint, or another model's. As the next: on all ranks alike.
        CheckpointCorruptError: A file is missing, cut or changed.
    """
    rank = weights.peers.rank

    # A weight of which this rank has no element has no average.
    average = {name: one for name, one in weights.average.items() if one.numel()}

    def check() -> tuple[_Checked, str]:
        """Checks all that this rank will read, and reads all but the weights and their average."""
        checkpoint = open_checkpoint(directory)
        check_fits(checkpoint, kind, weights.layout.manifest)
        check_base(checkpoint, weights.base)
        _check_optimizer(checkpoint, weights, optimizer.spec)
        ShardedTensors(weights.layout, weights.tensors).check(rank)
        shard = weights.layout.ranks[rank]
        copies = _verified_copies(checkpoint, "weights", shard, weights.tensors)
        averages: list[Copy] = []
        if weights.average:
            _check_average(checkpoint)
            averages = _verified_copies(checkpoint, AVERAGE, shard, average)
        states = {name: _read_optimizer(checkpoint, name, weights) for name in STATE_NAMES}
        return (checkpoint, copies, averages, states, checkpoint.random(rank)), checkpoint.sha256

    (checkpoint, copies, averages, states, random), digests = weights.peers.agree(
        check, (*SHARED_ERRORS, ValueError)
    )
    if len(set(digests)) > 1:
        raise CheckpointMismatchError(
            f"the ranks see {len(set(digests))} different checkpoints under {str(directory)!r}: "
            "give a directory on a disk that all ranks share"
        )
    state = checkpoint.state
    checkpoint.read("weights", copies, weights.tensors)
    if averages:
        checkpoint.read(AVERAGE, averages, average)
    optimizer.restore(states, state["optimizer_steps"])
    if random is None:
        seed_random_state(checkpoint.sha256, rank)
    else:
        restore_random_state(dict(random[0]), dict(random[1]))
    return int(state["policy_version"]), dict(state["extra"])


def check_fits(checkpoint: CheckpointReader, kind: str, own: Manifest) -> None:
    """Raises CheckpointMismatchError unless the checkpoint is of this role and this model.

    Args:
        checkpoint: The one to load.
        kind: "policy" or "critic".
        own: The model's parameters.
    """
    directory, state = str(checkpoint.directory), checkpoint.state
    if state["kind"] != kind:
        raise CheckpointMismatchError(
            f"checkpoint {directory!r} is of a {state['kind']}, not of a {kind}: give the one of "
            "this role"
        )
    saved = checkpoint.parameters("weights")
    if dict(saved) != dict(own):
        different = sorted(
            name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name)
        )
        name = different[0]
        raise CheckpointMismatchError(
            f"checkpoint {directory!r} is of another model: {name!r} is {saved.get(name)}, but the "
            f"model's is {own.get(name)} ({len(different)} differ): give the model folder that the "
            "run began with"
        )


def check_base(checkpoint: CheckpointReader, base: BaseIdentity | None) -> None:
    """Raises CheckpointMismatchError where an adapter was trained on another base."""
    if base is not None and (refusal := base.refusal(checkpoint.state.get("base"))):
        raise CheckpointMismatchError(f"checkpoint {str(checkpoint.directory)!r} {refusal}")


def _verified_copies(
    checkpoint: CheckpointReader, group: str, shard: RankShard, tensors: Iterable[str]
) -> list[Copy]:
    """What this rank reads of a group, from files whose hashes are right."""
    copies = checkpoint.copies(group, shard, tensors)
    checkpoint.verify(checkpoint.files_of(group, copies))
    return copies


def _read_optimizer(
    checkpoint: CheckpointReader, name: str, weights: TrainedWeights
) -> dict[str, torch.Tensor]:
    """This rank's part of what the optimizer keeps, for each weight that has some."""
    group, rank = f"optimizer-{name}", weights.peers.rank
    present = checkpoint.parameters(group)
    parameters = {
        tensor: parameter
        for tensor, parameter in tensor_parameters(weights.layout, rank).items()
        if parameter in present
    }
    shard = weights.layout.ranks[rank] if name in MOMENTS else scalar_shard(parameters)
    tensors = {tensor: torch.empty(shard.shapes[tensor]) for tensor in parameters}
    checkpoint.read(group, _verified_copies(checkpoint, group, shard, tensors), tensors)
    return tensors


def _check_average(checkpoint: CheckpointReader) -> None:
    """Raises CheckpointMismatchError where a checkpoint has no average of the weights."""
    if AVERAGE not in checkpoint.groups:
        raise CheckpointMismatchError(
            f"checkpoint {str(checkpoint.directory)!r} has no average of the weights, which "
            "teacher.average asks for: give one that a run with teacher.average wrote, or begin a "
            "run from its exported model"
        )


def _check_optimizer(
    checkpoint: CheckpointReader, weights: TrainedWeights, spec: AnyOptimizerSpec
) -> None:
    # Checkpoints that name no type are older than Muon.
    saved = checkpoint.state["optimizer"].get("type", "adamw")
    if saved != spec.type:
        raise CheckpointMismatchError(
            f"checkpoint {str(checkpoint.directory)!r} has the moments of optimizer.type {saved!r},"
            f" but this role's is {spec.type!r}: give optimizer.type {saved!r}, or begin a run "
            "from the exported model"
        )
    expected = set(checkpoint.parameters(f"optimizer-{STATE_NAMES[0]}"))
    for moment in STATE_NAMES:
        kept = weights.moments_layout(moment).manifest
        found = checkpoint.parameters(f"optimizer-{moment}")
        wanted = {name for name in expected if weights.keeps(name, moment)}
        for name in wanted | found.keys():
            if found.get(name) != kept.get(name):
                raise CheckpointMismatchError(
                    f"checkpoint {str(checkpoint.directory)!r}: {moment} of {name!r} is "
                    f"{found.get(name)}, but the model's is {kept.get(name)}: write a new "
                    "checkpoint"
                )
