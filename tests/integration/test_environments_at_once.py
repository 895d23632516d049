"""Many calls of environments at once in one confined process: each gets what is its own."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.worker_processes import worker_processes

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.environments import confined, line
from rolemesh.engine.environments.base import EnvironmentFailedError
from rolemesh.engine.environments.confined import EnvironmentProcess
from rolemesh.engine.sandbox.host import find_sandbox
from rolemesh.engine.specs import PythonEnvironmentSpec

SANDBOX = find_sandbox("auto")
WORKER = "rolemesh.engine.environments.worker"
BEGUN_S = 1.0
"""A busy machine takes its time to begin a call."""
ENDED_S = 10.0

pytestmark = pytest.mark.skipif(not SANDBOX.is_there, reason=f"no sandbox here: {SANDBOX}")

CLASSES = """
import asyncio
import threading
import time
from rolemesh.engine.environments.base import Environment, Observation

INSIDE, MOST, CANCELLED = [], [0], []

class Inside:
    def __enter__(self):
        INSIDE.append(1)
        MOST[0] = max(MOST[0], len(INSIDE))

    def __exit__(self, *error):
        INSIDE.pop()

class Threaded(Environment):
    def reset(self, row):
        self._name = row.answer

    def step(self, completion_text):
        what, _, seconds = completion_text.partition(" ")
        if what == "most":
            return Observation(reward=MOST[0])
        if what == "peak":
            parts = [bytes(100_000) for _ in range(20)]
            time.sleep(0.5)
            status = open("/proc/self/status").read()
            return Observation(reward=int(status.split("VmPeak:")[1].split()[0]) / 1024)
        if what == "large":
            bytearray(1 << 30)
        while what == "flood":
            print("y" * 1000)
        if what == "print":
            print("y" * 100_000, flush=True)
        with Inside():
            time.sleep(float(seconds))
        return Observation(text=f"{self._name} {what}")

class OnLoop(Environment):
    async def reset(self, row):
        self._name, self._loop = row.answer, asyncio.get_running_loop()
        self._task = asyncio.create_task(asyncio.sleep(0.01, "bound"))
        return "hi"

    async def step(self, completion_text, end):
        what, _, seconds = completion_text.partition(" ")
        if what == "bound":
            is_same = asyncio.get_running_loop() is self._loop
            return Observation(text=f"{await self._task} {is_same} {end}")
        if what == "cancelled":
            return Observation(reward=len(CANCELLED))
        if what == "raise":
            return {}["missing"]
        if what == "leave":
            raise SystemExit(3)
        if what == "none":
            return None
        if what == "late":
            raise TimeoutError("mine")
        if what == "block":
            time.sleep(1000)
        with Inside():
            try:
                await asyncio.sleep(float(seconds))
            except asyncio.CancelledError:
                CANCELLED.append(1)
                while what == "stay":
                    await asyncio.sleep(0.01)
                if what != "swallow":
                    raise
        return Observation(text=f"{self._name} {what}")
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., EnvironmentProcess]:
    file = tmp_path_factory.mktemp("code") / "own.py"
    file.write_text(CLASSES)

    def start(name: str, **spec: Any) -> EnvironmentProcess:
        whole = PythonEnvironmentSpec(environment=f"{file}:{name}", **spec)
        return EnvironmentProcess(whole, SANDBOX)

    return start


@pytest.fixture(scope="module")
def shared(started: Callable[..., EnvironmentProcess]) -> Callable[[str], EnvironmentProcess]:
    """A process that no test ends: it imports for most of a second."""
    return functools.cache(started)


def begun(process: EnvironmentProcess, number: int) -> list[Any]:
    """Instances, which have been reset; each has its place as its name."""
    made: list[Any] = [process.make() for _ in range(number)]
    for place, it in enumerate(made):
        row = Prompt(prompt_id=place, text="Q:", tokens=(1,), answer=str(place), metadata="{}")
        it.reset(row)
    return made


