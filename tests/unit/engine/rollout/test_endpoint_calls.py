"""Calls between a loop and an engine, which is scripted here."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from rolemesh.engine.images.prompt_images import PromptImage
from rolemesh.engine.parallel.mesh import RankGroup
from rolemesh.engine.rollout.endpoint import calls as endpoint_calls
from rolemesh.engine.rollout.endpoint.calls import EndpointCall, EndpointCalls
from rolemesh.engine.rollout.endpoint.wire import WireError


@dataclass(frozen=True)
class Output:
    """As much of vLLM's RequestOutput as counts."""

    request_id: str
    finished: bool = False
    tokens: tuple[int, ...] = ()


@dataclass
class ScriptedEngine:
    """As much of vLLM's LLMEngine as counts: ids of its own, and nothing after an abort."""

    added: list[tuple[str, Any, Any, Any]] = field(default_factory=list)
    running: dict[str, str] = field(default_factory=dict)
    """The caller's id by the engine's own."""
    aborted: list[str] = field(default_factory=list)
    refuses: Callable[[Any], None] = lambda prompt: None

    def add_request(self, call_id: str, prompt: Any, params: Any, *, lora_request: Any) -> str:
        self.refuses(prompt)
        self.added.append((call_id, prompt, params, lora_request))
        own = f"{call_id}-{len(self.added):08x}"
        self.running[own] = call_id
        return own

    def abort_request(self, request_ids: list[str], internal: bool = False) -> None:
        assert internal, "the same id of a caller may stand for several requests"
        self.aborted += request_ids
        for own in request_ids:
            del self.running[own]


def as_it_is(call: EndpointCall) -> Any:
    """A prompt with images, where the engine is scripted."""
    return call.prompt, [image.sha256 for image in call.images]


class Caller:
    """One call, and what it is told."""

    def __init__(self, call_id: str, prompt: Any = "prompt") -> None:
        self.told: list[Any] = []
        self.call = EndpointCall(
            call_id=call_id, prompt=prompt, params="params", told=self.told.append
        )


@pytest.fixture
def calls() -> EndpointCalls:
    return EndpointCalls()


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


def begun(calls: EndpointCalls, *names: str) -> list[Caller]:
    callers = [Caller(name) for name in names]
    for caller in callers:
        calls.begin(caller.call)
    return callers


def test_a_call_reaches_the_engine_once_and_is_told_each_output(
    calls: EndpointCalls, engine: ScriptedEngine
) -> None:
    assert calls.is_empty
    (caller,) = begun(calls, "a")
    assert (calls.is_empty, calls.num_open, calls.has_come.is_set()) == (False, 1, True)
    calls.attend(engine, lora_request="adapter", shown=as_it_is)
    calls.attend(engine, lora_request="adapter", shown=as_it_is)
    assert engine.added == [("a", "prompt", "params", "adapter")]
    assert (calls.is_empty, calls.num_open) == (False, 1)
    first, last = Output("a", tokens=(1,)), Output("a", finished=True, tokens=(1, 2))
    assert calls.taken([first]) == []
    assert calls.taken([last]) == []
    assert caller.told == [first, last]
    assert (calls.is_empty, calls.num_open) == (True, 0)
    assert engine.aborted == []


def test_outputs_of_a_generation_are_given_back_in_their_order(
    calls: EndpointCalls, engine: ScriptedEngine
) -> None:
    (caller,) = begun(calls, "a")
    calls.attend(engine, lora_request=None, shown=as_it_is)
    others = [Output("0"), Output("1", finished=True)]
    assert calls.taken([others[0], Output("a"), others[1]]) == others
    assert caller.told == [Output("a")]


def test_a_call_of_several_completions_ends_with_the_last_of_them(
    calls: EndpointCalls, engine: ScriptedEngine
) -> None:
    (caller,) = begun(calls, "a")
    calls.attend(engine, lora_request=None, shown=as_it_is)
    # VLLM says `finished` when the last completion of a request is over.
    outputs = [Output("a"), Output("a"), Output("a", finished=True)]
    for output in outputs:
        calls.taken([output])
    assert caller.told == outputs
    assert calls.is_empty


def test_a_call_that_is_cancelled_in_the_engine_leaves_it_and_hears_nothing_more(
    calls: EndpointCalls, engine: ScriptedEngine
) -> None:
    gone, stays = begun(calls, "gone", "stays")
    calls.attend(engine, lora_request=None, shown=as_it_is)
    calls.has_come.clear()
    calls.cancel("gone")
    # Else nobody would take it out until another call comes.
    assert calls.has_come.is_set()
    calls.attend(engine, lora_request=None, shown=as_it_is)
    assert list(engine.running.values()) == ["stays"]
    assert calls.taken([Output("stays", finished=True)]) == []
    assert gone.told == []
    assert stays.told == [Output("stays", finished=True)]
    assert calls.is_empty


def test_a_call_that_is_cancelled_before_it_is_in_the_engine_does_not_stay_there(
    calls: EndpointCalls, engine: ScriptedEngine
) -> None:
    (gone,) = begun(calls, "gone")
    calls.cancel("gone")
    calls.attend(engine, lora_request=None, shown=as_it_is)
    assert engine.running == {}
    assert (gone.told, calls.is_empty, calls.num_open) == ([], True, 0)


def test_cancelling_what_has_ended_is_nothing(calls: EndpointCalls, engine: ScriptedEngine) -> None:
    begun(calls, "a")
    calls.attend(engine, lora_request=None, shown=as_it_is)
    calls.taken([Output("a", finished=True)])
    calls.cancel("a")
    calls.cancel("never was")
    assert not calls.is_empty
    calls.attend(engine, lora_request=None, shown=as_it_is)
    assert (engine.aborted, calls.is_empty) == ([], True)


