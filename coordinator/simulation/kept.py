"""What a process of a simulated service keeps, and what calls change of it. It knows no time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

from google.protobuf import json_format

from rolemesh.coordinator.recipe.role_names import role_of
from rolemesh.coordinator.simulation.answers import columns_of, reference
from rolemesh.coordinator.simulation.timing import Settings
from rolemesh.rpc.errors import NotFoundError, PreconditionError
from rolemesh.v1 import (
    cuts_pb2,
    experience_pb2,
    rollout_pb2,
    trainer_pb2,
    weights_pb2,
    worker_pb2,
)

Identity = tuple[int, int, str, int]
"""Of a call's effect: epoch, step, operation, sequence."""


@dataclass(eq=False)
class CallRecord:
    """A keyed call as its service saw it. Times are virtual seconds."""

    service: str
    identity: Identity
    started: float
    ended: float = 0.0
    is_answered: bool = False


class Surroundings(Protocol):
    """What a process knows of its mesh."""

    settings: Settings
    estimator_columns: tuple[str, ...]
    calls: list[CallRecord]
    """Gets what it is asked."""
    cuts: dict[str, dict[int, int]]
    """Versions by service and step: they lie in shared memory."""
    saved: dict[str, int]
    """Versions by folder: they lie on disks."""

    def at(self, address: str) -> KeptState | None:
        """The process that answers at an address, if one does by now."""

    def service(self, name: str) -> KeptState:
        """The newest process of a service."""


@dataclass(eq=False)
class KeptState:
    """What one process keeps.

    Invariant: it goes with the process, but for cuts and checkpoints, which the mesh keeps.
    """

    name: str
    address: str
    mesh: Surroundings
    is_alive: bool = True
    run_id: str = ""
    spec: dict[str, Any] = field(default_factory=dict)
    policy_version: int = 0
    published: int | None = None
    """Version of the weights that it keeps for samplers."""
    is_asleep: bool = False
    highest_epoch: int = 0
    held: dict[str, tuple[int, float, int]] = field(default_factory=dict)
    """Step, tokens and rows of each experience that it holds, by id."""

    def __post_init__(self) -> None:
        self.role = role_of(self.name)

    def hold(
        self, request: Any, name: str, tokens: float, num_rows: int, suffix: str = ""
    ) -> experience_pb2.ExperienceRef:
        """Keeps rows that the call of a request has made, and names them."""
        key = request.key
        # As a real one: what an earlier attempt of the step made is another experience.
        made_by = f"{key.operation}/{key.sequence}/{key.fencing_epoch}"
        experience_id = f"{self.name}/{key.step}/{made_by}{suffix}"
        self.held[experience_id] = key.step, tokens, num_rows
        columns = columns_of(self.role, name, request, self.mesh.estimator_columns)
        return reference(
            key,
            columns,
            num_rows,
            experience_id=experience_id,
            address=self.address,
            role=self.role,
        )

    def tokens_of(self, experience: experience_pb2.ExperienceRef) -> float:
        """Tokens of what a call reads; raises where a process that held some of it is gone."""
        tokens = 0.0
        for number, group in enumerate(experience.groups):
            for shard in group.shards:
                holder = self.mesh.at(shard.address)
                if holder is None or shard.experience_id not in holder.held:
                    raise NotFoundError(
                        f"{shard.address} holds no {shard.experience_id}",
                        reason="EXPERIENCE_NOT_FOUND",
                    )
                if number == 0:
                    tokens += holder.held[shard.experience_id][1]
        return tokens

    @property
    def own_cuts(self) -> dict[int, int]:
        """Versions by step."""
        return self.mesh.cuts.setdefault(self.name, {})

    def effect(self, name: str, request: Any, tokens: float) -> Any:
        """The result of a call, and what it changes.

        Args:
            name: Of the method.
            request: Its message, with a key.
            tokens: Of the experience that it reads.

        Raises:
            RolemeshError: A real service would refuse it, too.
        """
        report = experience_pb2.CallReport(num_tokens=round(tokens))
        match name:
            case "Initialize":
                self.run_id, self.policy_version, self.is_asleep = request.key.run_id, 0, False
                self.spec = json_format.MessageToDict(request.spec)
                return self._initialized()
            case "Attach":
                if self.run_id != request.key.run_id:
                    raise PreconditionError(f"{self.name} holds no run", reason="NOT_INITIALIZED")
                return self._initialized()
            case "Update":
                self._check_version(request.expected_policy_version)
                rows = request.experience.num_rows
                self.policy_version += request.epochs * math.ceil(rows / request.mini_batch_rows)
                return trainer_pb2.UpdateResult(policy_version=self.policy_version, report=report)
            case "PublishWeights":
                self.published = self.policy_version
                weights = weights_pb2.WeightsRef(
                    run_id=self.run_id, policy_version=self.policy_version, dtype=request.dtype
                )
                return weights_pb2.PublishWeightsResult(weights=weights, report=report)
            case "UpdateWeights":
                wanted = request.weights.policy_version
                if self.mesh.service("actor").published != wanted:
                    raise PreconditionError(
                        f"version {wanted} is not published any more", reason="WEIGHTS_GONE"
                    )
                self.policy_version = wanted
                return rollout_pb2.UpdateWeightsResult(policy_version=wanted, report=report)
            case "SaveCut":
                step = request.key.step
                # It takes the place of the older of two.
                for old in sorted(known for known in self.own_cuts if known != step)[:-1]:
                    del self.own_cuts[old]
                self.own_cuts[step] = self.policy_version
                return cuts_pb2.CutResult(policy_version=self.policy_version)
            case "RestoreCut":
                if request.step not in self.own_cuts:
                    raise NotFoundError(f"no cut of step {request.step}", reason="CUT_NOT_FOUND")
                self.policy_version = self.own_cuts[request.step]
                for later in [step for step in self.own_cuts if step > request.step]:
                    if not request.keeps_later:
                        del self.own_cuts[later]
                return cuts_pb2.CutResult(policy_version=self.policy_version)
            case "SaveCheckpoint" | "Export":
                version = self.policy_version
                if name == "SaveCheckpoint" and request.from_cut:
                    version = self.own_cuts[request.key.step]
                self.mesh.saved[request.directory] = version
                return self._checkpoint(version, getattr(request, "from_cut", False))
            case "LoadCheckpoint":
                self.policy_version = self.mesh.saved[request.directory]
                return self._checkpoint(self.policy_version, is_from_cut=False)
            case "ForwardBackward":
                return trainer_pb2.ForwardBackwardResult(report=report)
            case _:
                rows = getattr(request, "experience", None)
                num_rows = request.rows.count if rows is None else rows.num_rows
                made = self.hold(request, name, tokens, num_rows)
                return experience_pb2.ExperienceResult(experience=made, report=report)

    def _check_version(self, expected: int) -> None:
        if expected != self.policy_version:
            raise PreconditionError(
                f"the weights of {self.name} are at {self.policy_version}, not {expected}",
                reason="VERSION_MISMATCH",
            )

    def _initialized(self) -> worker_pb2.InitializeResult:
        return worker_pb2.InitializeResult(policy_version=self.policy_version, num_parameters=1)

    def _checkpoint(self, version: int, is_from_cut: bool) -> weights_pb2.CheckpointResult:
        return weights_pb2.CheckpointResult(
            policy_version=version, manifest_sha256="0" * 64, from_cut=is_from_cut
        )
