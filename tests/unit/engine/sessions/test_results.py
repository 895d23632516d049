"""What an agent says at its end is read strictly: nothing becomes a reward of 0."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rolemesh.engine.sessions.logs import AgentLog
from rolemesh.engine.sessions.results import AgentFailedError, AgentResult, result_of


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (None, AgentResult()),
        (1, AgentResult(reward=1.0)),
        (-0.25, AgentResult(reward=-0.25)),
        ({}, AgentResult()),
        ({"reward": 2}, AgentResult(reward=2.0)),
        ({"reward": None}, AgentResult()),
        ({"reward": 0, "call_rewards": {"3": 1}}, AgentResult(reward=0.0, call_rewards={3: 1.0})),
        ({"call_rewards": None}, AgentResult()),
    ],
)
def test_what_is_said_is_read(said: Any, wanted: AgentResult) -> None:
    assert result_of(said, "it", AgentLog()) == wanted


@pytest.mark.parametrize(
    "said",
    [
        True,
        "1.0",
        [1.0],
        math.nan,
        math.inf,
        {"reward": "1"},
        {"reward": True},
        {"rewards": 1},
        {"reward": 1, "log": ["a line"]},
        {"call_rewards": [1]},
        {"call_rewards": {"first": 1}},
        {"call_rewards": {"0": math.nan}},
    ],
    ids=repr,
)
def test_what_cannot_be_read_is_a_failure_that_names_it(said: Any) -> None:
    with pytest.raises(AgentFailedError, match="it answered"):
        result_of(said, "it", AgentLog())


def test_a_log_that_is_answered_is_kept_and_is_no_reward() -> None:
    log = AgentLog()
    assert result_of({"log": "looked it up\ud800"}, "it", log) == AgentResult()
    assert log.text() == "looked it up?"
