"""Environments of users in a process of their own, within a sandbox: same answers, less reach."""

from __future__ import annotations

import gc
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from support.scripted_sampler import AsciiTokenizer, ScriptedBackend
from support.services import assert_same
from support.worker_processes import worker_processes

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.environments.base import Environment, EnvironmentFailedError
from rolemesh.engine.environments.confined import EnvironmentProcess
from rolemesh.engine.environments.factory import environment_maker
from rolemesh.engine.granted.user_code import UserCodeError
from rolemesh.engine.rollout.episodes.episodes import EpisodeRunner
from rolemesh.engine.rollout.sampling import sample_experience
from rolemesh.engine.sandbox.host import Sandbox, find_sandbox
from rolemesh.engine.specs import PythonEnvironmentSpec, SamplingSpec

SANDBOX = find_sandbox("auto")
NONE = Sandbox(kind="none", lacks="the control of these tests")
WORKER = "rolemesh.engine.environments.worker"
ROW = Prompt(prompt_id=3, text="Q:", tokens=(1, 2), answer="7", metadata='{"level": 1}')
ENDED_S = 10.0
"""A busy machine takes its time to end a process."""

pytestmark = pytest.mark.skipif(not SANDBOX.is_there, reason=f"no sandbox here: {SANDBOX}")

