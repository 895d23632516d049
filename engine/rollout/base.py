"""The interface of a rollout back end: prompts in, trajectories out as they finish.

Owned by the rank's compute thread; no method is called from two threads at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    max_new_tokens: int | None = None
    """Longest completion of this request, where that is less than what sampling allows; >= 1."""
    is_complete: Callable[[Sequence[int]], bool] | None = None
    """Asked after each sampled token with all of them so far; True ends the completion, like a stop
    token. It must depend on the tokens alone: ranks that sample together ask each for itself."""


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
    """"stop": a stop token, or the request's is_complete, ended it. "length": it was cut."""
    policy_versions: Sequence[int]
    """Version of the weights that sampled each completion token."""


class RolloutBackend(ABC):
    """Samples completions with weights that it is handed.

    Invariant: every token carries the policy_version of the last whole weight update before it.
    After a failed update the back end is poisoned and refuses to generate until a whole one.

    Weights may come in the middle of a generation, from `between_steps` alone. What runs then goes
    on under the new ones, and its keys and values are computed again under them: the log-prob of
    each token is that of its own version given all tokens before it, which a trainer that holds
    this version can recompute. (Keys of old weights would spare a prefill of what runs, and their
    tokens would come from a mixture that no version has.)

    Example::

        backend.update_weights(trainer.named_weights(), policy_version=3)
        for trajectory in backend.generate(requests, sampling):
            ...  # in order of finishing, not of rows; trajectory.policy_versions == [3, 3, 3]
    """

    policy_version: int
    """Version of the weights held; -1 before the first update."""

    between_steps: Callable[[], None] | None = None
    """Called before each decoding step of a generation, on the compute thread. It may update the
    weights, where the rank samples alone; what it raises ends the generation."""

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
        parameter is missing or does not fit, RuntimeError during a generation unless
        `between_steps` calls it.
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

    _num_updates = 0
    """Whole updates so far."""
    _is_between_steps = False
    """Whether `between_steps` runs right now."""

    def _pause(self) -> bool:
        """Lets the owner of the back end act between two steps; True when it brought weights.

        Raises:
            WeightsStaleError: it tried, and the back end holds no whole set of weights now.
        """
        if self.between_steps is None:
            return False
        known = self._num_updates
        self._is_between_steps = True
        try:
            self.between_steps()
        finally:
            self._is_between_steps = False
        if self.policy_version < 0:
            raise WeightsStaleError(
                "an update in the middle of the generation failed, so the sampler holds no whole "
                "set of weights: send one, and generate again"
            )
        return self._num_updates != known

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


class WeightsStaleError(RuntimeError):
    """The sampler does not hold the weights that it is asked to sample with."""
