"""What steps a vLLM engine of this process: requests of a run, calls of an endpoint, scores."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from rolemesh.engine.hardware.cpu_threads import largest_product, threads_worth
from rolemesh.engine.rollout.base import RolloutBackend
from rolemesh.engine.rollout.endpoint.calls import EndpointCall, EndpointCalls
from rolemesh.engine.rollout.requests import LaterRequests, RolloutRequest, RolloutTrajectory
from rolemesh.engine.rollout.vllm.adapters import ServedAdapter
from rolemesh.engine.rollout.vllm.engine.process import own_random_state
from rolemesh.engine.rollout.vllm.requests.image_prompts import ImagePrompts
from rolemesh.engine.rollout.vllm.requests.running import RunningRequests
from rolemesh.engine.specs import SamplingSpec

if TYPE_CHECKING:
    from rolemesh.engine.rollout.routes import EngineRoutes

_MIN_TEMPERATURE = 0.01
"""vLLM silently raises a lower temperature to this one."""


class VllmSampling(RolloutBackend):
    """The half of a vLLM back end that steps the engine; who has it sees to its weights.

    Owned by the rank's compute thread. Calls of an endpoint are sampled beside a generation, in the
    same steps.
    """

    _device: torch.device
    _num_slices: int
    _prompts: ImagePrompts
    _request_numbers: itertools.count[int]
    _served: ServedAdapter | None = None
    """How the adapter is served; None where there is none."""
    _routes: EngineRoutes | None = None
    """Keeps the routes of a mixture's tokens, where that is wanted."""

    @abstractmethod
    def _take_engine(self) -> None:
        """Gives the engine this back end's weights where another one has used it since."""

    @abstractmethod
    def _forget_keys(self, whose: str) -> None:
        """Empties the cache of keys and values, of requests that run, too."""

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        sampling: SamplingSpec,
        later: LaterRequests | None = None,
    ) -> Iterator[RolloutTrajectory]:
        """Samples one completion a request, yielding each as it finishes.

        Closing the iterator early aborts what is left. The next call then starts from nothing. A
        temperature that vLLM does not take raises ValueError, besides what `RolloutBackend` says.
        """
        self._check_asked(requests)
        if not sampling.greedy and sampling.temperature < _MIN_TEMPERATURE:
            raise ValueError(
                f"sampling.temperature is {sampling.temperature}, below vLLM's least of "
                f"{_MIN_TEMPERATURE}: raise it, or set sampling.greedy"
            )
        return self._alone(self._generate(requests, sampling, later))

    def _generate(
        self,
        requests: Sequence[RolloutRequest],
        sampling: SamplingSpec,
        later: LaterRequests | None,
    ) -> Iterator[RolloutTrajectory]:
        self._take_engine()
        self._forget_earlier_keys()
        running = RunningRequests(
            self.engine,
            sampling,
            max_model_len=self._spec.max_model_len,
            stop_tokens=self._folder.stop_tokens,
            prompts=self._prompts,
            routes=self._routes,
        )
        try:
            more: Sequence[RolloutRequest] | None = requests
            while running or more is not None:
                self._attend_to_calls()
                for request in more or ():
                    running.add(
                        str(next(self._request_numbers)),
                        request,
                        policy_version=self.policy_version,
                        lora_request=self._lora_request,
                    )
                if self._pause():
                    running.note_version(self.policy_version)
                is_idle = not running and (
                    self.endpoint_calls is None or not self.endpoint_calls.are_running
                )
                if not is_idle:
                    yield from running.taken(self._step())
                more = None if later is None else later.take(is_idle=is_idle)
                self._check_requests(more or ())
        finally:
            # Also when the caller stopped early or a step raised: the engine must be left empty.
            running.abort()

    def serve(self, goes_on: Callable[[], bool], *, anew: bool = False) -> None:
        """Samples calls of the endpoint; see `RolloutBackend.serve`."""
        calls = self.endpoint_calls
        if calls is None:
            return super().serve(goes_on, anew=anew)
        self._check_ready()
        self._is_generating = True
        try:
            self._take_engine()
            if anew:
                self._forget_earlier_keys()
            while self._attend_to_calls(is_over=self._is_over(calls, goes_on)):
                self._pause()
                if calls.are_running:
                    self._step()
        finally:
            self._is_generating = False

    def _is_over(self, calls: EndpointCalls, goes_on: Callable[[], bool]) -> bool:
        if calls.follows:
            return False  # the first slice says
        try:
            return not goes_on()
        except BaseException:
            # The other slices would wait for the next step.
            self._attend_to_calls(is_over=True)
            raise

    def _forget_earlier_keys(self) -> None:
        """Begins without keys of earlier generations, where bits are to be the same again.

        Rows then have the same bits when a call is made again by a service that was started anew.
        On a GPU the next generation uses those keys, unless the run asks for the same bits.
        """
        if self._device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
            self._forget_keys("of an earlier generation")

    @property
    def _has_calls(self) -> bool:
        """Whether calls of an endpoint are in the engine, also between two turns."""
        return self.endpoint_calls is not None and bool(self._scheduled)

    def _attend_to_calls(self, *, is_over: bool = False) -> bool:
        """Gives the engine what has come for it; False on all slices when the turn is over."""
        return self.endpoint_calls is None or self.endpoint_calls.attend(
            self.engine, lora_request=self._lora_request, shown=self._shown, is_over=is_over
        )

    def _shown(self, call: EndpointCall) -> Mapping[str, Any]:
        """The prompt of a call with images, as the engine takes it.

        Raises:
            ImageInvalidError: An image cannot be read.
        """
        request = RolloutRequest(
            row=0, prompt_tokens=call.prompt["prompt_token_ids"], seed=0, images=call.images
        )
        salt = {name: call.prompt[name] for name in ("cache_salt",) if name in call.prompt}
        return {**self._prompts.given(request), **salt}

    def _step(self) -> list[Any]:
        """A step of the engine; returns the outputs that are not calls of the endpoint."""
        calls = self.endpoint_calls
        try:
            if calls is not None:
                # With each token it says which weights have drawn it.
                self.engine.set_weight_version(str(self.policy_version))
            with own_random_state(), self._threads():
                outputs: list[Any] = self.engine.step()
        except Exception as error:
            if calls is not None:
                calls.fail(self.engine, error)
            raise
        return outputs if calls is None else calls.taken(outputs)

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of all tokens but the first; see `RolloutBackend.score`."""
        from rolemesh.engine.rollout.vllm.requests.scoring import score_row

        self._check_ready()
        self._take_engine()
        # By our own steps: calls of an endpoint stay in the engine between two turns, and hear of
        # what is sampled for them meanwhile.
        return score_row(
            self.engine,
            self._step,
            str(next(self._request_numbers)),
            tokens,
            lora_request=self._lora_request,
        )

    def _threads(self) -> AbstractContextManager[None]:
        """Computes the engine's next step with the threads that it is worth."""
        if self._device.type != "cpu":
            # There is nothing to choose, and counting a thousand requests takes time.
            return nullcontext()
        scheduled = self._scheduled.values()
        product = largest_product(
            self._folder.config,
            num_tokens=sum(one.num_tokens - one.num_computed_tokens for one in scheduled),
            longest=max((one.num_tokens for one in scheduled), default=0),
            num_predicted=len(scheduled),
            num_slices=self._num_slices,
        )
        return threads_worth(product, self._device)

    @property
    def _scheduled(self) -> Mapping[str, Any]:
        """Requests of the engine that have not ended, by its ids."""
        scheduled: Mapping[str, Any] = self.engine.engine_core.engine_core.scheduler.requests
        return scheduled

    @property
    def _lora_request(self) -> Any:
        """What a request names to have the adapter of a slot; None where there is none."""
        return None if self._served is None else self._served.request
