"""Calls of an endpoint, which a vLLM engine samples beside whatever else it works on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rolemesh.engine.images.prompt_images import PromptImage
from rolemesh.engine.parallel.agreement import gather_facts
from rolemesh.engine.parallel.mesh import RankGroup
from rolemesh.engine.rollout.endpoint import wire as endpoint_wire

_CPU = torch.device("cpu")
"""Where messages of the ranks lie: a step must not wait for a GPU to hear that nothing came."""

IDLE_S = 0.05
"""How long a turn waits for calls where there is nothing to sample."""

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
    session_id: str = ""
    """Of the session that it belongs to; empty: of none."""
    images: Sequence[PromptImage] = ()
    """Of the prompt, in the order of their places among its tokens, which are expanded."""


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

    Where the sampler is cut into slices, calls come to the first of them. It tells the others what
    it puts into its engine before each step, and so all engines take the same steps; the others
    have an object of this class too, whose calls are told nothing.

    Example::

        calls.begin(EndpointCall(call_id="chat-1", prompt=prompt, params=params, told=told))
        calls.attend(engine, lora_request=None, shown=shown)  # on the compute thread
        others = calls.taken(engine.step())
    """

    def __init__(self, group: RankGroup | None = None) -> None:
        """Begins empty; `group` are the slices of this sampler, where there are several."""
        self.has_come = threading.Event()
        """Set when a call begins, or a turn is to look again; whoever waits for it clears it."""
        self._group = group if group is not None and group.size > 1 else None
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
    def are_running(self) -> bool:
        """Whether calls are in the engine: the same on all slices after `attend`."""
        return bool(self._running)

    @property
    def follows(self) -> bool:
        """Whether another slice is told of calls, and says what this one does."""
        return self._group is not None and self._group.index > 0

    @property
    def num_open(self) -> int:
        """Calls that have not ended."""
        return len(self._new) + len(self._running)

    def wait(self) -> None:
        """Waits a moment for a call, unless there are some. On the engine's thread."""
        if self.is_empty:
            self.has_come.wait(IDLE_S)
        # Before the turn looks again at what has come: nothing is missed.
        self.has_come.clear()

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

    def attend(
        self,
        engine: Any,
        *,
        lora_request: Any,
        shown: Callable[[EndpointCall], Any],
        is_over: bool = False,
    ) -> bool:
        """Puts new calls into the engine, and takes those out that were cancelled.

        All slices of a sampler call it together.

        Args:
            engine: VLLM's LLMEngine.
            lora_request: VLLM's, of the adapter that is trained; None: the weights alone.
            shown: Makes a prompt with images as the engine takes it, of a call that has some.
            is_over: Whether the turn is over, on the slice that hears of calls. What has come
                waits for the next one then.

        Returns:
            Whether the turn goes on, on all slices.
        """
        news = self._news(is_over)
        if news is None:
            return False
        new, cancelled = news
        for call in new:
            running = self._running[call.call_id] = _Running(call)
            try:
                prompt = shown(call) if call.images else call.prompt
                running.engine_id = engine.add_request(
                    call.call_id, prompt, call.params, lora_request=lora_request
                )
            except Exception as error:  # a prompt that this engine refuses is its caller's to hear
                del self._running[call.call_id]
                call.told(error)
        for call_id in cancelled:
            gone = self._running.pop(call_id, None)
            if gone is not None:
                engine.abort_request([gone.engine_id], internal=True)
        return True

    def _news(self, is_over: bool) -> tuple[list[EndpointCall], list[str]] | None:
        """What has come since, the same on all slices; None: the turn is over."""
        if self._group is not None and self.follows:
            told = gather_facts(None, self._group, _CPU)[0]
            return None if told is None else ([_of_the_first(one) for one in told[0]], told[1])
        new: list[EndpointCall] = []
        cancelled: list[str] = []
        if not is_over:
            # A call that is cancelled was begun before, by the same thread: this order loses none.
            while self._cancelled:
                cancelled.append(self._cancelled.popleft())
            while self._new:
                new.append(self._new.popleft())
        if self._group is not None:
            packed, new = _packed(new)
            gather_facts(None if is_over else [packed, cancelled], self._group, _CPU)
        return None if is_over else (new, cancelled)

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


def _packed(calls: Iterable[EndpointCall]) -> tuple[list[list[str]], list[EndpointCall]]:
    """Calls as other slices are told of them; those that cannot be told hear why."""
    packed, kept = [], []
    for call in calls:
        try:
            text = endpoint_wire.pack_call(call.prompt, call.params, call.images)
            packed.append([call.call_id, text])
            kept.append(call)
        except endpoint_wire.WireError as error:
            call.told(error)
    return packed, kept


def _of_the_first(told: list[str]) -> EndpointCall:
    """A call that the first slice has, as the others have it: nobody hears of it there."""
    call_id, packed = told
    prompt, params, images = endpoint_wire.unpack_call(packed)
    return EndpointCall(
        call_id=call_id, prompt=prompt, params=params, images=images, told=lambda output: None
    )