def test_a_prompt_that_the_engine_refuses_is_told_to_its_caller_alone(
    calls: EndpointCalls, engine: ScriptedEngine
) -> None:
    def refuse(prompt: Any) -> None:
        if prompt == "long":
            raise ValueError("the prompt is too long")

    engine.refuses = refuse
    bad, good = Caller("bad", "long"), Caller("good")
    for caller in (bad, good):
        calls.begin(caller.call)
    calls.attend(engine, lora_request=None, shown=as_it_is)
    (error,) = bad.told
    assert str(error) == "the prompt is too long"
    assert list(engine.running.values()) == ["good"]
    assert calls.num_open == 1


def test_an_error_of_the_engine_ends_all_calls_and_later_ones_go_on(
    calls: EndpointCalls, engine: ScriptedEngine
) -> None:
    (running,) = begun(calls, "running")
    calls.attend(engine, lora_request=None, shown=as_it_is)
    (waiting,) = begun(calls, "waiting")
    error = RuntimeError("the engine broke")
    calls.fail(engine, error)
    assert running.told == waiting.told == [error]
    assert (engine.running, calls.is_empty) == ({}, True)
    (later,) = begun(calls, "later")
    calls.attend(engine, lora_request=None, shown=as_it_is)
    calls.taken([Output("later", finished=True)])
    assert later.told == [Output("later", finished=True)]


def test_after_the_end_calls_hear_why(calls: EndpointCalls, engine: ScriptedEngine) -> None:
    (running,) = begun(calls, "running")
    calls.attend(engine, lora_request=None, shown=as_it_is)
    (waiting,) = begun(calls, "waiting")
    error = RuntimeError("the service ends")
    calls.close(engine, error)
    (later,) = begun(calls, "later")
    assert running.told == waiting.told == later.told == [error]
    assert (engine.running, calls.is_empty) == ({}, True)


def test_a_call_that_begins_while_the_end_comes_hears_of_it(
    calls: EndpointCalls, engine: ScriptedEngine
) -> None:
    caller, is_closed = Caller("late"), threading.Event()

    def close() -> None:
        calls.close(engine, RuntimeError("the service ends"))
        is_closed.set()

    closing = threading.Thread(target=close)

    class EndsMeanwhile(deque[EndpointCall]):
        def append(self, call: EndpointCall) -> None:
            closing.start()
            # Until the end is over, or waits for this call to have begun.
            is_closed.wait(0.2)
            super().append(call)

    calls._new = EndsMeanwhile()
    calls.begin(caller.call)
    closing.join()
    assert [str(error) for error in caller.told] == ["the service ends"]


class Told:
    """As much of the slices' messages as counts: one thread plays both slices in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.last: Any = None
        monkeypatch.setattr(endpoint_calls, "gather_facts", self.gather)
        pair = (RankGroup((0, 1), index, None) for index in (0, 1))
        self.first, self.second = (EndpointCalls(group) for group in pair)
        self.engines = (ScriptedEngine(), ScriptedEngine())

    def gather(self, facts: Any, group: RankGroup, device: object) -> list[Any]:
        if group.index == 0:
            self.last = json.loads(json.dumps(facts))
        return [self.last, None]

    def attend(self, *, is_over: bool = False) -> tuple[bool, bool]:
        first, second = self.engines
        return (
            self.first.attend(first, lora_request=None, shown=as_it_is, is_over=is_over),
            self.second.attend(second, lora_request=None, shown=as_it_is),
        )


def test_slices_put_the_same_into_their_engines_before_the_same_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampling = pytest.importorskip("vllm.sampling_params")
    both = Told(monkeypatch)
    assert (both.first.follows, both.second.follows) == (False, True)
    callers = [Caller(name, {"type": "token", "prompt_token_ids": [1, 2]}) for name in "ab"]
    image = PromptImage.of(b"a picture", (1, 2, 2))
    object.__setattr__(callers[1].call, "images", (image,))
    for caller in callers:
        object.__setattr__(caller.call, "params", sampling.SamplingParams(seed=7))
        both.first.begin(caller.call)
    # A turn that is over leaves what has come to the next one.
    assert both.attend(is_over=True) == (False, False)
    assert not both.first.are_running
    assert both.attend() == (True, True)
    first, second = both.engines
    assert first.added == second.added != []
    assert [prompt["type"] for _, prompt, *_ in first.added[:1]] == ["token"]
    assert first.added[1][1] == (callers[1].call.prompt, [image.sha256])
    assert both.second.are_running
    both.first.cancel("a")
    assert both.attend() == (True, True)
    assert list(first.running.values()) == list(second.running.values()) == ["b"]
    for calls in (both.first, both.second):
        calls.taken([Output("b", finished=True)])
    assert callers[1].told == [Output("b", finished=True)]
    assert not both.second.are_running


def test_a_prompt_that_other_slices_cannot_be_told_is_its_callers_to_hear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = Told(monkeypatch)
    caller = Caller("image", {"type": "multimodal"})
    both.first.begin(caller.call)
    assert both.attend() == (True, True)
    (error,) = caller.told
    assert isinstance(error, WireError)
    assert [engine.added for engine in both.engines] == [[], []]


def test_a_turn_waits_for_calls_only_where_there_are_none(calls: EndpointCalls) -> None:
    calls.has_come.set()
    calls.wait()
    assert not calls.has_come.is_set()
    begun(calls, "a")
    # Or each step of a busy engine would wait.
    calls.has_come.clear()
    before = time.monotonic()
    for _ in range(100):
        calls.wait()
    assert time.monotonic() - before < 50 * endpoint_calls.IDLE_S
