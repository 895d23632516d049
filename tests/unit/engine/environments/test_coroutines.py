"""Environments whose calls are coroutines, in the sampler's own process."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.environments.base import (
    Environment,
    Observation,
    observation_of,
    opening_of,
    raised,
)

ROW = Prompt(prompt_id=3, text="Q:", tokens=(1, 2), answer="7", metadata="{}")


class OnLoop(Environment):
    async def reset(self, row: Prompt) -> Any:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(asyncio.sleep(0.01, row.answer))
        return "hi" if row.text == "Q:" else 3

    async def step(self, completion_text: str, end: str = "") -> Any:
        match completion_text:
            case "bound":
                is_same = asyncio.get_running_loop() is self._loop
                return Observation(text=f"{await self._task} {is_same} {end}")
            case "raise":
                return {}["missing"]
            case "leave":
                raise SystemExit(3)
            case "task leaves":
                return await asyncio.create_task(self.step("leave"))
            case "none":
                return None
        await asyncio.sleep(0.3)
        return Observation(text=completion_text)


class Handing(OnLoop):
    """Its calls are functions that give coroutines, as some decorators make them."""

    def step(self, completion_text: str, end: str = "") -> Any:
        return super().step(completion_text, end)


@pytest.mark.parametrize("kind", [OnLoop, Handing])
def test_what_reset_bound_to_the_loop_serves_step_from_any_thread(kind: type[OnLoop]) -> None:
    it = kind()
    assert opening_of(it, ROW) == "hi"
    with ThreadPoolExecutor(1) as other:
        said = other.submit(observation_of, it, "bound", "length").result()
    assert said.text == "7 True length"


def test_calls_from_many_threads_take_their_time_together() -> None:
    with ThreadPoolExecutor(16) as threads:
        began = time.monotonic()
        asked = [
            threads.submit(observation_of, OnLoop(), f"say {n}", "end_token") for n in range(16)
        ]
        assert [one.result().text for one in asked] == [f"say {n}" for n in range(16)]
    assert time.monotonic() - began < 8 * 0.3


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        ("raise", KeyError, "KeyError('missing') (at "),
        ("leave", SystemExit, "SystemExit(3) (at "),
        ("task leaves", SystemExit, "SystemExit(3) (at "),
        ("none", TypeError, "step gave a NoneType: return an Observation"),
    ],
)
def test_errors_are_raised_here_with_their_place(
    text: str, kind: type[BaseException], told: str
) -> None:
    with pytest.raises(kind) as no:
        observation_of(OnLoop(), text, "end_token")
    assert told in raised(no.value)
    assert kind is TypeError or "test_coroutines.py:" in raised(no.value)
    # The loop goes on for all others.
    assert observation_of(OnLoop(), "fine", "end_token").text == "fine"


def test_a_reset_that_gives_no_text_is_told() -> None:
    row = Prompt(prompt_id=3, text="other", tokens=(1,), answer="7", metadata="{}")
    with pytest.raises(TypeError, match="reset gave a int: return text, or None"):
        opening_of(OnLoop(), row)


def test_a_call_that_failed_keeps_no_instance() -> None:
    it = OnLoop()
    gone = weakref.ref(it)
    gc.disable()
    try:
        with pytest.raises(KeyError):
            observation_of(it, "raise", "end_token")
        del it
        until = time.monotonic() + 5
        while gone() is not None and time.monotonic() < until:
            time.sleep(0.01)
        assert gone() is None
    finally:
        gc.enable()
    assert "environments" in {thread.name for thread in threading.enumerate()}
