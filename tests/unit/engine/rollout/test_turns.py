"""Trajectories that take their turns by themselves, and environments that are asked beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.scripted_sampler import AsciiTokenizer, ScriptedBackend

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.environments.base import EnvironmentFailedError
from rolemesh.engine.experience import Experience
from rolemesh.engine.rollout.episodes.episodes import EpisodeRunner
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.rollout.sampling import sample_experience
from rolemesh.engine.specs import PythonEnvironmentSpec, SamplingSpec


def row(answer: str) -> Prompt:
    return Prompt(prompt_id=7, text="Q:", tokens=[81, 58], answer=answer, metadata="{}")


def talker() -> ScriptedBackend:
    """Says "abc" in each turn."""
    return ScriptedBackend(lambda request: list(b"abc"), reason=lambda *_: "stop")


def played(
    spec: PythonEnvironmentSpec, backend: ScriptedBackend, rows: Sequence[Prompt]
) -> Experience:
    return sample_experience(
        backend,
        rows,
        SamplingSpec(max_new_tokens=100),
        run_seed=1,
        step=1,
        tokenizer=AsciiTokenizer(),
        progress=lambda *_: None,
        episodes=EpisodeRunner(spec, AsciiTokenizer(), 400),
    )


MEETING = '''
import threading

from rolemesh.engine.environments.base import Environment, Observation

ended = threading.Event()

class Meeting(Environment):
    """Rows whose answer is "slow" answer their first turn when a quick one has ended."""

    def reset(self, row):
        self._is_slow, self._turns = row.answer == "slow", 0

    def step(self, completion_text):
        self._turns += 1
        if self._is_slow and self._turns == 1 and not ended.wait(30):
            raise RuntimeError("no quick row has ended")
        if not self._is_slow and self._turns == 3:
            ended.set()
        return Observation(text="|", reward=1.0, done=self._turns == 3)

class Stuck(Environment):
    """Never answers one row."""

    def reset(self, row):
        self._is_stuck = row.answer == "slow"

    def step(self, completion_text):
        if self._is_stuck:
            threading.Event().wait()
        return Observation(done=True)
'''


def test_a_slow_environment_holds_no_other_row_up(tmp_path: Path) -> None:
    (tmp_path / "meeting.py").write_text(MEETING)
    spec = PythonEnvironmentSpec(environment=f"{tmp_path / 'meeting.py'}:Meeting", max_turns=3)
    backend = talker()
    rows = [
        row("slow"),
        row("quick"),
        row("slow"),
        row("quick"),
    ]
    # Each turn waiting for all of them, the slow rows would wait for ever.
    batch = played(spec, backend, rows)
    assert batch["completion_text"].strings() == ["abc|abc|abc"] * 4
    assert batch["environment_rewards"].values.tolist() == [3.0] * 4
    turns = [[request.row for request in call] for call in backend.calls]
    assert turns[:3] == [[0, 1, 2, 3], [1, 3], [1, 3]]
    # Answers that were not waited for come one by one.
    assert sorted(row for call in turns[3:] for row in call) == [0, 0, 2, 2]


def test_an_environment_that_never_answers_fails_with_its_row(tmp_path: Path) -> None:
    (tmp_path / "meeting.py").write_text(MEETING)
    spec = PythonEnvironmentSpec(environment=f"{tmp_path / 'meeting.py'}:Stuck", timeout_s=1.0)
    with pytest.raises(EnvironmentFailedError, match=r"Stuck failed for prompt 7, row 1.* 1 s"):
        played(spec, talker(), [row("quick"), row("slow")])


FAILING = '''
from rolemesh.engine.environments.base import Environment, Observation

class Failing(Environment):
    """Fails for a row at the place that its answer names."""

    def reset(self, row):
        self._answer = row.answer
        if row.answer == "reset":
            raise ValueError("no such task")
        # More than a row may have.
        return "x" * 200 if row.answer == "room" else None

    def step(self, completion_text):
        if self._answer == "step":
            raise SystemExit(3)
        return Observation(reward=1.0, done=True)
'''


def test_an_environment_that_fails_ends_its_episode_alone_where_it_may(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    spec = PythonEnvironmentSpec(
        environment=f"{tmp_path / 'failing.py'}:Failing", max_observation_tokens=200
    )
    prompts = [row(answer) for answer in ("reset", "fine", "room", "step", "fine")]
    requests = [
        RolloutRequest(row=number, prompt_tokens=one.tokens, seed=number)
        for number, one in enumerate(prompts)
    ]
    runner = EpisodeRunner(spec, AsciiTokenizer(), 400, fails_alone=True)
    sampling = SamplingSpec(max_new_tokens=100)
    ended = {one.row: one for one in runner.run(talker(), prompts, requests, sampling)}
    assert sorted(ended) == list(range(5))
    assert [(one.failure, one.reward) for one in (ended[1], ended[4])] == [("", 1.0)] * 2
    told = (
        (0, "row 0, turn 0: ValueError('no such task')"),
        (2, "row 2, turn 0: the text of reset leaves no room"),
        (3, "row 3, turn 0: SystemExit(3)"),
    )
    for number, what in told:
        assert f"Failing failed for prompt 7, {what}" in ended[number].failure
    strict = EpisodeRunner(spec, AsciiTokenizer(), 400)
    for number in (0, 2, 3):
        with pytest.raises(EnvironmentFailedError, match=f"row {number}"):
            list(strict.run(talker(), [prompts[number]], [requests[number]], sampling))


def test_an_environment_that_cannot_be_made_fails_alone_too(tmp_path: Path) -> None:
    code = """
from rolemesh.engine.environments.base import Environment, Observation

class Once(Environment):
    number = 0

    def __init__(self):
        Once.number += 1
        if Once.number == 3:  # The first one is a trial.
            raise OSError("no more")

    def reset(self, row): ...

    def step(self, completion_text):
        return Observation(done=True)
"""
    (tmp_path / "once.py").write_text(code)
    spec = PythonEnvironmentSpec(environment=f"{tmp_path / 'once.py'}:Once")
    runner = EpisodeRunner(spec, AsciiTokenizer(), 400, fails_alone=True)
    prompts = [row("a")] * 3
    requests = [RolloutRequest(row=n, prompt_tokens=[81, 58], seed=n) for n in range(3)]
    ended = list(runner.run(talker(), prompts, requests, SamplingSpec(max_new_tokens=9)))
    assert {one.row: "no more" in one.failure for one in ended} == {0: False, 1: True, 2: False}
