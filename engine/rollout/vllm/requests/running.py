"""The requests of one generation that a vLLM engine works on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rolemesh.engine.rollout.requests import RolloutRequest, RolloutTrajectory
from rolemesh.engine.rollout.vllm.requests.outputs import Drawn, drawn_from, trajectory_of
from rolemesh.engine.specs import SamplingSpec

if TYPE_CHECKING:
    from rolemesh.engine.rollout.routes import EngineRoutes
    from rolemesh.engine.rollout.vllm.requests.image_prompts import ImagePrompts


@dataclass(slots=True)
class _Running:
    request: RolloutRequest
    engine_id: str
    """By which the engine's own parts know it."""
    watched: Drawn | None
    """Tokens so far, where the request decides after each token whether it ends."""
    versions: list[tuple[int, int]]
    """How many tokens it had when a version of the weights came, and which."""


class RunningRequests:
    """Puts requests into an engine, and makes trajectories of what it gives.

    Owned by the compute thread; imports vLLM late.

    Example::

        running = RunningRequests(
            engine, sampling, max_model_len=512, stop_tokens=(2,), prompts=prompts
        )
        running.add("0", request, policy_version=3, lora_request=None)
        while running:
            for trajectory in running.taken(engine.step()):
                ...
    """

    def __init__(
        self,
        engine: Any,
        sampling: SamplingSpec,
        *,
        max_model_len: int,
        stop_tokens: Sequence[int],
        prompts: ImagePrompts,
        routes: EngineRoutes | None = None,
    ) -> None:
        """Takes an engine (vLLM's LLMEngine) that is empty, and what keeps its routes, if any."""
        self._routes = routes
        self._prompts = prompts
        self._engine = engine
        self._sampling = sampling
        self._max_model_len = max_model_len
        self._stop_tokens = stop_tokens
        self._running: dict[str, _Running] = {}

    def __len__(self) -> int:
        return len(self._running)

    def add(
        self, request_id: str, request: RolloutRequest, *, policy_version: int, lora_request: Any
    ) -> None:
        """Puts a request into the engine.

        Args:
            request_id: Never used before in this engine.
            request: Of which all is checked.
            policy_version: Of the weights.
            lora_request: VLLM's, of the adapter; None: the engine's weights alone.

        Raises:
            ImageInvalidError: An image cannot be read, or is not what its grid says.
        """
        from rolemesh.engine.rollout.vllm.requests.requests import sampling_params

        engine_id = self._engine.add_request(
            request_id,
            self._prompts.given(request),
            sampling_params(
                request,
                self._sampling,
                max_model_len=self._max_model_len,
                stop_tokens=self._stop_tokens,
            ),
            lora_request=lora_request,
        )
        watched = None if request.is_complete is None else Drawn()
        self._running[request_id] = _Running(request, engine_id, watched, [(0, policy_version)])

    def note_version(self, policy_version: int) -> None:
        """From now on tokens are drawn by other weights."""
        scheduled = self._engine.engine_core.engine_core.scheduler.requests
        for one in self._running.values():
            num_sampled = int(scheduled[one.engine_id].num_output_tokens)
            one.versions.append((num_sampled, policy_version))

    def taken(self, outputs: Iterable[Any]) -> Iterator[RolloutTrajectory]:
        """The trajectories that a step of the engine has finished."""
        for output in outputs:
            one = self._running[output.request_id]
            request = one.request
            drawn = drawn_from(output, request.row, one.watched)
            if request.is_complete is not None and request.is_complete(drawn.tokens):
                drawn.reason = "stop"
            if drawn.reason is not None:
                num_tokens = len(request.prompt_tokens) + len(drawn.tokens)
                routes = None
                if self._routes is not None:
                    # The engine still knows the request.
                    routes = self._routes.taken(output, one.engine_id, num_tokens)
                if not output.finished:
                    self._engine.abort_request([one.engine_id], internal=True)
                del self._running[output.request_id]
                yield trajectory_of(drawn, request.row, one.versions, routes)

    def abort(self) -> None:
        """Takes whatever is left out of the engine."""
        if self._running:
            ids = [one.engine_id for one in self._running.values()]
            self._engine.abort_request(ids, internal=True)
        if self._routes is not None:
            self._routes.forget()
