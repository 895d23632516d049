"""The interface of a rollout back end: prompts in, trajectories out as they finish.

Owned by the rank's compute thread; no method is called from two threads at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rolemesh.engine.rollout.checksums import tensor_checksum
from rolemesh.engine.rollout.endpoint.calls import EndpointCalls
from rolemesh.engine.rollout.model_folder import (
    WeightsStaleError,
    expected_factors,
    expected_weights,
    read_model_folder,
)
from rolemesh.engine.rollout.requests import (
    LaterRequests,
    RolloutRequest,
    RolloutTrajectory,
    check_requests,
)
from rolemesh.engine.specs import AdapterSpec, RolloutSpec, SamplingSpec


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

    policy_version: int = -1
    """Version of the last whole update; -1 while the back end holds no whole set of weights."""

    yields_to_training: bool = False
    """Whether `sleep` frees device memory that the next update fills anyway. Then the owner puts
    the back end to sleep before its trainer computes, and wakes it for that update."""

    takes_whole: bool = False
    """Whether each of several ranks is handed whole weights, by Hugging Face name."""

    route_width: int = 0
    """Numbers of a token's route, where trajectories bring those; 0: they bring none."""

    endpoint_calls: EndpointCalls | None = None
    """What an endpoint has sampled here beside all else; None: there is no endpoint."""

    between_steps: Callable[[], None] | None = None
    """Called before each decoding step of a generation, on the compute thread. It may update the
    weights, on all ranks of a sampler before the same step; what it raises ends the generation."""

    @abstractmethod
    def generate(
        self,
        requests: Sequence[RolloutRequest],
        sampling: SamplingSpec,
        later: LaterRequests | None = None,
    ) -> Iterator[RolloutTrajectory]:
        """Samples one completion a request, yielding each as it finishes.

        Args:
            requests: Those that are there.
            sampling: How to draw.
            later: Is asked before each step for more; the generation lasts until none will come.

        Raises:
            PromptTooLongError: A prompt leaves no room for one token within max_model_len;
                raised by this call, before anything is sampled, or by the step that takes it.
            WeightsStaleError: The back end holds no whole set of weights.
            ValueError: A request is out of range.
        """

    @abstractmethod
    def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> None:
        """Replaces every weight by the given ones.

        Caches computed under the old weights are dropped.

        Args:
            weights: (Hugging Face name, floating [global shape]), tied ones once. Read once.
            policy_version: Of the new weights.

        Raises:
            WeightsStaleError: The set is not whole or does not fit. The back end then refuses to
                generate until a whole update.
            RuntimeError: A generation is under way, and `between_steps` is not the caller.
            ValueError: policy_version is negative.
        """

    def update_shard(
        self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> None:
        """Replaces every weight by the part of it that this rank holds.

        Args:
            tensors: (name of the sampler's own parameter, floating [shape on this rank]), as the
                sampler's weight layout says. Read once, and one held at a time.
            policy_version: Of the new weights.

        Raises:
            NotImplementedError: The back end takes whole weights only.
            Exception: As `update_weights`, or what `tensors` raises; the back end then refuses to
                generate in the same way, and other ranks are not told.
        """
        raise NotImplementedError(
            f"{type(self).__name__} takes no parts of weights: call update_weights with whole ones"
        )

    def score(self, tokens: Sequence[int]) -> list[float] | None:
        """Log-probs that the sampler gives a row, to compare them with the trainer's.

        All ranks of a generation replica call it with the same row, between generations.

        Args:
            tokens: Of the row, at least two.

        Returns:
            Natural log-probs, at temperature 1, of all tokens but the first; None where the back
            end scores nothing.

        Raises:
            WeightsStaleError: The back end holds no whole set of weights.
            RuntimeError: A generation is under way.
        """
        return None

    def score_each(self, tokens: Sequence[int]) -> Mapping[str, list[float]] | None:
        """As `score`, by each engine that may sample, where a back end has several.

        Each is to be compared with the trainer for itself: one that serves other weights would
        hide behind the others.

        Returns:
            Log-probs by what to call the engine in a message; None where nothing is scored.
        """
        found = self.score(tokens)
        return None if found is None else {"the sampler": found}

    def serve(self, goes_on: Callable[[], bool], *, anew: bool = False) -> None:
        """Samples calls of the endpoint alone, a turn long.

        All slices of a sampler call it together. What is unfinished when it returns goes on with
        the next turn, or beside a generation.

        Args:
            goes_on: Asked before each step, and again at once where there is nothing to sample: it
                waits then (`EndpointCalls.wait`). False ends the turn, and so does what it raises.
                Asked on the slice that hears of calls alone: the others do as it does.
            anew: Whether the turn is a generation of the run, whose calls share no keys with
                earlier ones where the bits are to be the same again.

        Raises:
            WeightsStaleError: The back end holds no whole set of weights.
            RuntimeError: A generation is under way, or there is no endpoint.
        """
        raise RuntimeError(f"{type(self).__name__} has no endpoint")

    @property
    def engine(self) -> Any:
        """VLLM's LLMEngine, for the front of an endpoint, which only reads of it."""
        raise RuntimeError(f"{type(self).__name__} has no engine for an endpoint")

    rounds_to = ""
    """Type to which weights are rounded, where all else is computed in float32 on a CPU; empty
    where more is rounded. A trainer of the same gives the same log-probs but for the order of sums.
    """

    _stale_reason = "no weights were sent yet"
    """Why no whole set of weights is held, where none is."""
    _is_generating = False
    """Whether a generation runs; there is one at a time."""
    _num_updates = 0
    """Whole updates so far."""
    _is_between_steps = False
    """Whether `between_steps` runs right now."""

    def __init__(
        self, spec: RolloutSpec, model_path: Path, adapter: AdapterSpec | None = None
    ) -> None:
        """Reads what there is to know of the model before it has weights.

        Raises:
            ValueError: The folder is missing or does not fit the spec.
        """
        self._spec = spec
        self._adapter = adapter
        """Where one is trained, its factors alone come in updates; the base is the folder's."""
        self._folder = read_model_folder(model_path, spec.max_model_len)
        self._expected = (
            expected_weights(self._folder)
            if adapter is None
            else expected_factors(self._folder, adapter)
        )

    def _check_asked(self, requests: Sequence[RolloutRequest]) -> None:
        """Raises what `generate` documents, unless these requests can be sampled now."""
        self._check_ready()
        self._check_requests(requests)

    def _check_requests(self, requests: Sequence[RolloutRequest]) -> None:
        check_requests(
            requests,
            max_model_len=self._spec.max_model_len,
            vocab_size=self._folder.vocab_size,
            image_tokens=self._folder.image_tokens,
        )

    def _alone(self, trajectories: Iterator[RolloutTrajectory]) -> Iterator[RolloutTrajectory]:
        """Passes trajectories on; keeps updates and other generations away until the end."""
        self._check_ready()
        self._is_generating = True
        try:
            yield from trajectories
        finally:
            self._is_generating = False

    @contextmanager
    def _update(self, policy_version: int) -> Iterator[None]:
        """Refuses generations while weights come, and after a failure until a whole update.

        Raises:
            RuntimeError: A generation is under way, and `between_steps` is not the caller.
            ValueError: policy_version is negative.
        """
        if policy_version < 0:
            raise ValueError(f"policy_version is {policy_version}: give a number from 0")
        self._check_idle("weights came")
        self._hold_nothing(f"the update to policy_version {policy_version} failed")
        try:
            yield
        except Exception as error:
            self._stale_reason += f": {error}"
            raise
        self.policy_version = policy_version
        self._num_updates += 1

    def _hold_nothing(self, reason: str) -> None:
        """Refuses to generate, for this reason, until the next whole update."""
        self.policy_version = -1
        self._stale_reason = reason

    def _check_idle(self, what: str) -> None:
        if self._is_generating and not self._is_between_steps:
            raise RuntimeError(f"{what} during a generation: finish or close it first")

    def _check_ready(self) -> None:
        self._check_whole()
        if self._is_generating:
            raise RuntimeError("a generation is under way: finish or close it first")

    def _check_whole(self) -> None:
        if self.policy_version < 0:
            raise WeightsStaleError(
                f"the sampler holds no whole set of weights ({self._stale_reason}): "
                "call update_weights first"
            )

    def _pause(self) -> bool:
        """Lets the owner of the back end act between two steps; True when it brought weights.

        Raises:
            WeightsStaleError: It tried, and the back end holds no whole set of weights now.
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
                f"set of weights ({self._stale_reason}): send one, and generate again"
            )
        return self._num_updates != known

    def drop_weights(self, reason: str) -> None:
        """Refuses to generate until the next whole update.

        Args:
            reason: Why, for the error of a generation that comes before the update.

        Raises:
            RuntimeError: A generation is under way, and `between_steps` is not the caller.
        """
        self._check_idle("weights were taken away")
        self._hold_nothing(reason)

    def differing_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> tuple[list[str], int]:
        """Which weights are held otherwise than they were sent, by their checksums.

        Args:
            weights: (Hugging Face name, float32 [global shape]), as they were sent.

        Returns:
            Names of those that differ, and how many could be compared: those that the sampler
            reports under the same name.

        Raises:
            Exception: As `weight_checksums`.
        """
        held = self.weight_checksums()
        differing: list[str] = []
        num_compared = 0
        for name, tensor in weights:
            if name not in held:
                continue
            num_compared += 1
            _, sent = (name, tensor) if self._adapter is not None else self._rounded((name, tensor))
            # Rounded values may be held in float32, by which exact numerics compute on a CPU.
            if held[name] not in (tensor_checksum(sent), tensor_checksum(sent.float())):
                differing.append(name)
        return differing, num_compared

    def _rounded(self, weight: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
        """A weight in the spec's type, but for a buffer, which stays as it is."""
        name, tensor = weight
        if name in self._expected.buffers:
            return weight
        return name, tensor.to(getattr(torch, self._spec.dtype))

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest row that can be scored: one more is drawn behind it."""
        return self._spec.max_model_len - 1

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


@contextmanager
def generated(
    backend: RolloutBackend,
    requests: Sequence[RolloutRequest],
    sampling: SamplingSpec,
    later: LaterRequests | None = None,
) -> Iterator[Iterator[RolloutTrajectory]]:
    """The completions of a generation, which is over when the block is left, also by an error.

    Otherwise it would be under way until the garbage collector finds it, and keep the next one
    away.
    """
    trajectories = backend.generate(requests, sampling, later)
    try:
        yield trajectories
    finally:
        if isinstance(trajectories, Generator):
            trajectories.close()