class AtOnce:
    """Calls, each in a thread of its own: what they gave or raised, and in which order."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.ended: list[int] = []
        self._pool = ThreadPoolExecutor(len(calls))
        self._began = time.monotonic()
        self._outcomes = [self._pool.submit(self._run, *it) for it in enumerate(calls)]

    def _run(self, place: int, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except EnvironmentFailedError as error:
            return str(error)
        finally:
            self.ended.append(place)

    def wait(self) -> tuple[list[Any], float]:
        outcomes = [it.result(60) for it in self._outcomes]
        took_s = time.monotonic() - self._began
        self._pool.shutdown()
        return outcomes, took_s


def step(it: Any, text: str) -> Callable[[], Any]:
    return lambda: it.step(text, "end_token")


@pytest.mark.parametrize("name", ["Threaded", "OnLoop"])
def test_calls_take_their_time_together_and_each_thread_gets_its_own_answer(
    shared: Callable[[str], EnvironmentProcess], name: str
) -> None:
    made = begun(shared(name), 16)
    calls = [step(it, f"say{n} {1.5 - n / 16}") for n, it in enumerate(made)]
    at_once = AtOnce(calls)
    outcomes, took_s = at_once.wait()
    assert [it.text for it in outcomes] == [f"{n} say{n}" for n in range(16)]
    # One after another they sleep 16.5 s.
    assert took_s < 8
    assert at_once.ended.index(15) < at_once.ended.index(0)


@pytest.mark.parametrize("name", ["Threaded", "OnLoop"])
def test_calls_of_one_instance_never_overlap(
    shared: Callable[[str], EnvironmentProcess], name: str
) -> None:
    it, other = begun(shared(name), 2)
    outcomes, took_s = AtOnce([step(it, f"say{n} 0.3") for n in range(4)]).wait()
    assert sorted(one.text for one in outcomes) == [f"0 say{n}" for n in range(4)]
    assert took_s >= 4 * 0.3
    # While those of another one do overlap with them.
    outcomes, took_s = AtOnce([step(one, "say 1") for one in (it, other)]).wait()
    assert took_s < 2


def test_a_coroutine_beyond_its_time_fails_alone(
    started: Callable[..., EnvironmentProcess],
) -> None:
    others = set(worker_processes(WORKER))
    process = started("OnLoop", timeout_s=3.0)
    slow, swallowing, fine = begun(process, 3)
    (worker,) = set(worker_processes(WORKER)) - others
    late = AtOnce([step(slow, "say 1000"), step(swallowing, "swallow 1000")])
    time.sleep(2)
    beside = AtOnce([step(fine, "say 1.5")])
    for said in late.wait()[0]:
        assert "own.py:OnLoop' gave no answer within 3 s for a call of step, which was" in said
        assert said.endswith("make it faster, or raise environment.timeout_s")
    assert beside.wait()[0][0].text == "2 say"
    assert slow.step("cancelled 0", "end_token").reward == 2.0
    assert worker.is_running()


@pytest.mark.parametrize("text", ["stay 1000", "block"])
def test_a_coroutine_that_cannot_be_cancelled_ends_the_process(
    started: Callable[..., EnvironmentProcess], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "CANCEL_S", 0.5)
    process = started("OnLoop", timeout_s=1.0)
    it = begun(process, 1)[0]
    with pytest.raises(EnvironmentFailedError, match=r"within 1 s .*, and its process was ended"):
        it.step(text)
    assert begun(process, 1)[0].step("say 0").text == "0 say"


def test_a_stuck_thread_ends_the_process_and_every_call_says_so(
    started: Callable[..., EnvironmentProcess],
) -> None:
    others = set(worker_processes(WORKER))
    process = started("Threaded", timeout_s=3.0)
    stuck, first, second = begun(process, 3)
    (worker,) = set(worker_processes(WORKER)) - others
    late = AtOnce([step(stuck, "say 1000")])
    time.sleep(BEGUN_S)
    beside = AtOnce([step(it, "say 1000") for it in (first, second)])
    why = "gave no answer within 3 s for a call of step"
    remedy = ": make it faster, or raise environment.timeout_s"
    (said,), took_s = late.wait()
    assert said.endswith(f"own.py:Threaded' {why}, and its process was ended{remedy}")
    assert took_s < ENDED_S
    for text in beside.wait()[0]:
        assert text.startswith("the process of ")
        assert text.endswith(f"own.py:Threaded' was ended because another call {why}{remedy}")
    assert not worker.is_running()
    with pytest.raises(EnvironmentFailedError, match="was ended because another call"):
        first.step("say 0")
    assert begun(process, 1)[0].step("say 0").text == "0 say"


def test_a_process_that_is_killed_fails_all_calls_in_flight_and_is_started_anew(
    started: Callable[..., EnvironmentProcess],
) -> None:
    others = set(worker_processes(WORKER))
    process = started("Threaded")
    made = begun(process, 3)
    (worker,) = set(worker_processes(WORKER)) - others
    calls = AtOnce([step(it, "say 1000") for it in made])
    time.sleep(BEGUN_S)
    worker.kill()
    for said in calls.wait()[0]:
        assert "own.py:Threaded' has ended (its process has ended): it may have crashed" in said
    assert begun(process, 1)[0].step("say 0").text == "0 say"


@pytest.mark.parametrize(
    ("text", "own", "of_others"),
    [
        ("large", "MemoryError()", "another call of "),
        ("flood", "printed more than 1048576 bytes in one call", "printed more than 1048576 bytes"),
    ],
)
def test_a_call_beyond_a_bound_fails_all_calls_in_flight(
    started: Callable[..., EnvironmentProcess], text: str, own: str, of_others: str
) -> None:
    process = started("Threaded", memory_mib=512)
    wild, *made = begun(process, 3)
    beside = AtOnce([step(it, "say 1000") for it in made])
    time.sleep(BEGUN_S)
    with pytest.raises(EnvironmentFailedError) as no:
        wild.step(text)
    assert own in str(no.value)
    for said in beside.wait()[0]:
        assert of_others in said
        assert "its process was ended: " in said
    assert begun(process, 1)[0].step("say 0").text == "0 say"


def test_calls_print_their_share_each(started: Callable[..., EnvironmentProcess]) -> None:
    made = begun(started("Threaded", max_output_bytes=150_000), 8)
    outcomes, took_s = AtOnce([step(it, "print 1") for it in made]).wait()
    assert [it.text for it in outcomes] == [f"{n} print" for n in range(8)]
    assert took_s < 8


def test_a_call_that_waits_for_a_thread_does_not_lose_its_time(
    started: Callable[..., EnvironmentProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confined, "num_threads", lambda _: 2)
    made = begun(started("Threaded", timeout_s=2.5), 8)
    outcomes, took_s = AtOnce([step(it, "say 1") for it in made]).wait()
    assert [it.text for it in outcomes] == [f"{n} say" for n in range(8)]
    assert took_s >= 4
    assert made[0].step("most").reward == 2.0


def test_many_threads_leave_the_address_space_to_the_class(
    started: Callable[..., EnvironmentProcess],
) -> None:
    made = begun(started("Threaded", memory_mib=1024), 40)
    outcomes, took_s = AtOnce([step(it, "peak") for it in made]).wait()
    assert took_s < 40 * 0.5 / 2
    # 32 stacks of 8 MiB, and two heaps of 64 MiB, beside what one thread needs.
    assert max(it.reward for it in outcomes) < 800


def test_what_reset_bound_to_the_loop_serves_step(
    shared: Callable[[str], EnvironmentProcess],
) -> None:
    made = begun(shared("OnLoop"), 4)
    outcomes, _ = AtOnce([step(it, "bound") for it in made]).wait()
    assert [it.text for it in outcomes] == ["bound True end_token"] * 4


def test_a_coroutine_that_fails_says_why(shared: Callable[[str], EnvironmentProcess]) -> None:
    it = begun(shared("OnLoop"), 1)[0]
    for text, message in (
        ("raise", r"^KeyError\('missing'\) \(at .*own\.py:\d+, in step\)$"),
        ("leave", r"^SystemExit\(3\) \(at"),
        ("none", "step gave a NoneType: return an Observation"),
        ("late", r"^TimeoutError\('mine'\) \(at"),
    ):
        with pytest.raises(EnvironmentFailedError, match=message):
            it.step(text)
    assert it.step("say 0").text == "0 say"


def test_the_process_outlives_the_thread_that_wanted_it(
    started: Callable[..., EnvironmentProcess],
) -> None:
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.extend(begun(started("Threaded"), 1)))
    thread.start()
    thread.join()
    time.sleep(BEGUN_S)
    assert made[0].step("say 0").text == "0 say"
