"""The interface of a rollout back end: prompts in, trajectories out as they finish.

Owned by the rank's compute thread; no method is called from two threads at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from rolemesh.engine.specs import SamplingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One completion to sample."""

    row: int
    """Row of the batch that the trajectory will fill."""
    prompt_tokens: Sequence[int]
    """Token ids of the prompt, at least one."""
    seed: int
    """Seed of this completion alone, 0 <= seed < 2**63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTrajectory:
    """One finished completion."""

    row: int
    """Row of the batch, as requested."""
    completion_tokens: Sequence[int]
    """Token ids as sampled, the stop token included."""
    logprobs: Sequence[float]
    """Natural log-prob of each completion token under the distribution it was drawn from."""
    finish_reason: Literal["stop", "length"]
    """"stop": a stop token ended it. "length": it was cut."""
    policy_version: int
    """Version of the weights that sampled it."""


class RolloutBackend(ABC):
    """Samples completions with weights that it is handed.

    Invariant: every trajectory carries the policy_version of the last whole weight update.
    After a failed update the back end is poisoned and refuses to generate until a whole one.

    Example::

        backend.update_weights(trainer.named_weights(), policy_version=3)
        for trajectory in backend.generate(requests, sampling):
            ...  # in order of finishing, not of rows; trajectory.policy_version == 3
    """

    policy_version: int
    """Version of the weights held; -1 before the first update."""

    takes_shards: ClassVar[bool] = False
    """Whether `update_shard` can be called."""

    @abstractmethod
    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingSpec
    ) -> Iterator[RolloutTrajectory]:
        """Samples one completion a request, yielding each as it finishes.

        Raises:
            PromptTooLongError: a prompt leaves no room for one token within max_model_len;
                raised before anything is sampled.
            WeightsStaleError: the back end holds no whole set of weights.
        """

    @abstractmethod
    def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> None:
        """Replaces every weight by the given ones (Hugging Face names, global shapes).

        Caches computed under the old weights are dropped. Raises WeightsStaleError when a
        parameter is missing or does not fit.
        """

    def update_shard(
        self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> None:
        """Replaces every weight by the part of it that this rank holds.

        Args:
            tensors: (name of the sampler's own parameter, floating [shape on this rank]), as the
                sampler's weight layout says. Read once, and one held at a time.
            policy_version: of the new weights.

        Raises:
            NotImplementedError: the back end takes whole weights only.
            WeightsStaleError: a parameter is missing or does not fit.
        """
        raise NotImplementedError(
            f"{type(self).__name__} takes no parts of weights: call update_weights with whole ones"
        )

    @abstractmethod
    def weight_checksums(self) -> Mapping[str, str]:
        """SHA-256 (hex) of each parameter as the sampler holds it."""

    @abstractmethod
    def sleep(self) -> int:
        """Frees device memory; returns the bytes freed (0 on a CPU)."""

    @abstractmethod
    def wake(self) -> int:
        """Takes device memory again; returns the bytes taken (0 on a CPU)."""

    @abstractmethod
    def close(self) -> None:
        """Ends the engine. The back end is not used again."""


class PromptTooLongError(ValueError):
    """A prompt leaves no room for a completion."""


class WeightsStaleError(RuntimeError):
    """The sampler does not hold the weights that it is asked to sample with."""
