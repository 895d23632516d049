"""Trajectories of a step as a coordinator keeps them for people, as immutable values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rolemesh.coordinator.sdk.values.html import table
from rolemesh.coordinator.sdk.values.messages import FromMessage, from_message
from rolemesh.v1 import coordinator_pb2

_NOT_LOGGED = ("session", "images", "has_large_images")
"""Fields of samples that coordinators have of their own runs alone."""


@dataclass(frozen=True, slots=True)
class SampledCall(FromMessage):
    """One call of an agent's session."""

    number: int
    """Of the session, from 0, in the order in which calls ended."""
    num_added_tokens: int
    """Of its prompt behind the call that it continues; of the first of a branch, its prompt."""
    num_sampled_tokens: int
    use: str
    """What training does with them: "trained" in this row, "shared" with an earlier row of the
    session, which trains them, or "untrained", kept out by the caller."""


@dataclass(frozen=True, slots=True)
class SampledSession(FromMessage):
    """What is told of an agent's session beside one of its rows.

    Rows of a step with equal prompt_id and sample_index are branches of one session.
    """

    prompt_id: int
    sample_index: int
    branch: int
    """Of the row, from 0."""
    num_branches: int
    """That are rows."""
    attempts: int
    """How often the trajectory was begun; those before the last one failed."""
    calls: tuple[SampledCall, ...]
    """Of the branch, in order."""
    left_out: tuple[SampledCall, ...]
    """Calls that no row has. Of branch 0 alone."""
    log: str
    """Last of what the agent wrote, at most 16 KiB. Of branch 0 alone."""


@dataclass(frozen=True, slots=True)
class SampledImage(FromMessage):
    """An image of a prompt."""

    sha256: str
    """Of the file, hex."""
    num_bytes: int
    """Of the file."""
    url: str
    """The file as a data URL. Empty where an earlier sample of the step has it, or the file is only
    named: the fifth of a prompt, one of more than 256 KiB, what exceeds 1 MiB a step."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One trajectory for people."""

    row: int
    """Row of its batch, different for each sample of a step."""
    prompt: str
    completion: str
    answer: str = ""
    reward: float = math.nan
    """NaN where it has none."""
    policy_version: int = 0
    """Version that sampled its first token."""
    token_ids: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Of the completion, [n]; of samples that are logged it may be empty, like those below."""
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """Natural log, [n]."""
    loss_mask: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """Whether each token is the policy's own, [n]."""
    advantages: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """[n], or empty where the algorithm has none."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Parts of its reward by "<source>/<part>", finite."""

    session: SampledSession | None = None
    """Of the agent that made it; None where no agent did. It is not logged."""
    images: tuple[SampledImage, ...] = ()
    """Of the prompt in its order, at most 64. They are not logged."""
    has_large_images: bool = False
    """Whether the prompt has images that are not told of: together they have more than 16 MiB."""

    def to_message(self) -> coordinator_pb2.Sample:
        """As it travels."""
        names = (name for name in self.__slots__ if name not in _NOT_LOGGED)
        return coordinator_pb2.Sample(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Some trajectories of a step."""

    step: int
    """0 when there is none yet."""
    rows: tuple[Sample, ...]
    kept_steps: tuple[int, ...]
    """Steps of which samples are kept."""

    @staticmethod
    def of(answer: coordinator_pb2.ListSamplesResponse) -> Samples:
        """From its message."""
        rows = tuple(
            from_message(
                Sample,
                one,
                token_ids=np.array(one.token_ids, dtype=np.int64),
                logprobs=np.array(one.logprobs, dtype=np.float32),
                loss_mask=np.array(one.loss_mask, dtype=np.bool_),
                advantages=np.array(one.advantages, dtype=np.float32),
                session=SampledSession.of(one.session) if one.HasField("session") else None,
                images=tuple(SampledImage.of(image) for image in one.images),
            )
            for one in answer.samples
        )
        return Samples(answer.step, rows, tuple(answer.steps))

    def _repr_html_(self) -> str:
        rows = [(one.row, one.prompt, one.completion, one.answer, one.reward) for one in self.rows]
        return table(("row", "prompt", "completion", "answer", "reward"), rows)
