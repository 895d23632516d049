"""Tests of verifiers as the supplier of a run's rows: our runner asks it for rollouts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.agent_worlds import World
from support.client_programs import ENVIRONMENTS, PROGRAMS, example_server
from support.mesh_runs import tiny_model

from rolemesh.engine.environments.base import EnvironmentFailedError
from rolemesh.engine.sessions.session import Session
from rolemesh.engine.sessions.store import OpenSession, Sessions
from rolemesh.engine.specs import HttpAgentSpec, SamplingSpec

pytestmark = pytest.mark.clients

SAMPLING = SamplingSpec(samples_per_prompt=2, temperature=0.8, max_new_tokens=24)

WORDS = ("moon", "river", "stone", "bread")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("rollouts")
    tiny_model(folder / "model")
    world = World(folder)
    yield world
    world.close()


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """All sessions that have ended, which the runner forgets."""
    ended: list[Session] = []
    forget = Sessions.forget

    def seen(store: Sessions, opened: OpenSession) -> None:
        ended.append(opened.session)
        forget(store, opened)

    monkeypatch.setattr(Sessions, "forget", seen)
    return ended


@pytest.fixture(scope="module")
def variables() -> dict[str, str]:
    return {
        "PYTHONPATH": str(PROGRAMS),
        "UV_CACHE_DIR": str(ENVIRONMENTS / "uv-cache"),
        "UV_PYTHON_DOWNLOADS": "never",
    }


def row(prompt: str, **metadata: Any) -> dict[str, Any]:
    return {"prompt": prompt, "answer": "", "metadata": metadata}


def share(word: str, said: str) -> float:
    """What the taskset's reward computes, once more."""
    letters = [letter for letter in said.lower() if letter.isalpha()]
    return sum(letter in word for letter in letters) / max(1, len(letters))


def test_rows_are_what_was_sampled_and_rewards_what_the_taskset_computed(
    world: World, sessions: list[Session], variables: dict[str, str]
) -> None:
    # Two rows name an example, and two are examples themselves.
    rows = [row("Say it.", idx=1), row("Say it.", idx=3), *(row("Go.", word=w) for w in WORDS[:2])]
    words = [word for word in ("river", "bread", "moon", "river") for _ in range(2)]
    asked = [text for text in ("Say river.", "Say bread.", "Go.", "Go.") for _ in range(2)]
    with example_server(
        "verifiers", "verifiers_agent_server.py", "said-twice", variables=variables
    ) as url:
        spec = HttpAgentSpec(url=url, max_turns=2, at_once=2)
        trajectories = world.play(spec, rows=rows, sampling=SAMPLING)
    sampled = {
        tuple(token for call in session.calls for token in call.sampled_tokens): session
        for session in sessions
    }
    assert len(sampled) == len(trajectories) == len(words)
    for (one,), word, question in zip(trajectories, words, asked, strict=True):
        drawn = [
            token
            for token, is_drawn in zip(one.completion_tokens, one.loss_mask, strict=True)
            if is_drawn
        ]
        session = sampled.pop(tuple(drawn))
        assert one.num_turns == len(session.calls) == 2
        assert question in world.tokenizer.decode(one.prompt_tokens or ())
        said = [
            world.tokenizer.decode(call.sampled_tokens, skip_special_tokens=True)
            for call in session.calls
        ]
        assert one.reward == share(word, "".join(said))
        told = json.loads(json.loads(one.session)["log"])
        assert told["rewards"] == {"letters": {"score": one.reward, "weight": 1.0}}
        assert told["metrics"] == {"turns": 2.0}
    # A row without a letter of its word would be right with a reward that is always 0.
    assert len({one.reward for (one,) in trajectories}) > len(WORDS)


@pytest.mark.parametrize(
    ("idx", "what"),
    [
        (0, "TaskError.*the judge is out of order"),
        (1, "EnvError.*the world is out of order"),
        (2, "ran out of time .scoring_timeout"),
        (3, "Out of range float"),
        (4, "idx is 4, and the taskset has 4 examples"),
        (-1, "idx is -1"),
    ],
)
def test_a_rollout_that_fails_has_no_reward(
    world: World, failing: str, idx: int, what: str
) -> None:
    with pytest.raises(EnvironmentFailedError, match=rf"(?s)http agent failed.*status 500.*{what}"):
        world.play(HttpAgentSpec(url=failing), rows=[row("Say it.", idx=idx)], sampling=SAMPLING)


@pytest.fixture(scope="module")
def failing(variables: dict[str, str]) -> Iterator[str]:
    """A server whose rollouts fail."""
    with example_server(
        "verifiers", "verifiers_agent_server.py", "fails-on-purpose", variables=variables
    ) as url:
        yield url


def test_a_row_without_the_fields_of_the_taskset_and_a_turn_too_many_are_failures(
    world: World, variables: dict[str, str]
) -> None:
    with example_server(
        "verifiers", "verifiers_agent_server.py", "said-twice", variables=variables
    ) as url:
        with pytest.raises(EnvironmentFailedError, match=r"(?s)status 500.*word.*Field required"):
            world.play(HttpAgentSpec(url=url), rows=[row("Say it.")], sampling=SAMPLING)
        spec = HttpAgentSpec(url=url, max_turns=1)
        with pytest.raises(EnvironmentFailedError, match=r"(?s)status 500.*may make 1"):
            world.play(spec, rows=[row("Say it.", idx=0)], sampling=SAMPLING)
