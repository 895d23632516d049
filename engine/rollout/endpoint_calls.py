"""Calls of an endpoint, which a vLLM engine samples beside whatever else it works on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Told = Callable[[Any], None]
"""Is handed each output of a call (vLLM's RequestOutput), or the error that ended it. Called on the
compute thread; it must not block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointCall:
    """One call, as vLLM's front has made it."""

    call_id: str
    """Never used before in this engine."""
    prompt: Any
    """VLLM's EngineInput: the token ids."""
    params: Any
    """VLLM's SamplingParams."""
    told: Told


@dataclass(slots=True)
class _Running:
    call: EndpointCall
    engine_id: str = ""
    """By which the engine's own parts know it; empty until it is in the engine."""


class EndpointCalls:
    """Calls on their way from a loop to the compute thread, and their outputs on the way back.

    Invariant: a call is told outputs, the last of them finished, or one error; none after `cancel`.
    `begin` and `cancel` may come from any thread, everything else from the one that owns the
    engine. What is in the engine stays there between two turns of that thread: new weights do not
    end it, and each output says which of its tokens came from which version.

    Example::

        calls.begin(EndpointCall(call_id="chat-1", prompt=prompt, params=params, told=told))
        calls.attend(engine, lora_request=None)  # on the compute thread
        others = calls.taken(engine.step())
    """

    def __init__(self) -> None:
        self.has_come = threading.Event()
        """Set when a call begins; whoever waits for one clears it."""
        self._new: deque[EndpointCall] = deque()
        self._cancelled: deque[str] = deque()
        self._running: dict[str, _Running] = {}
        self._lock = threading.Lock()
        """Of the list of new calls, from which one that begins must not be lost."""
        self._closed_by: BaseException | None = None
        """Told to calls that come after the end."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do for any call."""
        return not (self._new or self._running or self._cancelled)

    @property
    def num_open(self) -> int:
        """Calls that have not ended."""
        return len(self._new) + len(self._running)

    def begin(self, call: EndpointCall) -> None:
        """Has a call sampled as soon as the engine's owner attends to it."""
        with self._lock:
            closed_by = self._closed_by
            if closed_by is None:
                self._new.append(call)
        if closed_by is not None:
            call.told(closed_by)
        self.has_come.set()

    def cancel(self, call_id: str) -> None:
        """Ends a call that nobody listens to any more; one that has ended already is none."""
        self._cancelled.append(call_id)
        self.has_come.set()

    def attend(self, engine: Any, *, lora_request: Any) -> None:
        """Puts new calls into the engine, and takes those out that were cancelled.

        Args:
            engine: VLLM's LLMEngine.
            lora_request: VLLM's, of the adapter that is trained; None: the weights alone.
        """
        while self._new:
            call = self._new.popleft()
            running = self._running[call.call_id] = _Running(call)
            try:
                running.engine_id = engine.add_request(
                    call.call_id, call.prompt, call.params, lora_request=lora_request
                )
            except Exception as error:  # a prompt that this engine refuses is its caller's to hear
                del self._running[call.call_id]
                call.told(error)
        while self._cancelled:
            gone = self._running.pop(self._cancelled.popleft(), None)
            if gone is not None:
                engine.abort_request([gone.engine_id], internal=True)

    def taken(self, outputs: Iterable[Any]) -> list[Any]:
        """Tells the calls what a step of the engine has given; returns the outputs of others."""
        others = []
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is None:
                others.append(output)
                continue
            if output.finished:
                del self._running[output.request_id]
            running.call.told(output)
        return others

    def fail(self, engine: Any, error: BaseException) -> None:
        """Ends all calls with an error, and takes them out of the engine."""
        running, self._running = self._running, {}
        with self._lock:
            new, self._new = self._new, deque()
        engine.abort_request([one.engine_id for one in running.values()], internal=True)
        for call in (*(one.call for one in running.values()), *new):
            call.told(error)

    def close(self, engine: Any, error: BaseException) -> None:
        """Ends all calls with an error, and those that still come."""
        with self._lock:
            self._closed_by = error
        self.fail(engine, error)
