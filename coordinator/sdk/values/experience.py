"""Results of services, as values: references to experience, reports, versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rolemesh.coordinator.sdk.values.experts import LayerLoads
from rolemesh.coordinator.sdk.values.html import definition_list
from rolemesh.coordinator.sdk.values.messages import from_message
from rolemesh.rpc.experience.references import (
    concat_references,
    join_references,
    names_of,
    shards_of,
)
from rolemesh.v1 import experience_pb2, reward_pb2, rollout_pb2


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """The most memory that one rank held while a phase of a call computed."""

    phase: str
    rank: int
    peak_bytes: int
    source: str
    """What was measured: "device", "resident" or "resident_since_start"."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a call took."""

    metrics: Mapping[str, float]
    phases: Mapping[str, float]
    """Seconds by phase, e.g. "fetch" and "compute"."""
    num_tokens: int
    """Tokens worked on, of prompts and completions."""
    fetched_bytes: Mapping[str, int]
    """Bytes of experience pulled, by transport."""
    memory: tuple[PhaseMemory, ...]

    @staticmethod
    def of(report: experience_pb2.CallReport) -> Report:
        """From its message."""
        return from_message(
            Report,
            report,
            phases=MappingProxyType(
                {one.phase: one.duration.ToNanoseconds() * 1e-9 for one in report.phases}
            ),
        )


@dataclass(frozen=True, slots=True)
class Experience:
    """A batch of trajectories that services hold; this names it and holds no row.

    `a | b` joins the columns of two over the same rows; a column of b replaces one of its name.

    Example: batch |= await mesh["reference"].compute_logprobs(batch, "reference_logprobs")
    """

    reference: experience_pb2.ExperienceRef = field(repr=False)
    """As it travels; not to be changed."""
    report: Report | None = field(default=None, repr=False, compare=False)
    """Of the call that made it; None where several did, or none."""

    @property
    def run_id(self) -> str:
        """Run that it belongs to."""
        return self.reference.run_id

    @property
    def step(self) -> int:
        """Step in which it was made."""
        return self.reference.step

    @property
    def num_rows(self) -> int:
        """Trajectories."""
        return self.reference.num_rows

    @property
    def columns(self) -> tuple[str, ...]:
        """Names, each once."""
        return tuple(names_of(self.reference))

    @property
    def num_bytes(self) -> int:
        """Bytes that services hold for it."""
        return sum(shard.num_bytes for shard in shards_of(self.reference))

    def __or__(self, other: Experience) -> Experience:
        """Joins columns.

        Raises:
            ValueError: They are not over the same rows.
        """
        return Experience(join_references([self.reference, other.reference]))

    @staticmethod
    def concat(parts: Sequence[Experience]) -> Experience:
        """One over the rows of all, in order.

        Raises:
            ValueError: There are none, or their columns differ.
        """
        return Experience(concat_references([part.reference for part in parts]))

    def __repr__(self) -> str:
        return f"Experience(rows={self.num_rows}, step={self.step}, columns={list(self.columns)})"

    def _repr_html_(self) -> str:
        return definition_list(
            {
                "rows": self.num_rows,
                "step": self.step,
                "columns": ", ".join(self.columns),
                "bytes": self.num_bytes,
                **({} if self.report is None else dict(self.report.metrics)),
            }
        )


@dataclass(frozen=True, slots=True)
class Gradient:
    """What a gradient computation gave."""

    outputs: Experience
    """Per-token log-probs, or values, of the forward pass."""
    report: Report
    """With the metric "loss"."""


@dataclass(frozen=True, slots=True)
class Update:
    """What changed weights."""

    policy_version: int
    """Afterwards."""
    report: Report
    expert_loads: LayerLoads
    """Of a mixture, how often each expert was chosen; without layers for other models."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which groups a rule kept."""

    experience: Experience | None
    """The kept rows; None when there are none."""
    num_groups: int
    report: Report


@dataclass(frozen=True, slots=True, eq=False)
class Rewards:
    """Rewards of trajectories that were sent along."""

    values: npt.NDArray[np.float32]
    """One a trajectory, in order."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A trajectory that is sent along, for a reward that pulls no experience."""

    prompt: str
    completion: str
    prompt_tokens: Sequence[int] = ()
    completion_tokens: Sequence[int] = ()
    answer: str = ""
    metadata_json: str = ""

    def to_proto(self) -> reward_pb2.Trajectory:
        """Its message."""
        return reward_pb2.Trajectory(**{name: getattr(self, name) for name in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt of the caller: either the text of a user, or tokens as the model shall see them."""

    text: str = ""
    tokens: Sequence[int] = ()
    prompt_id: int | None = None
    """Rows with equal ones make a group; None: its place in the call."""
    answer: str = ""
    metadata_json: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSlice:
    """Positions in the data that a service loaded at Initialize."""

    start: int
    count: int
    split: str = "train"
    """ "train", "held_out" or "pretraining"."""

    def to_proto(self) -> rollout_pb2.PromptSlice:
        """Its message.

        Raises:
            ValueError: The split is unknown.
        """
        name = f"SPLIT_{self.split.upper()}"
        if name not in rollout_pb2.Split.keys()[1:]:
            raise ValueError(f"split is {self.split!r}: give train, held_out or pretraining")
        return rollout_pb2.PromptSlice(
            split=rollout_pb2.Split.Value(name), start=self.start, count=self.count
        )


@dataclass(frozen=True, slots=True)
class Auxiliary:
    """A loss over rows of its own that is added to the main one of an update."""

    experience: Experience
    loss: Part
    weight: float


Part: TypeAlias = str | Mapping[str, Any]
"""A loss, an estimator or a rule: its registered type, or {"type": ..., and its parameters}."""