CLASSES = """
import os
import stat
import time
from pathlib import Path
from rolemesh.engine.environments.base import Environment, Observation

LIVING = []

class Talk(Environment):
    stop = ("!", "?")

    def __init__(self, greeting=None):
        self._greeting, self._turns = greeting, 0
        LIVING.append(1)

    def __del__(self):
        LIVING.pop()

    def reset(self, row):
        self._row = row
        return self._greeting

    def step(self, completion_text, end):
        self._turns += 1
        print("turn", self._turns, flush=True)
        if completion_text == "living":
            return Observation(reward=len(LIVING), done=True)
        if completion_text == "messages":
            return Observation(messages=[{"role": "tool", "content": "x", "name": "y"}])
        said = f"{self._turns} {end} {completion_text} {self._row.answer} {self._row.metadata}"
        return Observation(text=said, reward=1 / 3, done=self._turns == 3)

class Bad(Talk):
    def step(self, completion_text):
        if completion_text == "raise":
            return {}["missing"]
        if completion_text == "leave":
            raise SystemExit(3)
        if completion_text == "nan":
            return Observation(reward=float("nan"))
        if completion_text == "none":
            return None
        if completion_text == "die":
            os._exit(3)
        Path(completion_text).read_bytes()
        return Observation(text=os.environ.get("MY_TOOL", "no tool"))

class Wild(Talk):
    def step(self, completion_text):
        if completion_text == "hang":
            time.sleep(1000)
        if completion_text == "drip":  # a frame of 8 MiB, byte by byte
            os.write(connection(), b"\\x00\\x80\\x00\\x00")
            while True:
                os.write(connection(), b" ")
        if completion_text == "header":
            os.write(connection(), b"\\x00")
            os._exit(3)
        if completion_text == "last words":
            print("so long", flush=True)
            os._exit(3)
        if completion_text == "large":
            bytearray(1 << 30)
        if completion_text == "flood":
            while True:
                print("y" * 1000)
        print("hello" + chr(27) + "[31m\\n" + "y" * 100_000, flush=True)
        return Observation(reward=1.0, done=True)

def connection():
    return next(
        int(name) for name in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{name}") and stat.S_ISSOCK(os.fstat(int(name)).st_mode)
    )
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (folder := tmp_path / "code").mkdir()
    file = folder / "own.py"
    file.write_text(CLASSES)
    return file


def made(code: Path, name: str, sandbox: Sandbox = SANDBOX, **spec: Any) -> Environment:
    return environment_maker(PythonEnvironmentSpec(environment=f"{code}:{name}", **spec), sandbox)()


def test_answers_are_those_of_an_environment_in_the_samplers_own_process(code: Path) -> None:
    def talk(sandbox: Sandbox) -> list[Any]:
        it: Any = made(code, "Talk", sandbox, config={"greeting": "hi \u00e4\ud83d"})
        opening = it.reset(ROW)
        said = [it.step(text, end="length") for text in ("one", "messages", "three")]
        facts = [(one.text, [*one.messages], one.reward, one.done) for one in said]
        return [type(it).__name__, it.stop, opening, *facts]

    assert talk(SANDBOX) == talk(NONE)
    assert talk(NONE)[3][2] == 1 / 3


def test_each_trajectory_has_its_own_instance_until_it_ends(code: Path) -> None:
    make = environment_maker(PythonEnvironmentSpec(environment=f"{code}:Talk"), SANDBOX)
    first, second = make(), make()
    first.reset(ROW)
    second.reset(ROW)
    first.step("a")
    assert second.step("b").text.startswith("1 ")
    assert first.step("c").text.startswith("2 ")
    # The one that was made to try the config is gone; two live.
    assert first.step("living").reward == 2.0
    del second
    gc.collect()
    assert first.step("living").reward == 1.0


def test_an_environment_that_fails_says_why(code: Path) -> None:
    make = environment_maker(PythonEnvironmentSpec(environment=f"{code}:Bad"), SANDBOX)
    for text, message in (
        ("raise", r"^KeyError\('missing'\) \(at .*own\.py:\d+, in step\)$"),
        ("leave", r"^SystemExit\(3\) \(at"),
        ("nan", "reward of the observation is nan"),
        ("none", "step gave a NoneType: return an Observation"),
        ("die", r"the process of '.*:Bad' has ended"),
    ):
        it = make()
        it.reset(ROW)
        with pytest.raises(EnvironmentFailedError, match=message):
            it.step(text)
        # The next generation has instances of its own.
        assert make().reset(ROW) is None


@pytest.mark.parametrize(
    ("text", "spec", "message"),
    [
        ("hang", {"timeout_s": 1.0}, "no answer within 1 s for a call of step.*raise .*timeout_s"),
        ("drip", {"timeout_s": 1.0}, "no answer within 1 s for a call of step.*raise .*timeout_s"),
        ("flood", {}, "more than 1048576 bytes in one call.*raise environment.max_output_bytes"),
        ("large", {"memory_mib": 512}, r"MemoryError\(\).*wanted more memory than .*memory_mib"),
        ("header", {}, r"has ended \(a message ends within its header\)"),
        ("last words", {}, r"has ended(?s:.)*It printed last:\nso long"),
    ],
)
def test_an_environment_beyond_its_bounds_is_ended_and_the_next_generation_has_a_new_one(
    code: Path, text: str, spec: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, others = f"{code}:Wild", set(worker_processes(WORKER))
    make = environment_maker(PythonEnvironmentSpec(environment=name, **spec), SANDBOX)
    it = make()
    it.reset(ROW)
    (worker,) = set(worker_processes(WORKER)) - others
    began = time.monotonic()
    with caplog.at_level(logging.INFO), pytest.raises(EnvironmentFailedError, match=message) as no:
        it.step(text)
    assert time.monotonic() - began < ENDED_S
    assert name in str(no.value)
    assert not worker.is_running()
    assert len(caplog.text) < 100_000
    after = make()
    after.reset(ROW)
    assert after.step("fine").reward == 1.0


def test_what_an_environment_prints_is_logged_up_to_a_bound_for_each_call(
    code: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more = "Wild prints more in this call, which is not logged"
    it = made(code, "Wild", max_output_bytes=150_000)
    it.reset(ROW)
    with caplog.at_level(logging.INFO):
        for calls in (1, 2):
            assert it.step("fine").reward == 1.0
            until = time.monotonic() + ENDED_S
            while caplog.text.count(more) < calls and time.monotonic() < until:
                time.sleep(0.01)
            assert caplog.text.count(more) == calls
    assert "Wild prints: hello [31m" in caplog.text
    assert caplog.text.count("y") < 2 * 20_000


def test_an_environment_reads_no_key_and_is_told_so(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOOL", "a tool")
    key = tmp_path / "key.pem"
    key.write_text("a key")
    assert made(code, "Bad", NONE).step(str(key)).text == "a tool"
    it = made(code, "Bad")
    with pytest.raises(EnvironmentFailedError, match="in its sandbox it can read what `readable`"):
        it.step(str(key))
    shown = made(code, "Bad", readable=(key,), variables=("MY_TOOL",))
    assert shown.step(str(key)).text == "a tool"
    assert made(code, "Bad", readable=(key,)).step(str(key)).text == "no tool"


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("Nothing", {}, r"environment.environment is .* has no 'Nothing'"),
        ("Talk", {"config": {"a": 1}}, r"environment.config is .* cannot be made with it"),
        (
            "Talk",
            {"readable": (Path("none"),)},
            "environment has 'none' in readable, which is not there",
        ),
    ],
)
def test_a_class_that_cannot_be_used_is_told_at_once(
    code: Path, name: str, spec: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserCodeError, match=message):
        made(code, name, **spec)


def test_its_process_ends_with_its_last_user_and_prints_into_the_log(
    code: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = set(worker_processes(WORKER))
    with caplog.at_level(logging.INFO):
        it = made(code, "Talk")
        it.reset(ROW)
        it.step("x")
        (worker,) = set(worker_processes(WORKER)) - others
        del it
        gc.collect()
        assert worker.wait(ENDED_S) is None or not worker.is_running()
        until = time.monotonic() + ENDED_S
        while "Talk prints: turn 1" not in caplog.text and time.monotonic() < until:
            time.sleep(0.01)
    assert "Talk prints: turn 1" in caplog.text


def test_it_is_confined_before_libraries_start_threads(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Numpy's products start a thread for each core but where these forbid it; tests set them.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    process = EnvironmentProcess(PythonEnvironmentSpec(environment=f"{code}:Talk"), SANDBOX)
    assert process.make().stop


def test_episodes_are_played_with_it(code: Path) -> None:
    def play(sandbox: Sandbox) -> Any:
        spec = PythonEnvironmentSpec(
            environment=f"{code}:Talk", max_observation_tokens=8, config={"greeting": "hi "}
        )
        return sample_experience(
            ScriptedBackend(lambda request: [ord(letter) for letter in "ab!"]),
            [Prompt(prompt_id=7, text="Q:", tokens=[81, 58], answer="1", metadata="{}")],
            SamplingSpec(samples_per_prompt=2, max_new_tokens=60),
            run_seed=1,
            step=1,
            tokenizer=AsciiTokenizer(),
            progress=lambda *_: None,
            episodes=EpisodeRunner(spec, AsciiTokenizer(), 400, sandbox=sandbox),
        )

    assert_same(play(SANDBOX), play(NONE))
