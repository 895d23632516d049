"""vLLM's front in front of a sampler of ours: an engine client that hands calls to its thread."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind

from rolemesh.engine.rollout.endpoint.calls import EndpointCall
from rolemesh.engine.rollout.requests import drawing_arguments
from rolemesh.engine.sessions.store import CallRules, Sessions
from rolemesh.services.endpoint.asked import ASKED, Asked
from rolemesh.services.endpoint.replicas import Calls

_SEED_BITS = 62
"""Of seeds that the front draws. Completion k of a call has the seed + k, which fits in 63 bits."""


class SamplerClient(EngineClient):  # type: ignore[misc]
    """What vLLM's front takes for an engine. Owner: the loop.

    Invariant: a call of a session that has ended whole is kept in it before its client hears of it,
    with the tokens, log-probs and versions that the sampler gave. One that fails, or whose client
    has gone, is not.
    """

    def __init__(
        self,
        engine: Any,
        calls: Calls,
        sessions: Sessions,
        *,
        max_waiting: int,
        begun: Callable[[], None],
    ) -> None:
        """Takes an engine (vLLM's LLMEngine), which only its own thread steps.

        Args:
            engine: Of which the front reads the configuration, and renders with.
            calls: On their way to what samples them.
            sessions: In which calls are kept.
            max_waiting: Calls at once.
            begun: Called when there is something to sample.
        """
        self.vllm_config = engine.vllm_config
        self.model_config = engine.model_config
        self.renderer = engine.renderer
        self.input_processor = engine.input_processor
        self._calls = calls
        self._sessions = sessions
        self._max_waiting = max_waiting
        self._begun = begun
        self._supported_tasks = engine.get_supported_tasks()
        self._numbers = itertools.count()

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Refuses a call when too many wait, or its session may make none.

        Asked before the answer begins, and so before its status is sent.
        """
        asked = ASKED.get()
        if asked is not None and asked.opened is not None:
            self._sessions.check(asked.opened, n)
        if self._calls.num_open + n > self._max_waiting:
            raise GracefulHTTPError(
                f"{self._calls.num_open} calls are being sampled or wait, and "
                f"endpoint.max_waiting_calls is {self._max_waiting}: ask again later",
                HTTPStatus.SERVICE_UNAVAILABLE,
            )

    async def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Samples a call; see vLLM's EngineClient."""
        params, asked = sampling_params, ASKED.get()
        opened = None if asked is None else asked.opened
        if asked is not None and opened is not None:
            rules = self._sessions.begin(opened, params.n)
            params = _ruled(params, rules)
        if params.seed is None:
            # The engine's own state does not move from step to step: without a seed, all tokens and
            # all calls would be drawn with the same noise.
            params = params.clone()
            params.seed = secrets.randbits(_SEED_BITS)
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def told(output: Any) -> None:
            # The service may have stopped meanwhile.
            if not loop.is_closed():
                loop.call_soon_threadsafe(outputs.put_nowait, output)

        # A request's own name may be its client's choice, and that of another request as well.
        call_id = f"{request_id}-{next(self._numbers)}"
        left = params.n
        drawn: dict[int, _Drawn] = {}
        is_over = False
        try:
            self._calls.begin(
                EndpointCall(
                    call_id=call_id,
                    prompt=prompt,
                    params=params,
                    told=told,
                    session_id="" if opened is None else opened.session_id,
                    images=() if asked is None else asked.images,
                )
            )
            self._begun()
            while not is_over:
                output = await outputs.get()
                if isinstance(output, BaseException):
                    is_over = True
                    raise output
                is_over = output.finished
                if asked is not None and opened is not None:
                    for completion in output.outputs:
                        one = drawn.setdefault(completion.index, _Drawn())
                        if one.is_over:
                            continue
                        one.add(completion, params.output_kind)
                        if completion.finish_reason is not None:
                            self._keep(asked, output.prompt_token_ids, completion, one)
                            left -= 1
                yield output
        finally:
            if not is_over:
                self._calls.cancel(call_id)
                self._begun()
            if opened is not None and left:
                self._sessions.drop_call(opened, left)

    def _keep(self, asked: Asked, prompt: Iterable[int], completion: Any, drawn: _Drawn) -> None:
        opened = asked.opened
        assert opened is not None
        if completion.finish_reason not in ("stop", "length"):
            raise RuntimeError(
                f"the sampler ended a call of session {opened.session_id} with "
                f"{completion.finish_reason!r}"
            )
        drawn.is_over = True
        asked.calls[completion.index] = self._sessions.end_call(
            opened,
            list(prompt),
            drawn.tokens,
            drawn.logprobs,
            [(span.start, int(span.version)) for span in completion.weight_versions],
            finish_reason=completion.finish_reason,
            is_trained=asked.is_trained,
            images=asked.images,
        )

    async def get_supported_tasks(self) -> Any:
        """What the engine can do."""
        return self._supported_tasks

    @property
    def is_running(self) -> bool:
        """Always: an engine that fails tells each call."""
        return True

    is_stopped = False
    errored = False

    @property
    def dead_error(self) -> BaseException:
        """Never asked for."""
        return RuntimeError("the sampler has ended")

    async def is_tracing_enabled(self) -> bool:
        """Never."""
        return False

    async def do_log_stats(self) -> None:
        """Nothing is logged."""

    async def check_health(self) -> None:
        """Answers while the loop does."""

    async def reset_mm_cache(self) -> None:
        """There is none."""

    async def reset_encoder_cache(self) -> None:
        """There is none."""

    def shutdown(self, timeout: float | None = None) -> None:
        """The engine is not the front's to end."""

    async def _not_served(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the engine's owner alone does this")

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: nothing is pooled."""
        raise NotImplementedError("the endpoint serves no embeddings")

    abort = _not_served
    notify_kv_transfer_request_rejected = _not_served
    start_profile = _not_served
    stop_profile = _not_served
    reset_prefix_cache = _not_served
    sleep = _not_served
    release_kv_cache_memory = _not_served
    wake_up = _not_served
    is_sleeping = _not_served
    add_lora = _not_served
    pause_generation = _not_served
    resume_generation = _not_served
    is_paused = _not_served


@dataclass(slots=True)
class _Drawn:
    """What a completion has drawn."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_over: bool = False

    def add(self, completion: Any, kind: Any) -> None:
        tokens = list(completion.token_ids)
        logprobs = [
            place[token].logprob
            for token, place in zip(tokens, completion.logprobs or (), strict=True)
        ]
        if not all(map(math.isfinite, logprobs)):
            raise RuntimeError("vLLM's log-probs are not finite: look for NaN in the weights")
        if kind == RequestOutputKind.DELTA:
            self.tokens += tokens
            self.logprobs += logprobs
        else:
            self.tokens, self.logprobs = tokens, logprobs


_NEUTRAL: Mapping[str, Any] = {
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "structured_outputs": None,
    "thinking_token_budget": None,
    "prompt_logprobs": None,
}
"""Parameters that draw from another distribution than a trainer computes, each with the value that
does not. (Prompts with log-probs are not shared with earlier calls.)"""


def _ruled(params: Any, rules: CallRules) -> Any:
    """The call's parameters as its session wants them, with the log-probs of what is drawn.

    Raises:
        VLLMValidationError: A parameter cannot be had in a session that is trained on.
    """
    ruled = params.clone()
    if ruled.logprobs is None:
        ruled.logprobs = 0
    if rules.sampling is not None:
        for name, neutral in _NEUTRAL.items():
            given = getattr(ruled, name)
            if given != neutral and (given or neutral):
                raise VLLMValidationError(
                    f"{_ASKED_BY.get(name, name)} is given, which draws tokens otherwise than the "
                    "trainer of this session computes them: leave it out",
                    parameter=_ASKED_BY.get(name, name),
                )
        drawing = {"top_p": 1.0, "top_k": 0, **drawing_arguments(rules.sampling)}
        for name, value in drawing.items():
            setattr(ruled, name, value)
    if ruled.seed is None or (rules.sampling is not None and rules.seed is not None):
        ruled.seed = rules.seed
    if rules.max_new_tokens is not None:
        most = rules.max_new_tokens
        ruled.max_tokens = most if ruled.max_tokens is None else min(ruled.max_tokens, most)
    return ruled


_ASKED_BY = {"structured_outputs": "response_format, or a tool_choice that forces a call,"}
"""What callers call a parameter."""
