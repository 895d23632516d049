"""What people are told of a session beside its rows."""

from __future__ import annotations

import json

import pytest

from rolemesh.engine.sessions import rows
from rolemesh.engine.sessions.rows import told_rows
from rolemesh.engine.sessions.session import Session
from rolemesh.rpc.samples import sessions as sampled_sessions
from rolemesh.rpc.samples.sessions import read_session, session_facts


def forked() -> Session:
    """Call 0, two ways on from it, a summary on the second way, and a judge of its own."""
    session = Session("s")

    def add(prompt: list[int], sampled: list[int], *, is_trained: bool = True) -> None:
        session.add(
            prompt, sampled, [-0.5] * len(sampled), [(0, 3)], finish_reason="stop",
            is_trained=is_trained,
        )  # fmt: skip

    add([1, 2], [3, 4])
    add([1, 2, 3, 4, 5], [6])
    add([1, 2, 3, 4, 7, 7], [8], is_trained=False)
    add([1, 2, 3, 4, 7, 7, 8, 9], [9, 9])
    add([30, 31], [32], is_trained=False)
    return session


def test_each_row_has_its_calls_and_what_training_does_with_them() -> None:
    session = forked()
    first, second = map(
        json.loads, told_rows(session, session.branches(), attempts=2, log="so long")
    )

    def calls(told: dict[str, list[dict[str, object]]], name: str = "calls") -> list[object]:
        return [tuple(call.values()) for call in told[name]]

    assert calls(first) == [(0, 2, 2, "trained"), (1, 1, 1, "trained")]
    # Its first call is trained in the other row; one of its own is kept out of training.
    assert calls(second) == [(0, 2, 2, "shared"), (2, 2, 1, "untrained"), (3, 1, 2, "trained")]
    assert calls(first, "left_out") == [(4, 2, 1, "untrained")]
    assert (first["branch"], second["branch"], second["num_branches"]) == (0, 1, 2)
    assert (first["attempts"], first["log"]) == (2, "so long")
    # Once is enough.
    assert "log" not in second
    assert "left_out" not in second


def test_numbers_of_tokens_lead_through_the_row() -> None:
    session = forked()
    for branch, told in zip(
        session.branches(), told_rows(session, session.branches(), attempts=1, log=""), strict=True
    ):
        at = 0
        for place, call in enumerate(json.loads(told)["calls"]):
            at += call["num_added_tokens"] if place else 0
            sampled = branch.completion_tokens[at : at + call["num_sampled_tokens"]]
            assert sampled == list(session.calls[call["number"]].sampled_tokens)
            trained = {"trained": {True}, "shared": {False}, "untrained": {False}}[call["use"]]
            assert set(branch.loss_mask[at : at + call["num_sampled_tokens"]]) == trained
            at += call["num_sampled_tokens"]
        assert at == len(branch.completion_tokens)


def test_what_a_sampler_tells_is_what_a_coordinator_reads() -> None:
    session = forked()
    for told in told_rows(session, session.branches(), attempts=1, log="so long"):
        facts = session_facts(read_session(told.encode(), 7, 1))
        assert facts.items() >= {**json.loads(told), "prompt_id": 7, "sample_index": 1}.items()
    assert rows.MAX_CALLS == sampled_sessions.MAX_CALLS


def test_a_session_of_many_calls_tells_its_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_CALLS", 8)
    session = Session("s")
    prompt = [1]
    for number in range(rows.MAX_CALLS + 3):
        session.add(prompt, [2], [-0.5], [(0, 0)], finish_reason="stop")
        prompt += [2, 3]
        session.add([9, number], [4], [-0.5], [(0, 0)], finish_reason="stop", is_trained=False)
    (told,) = map(json.loads, told_rows(session, session.branches(), attempts=1, log=""))
    assert [call["number"] for call in told["calls"]] == list(range(0, 2 * rows.MAX_CALLS, 2))
    assert [call["number"] for call in told["left_out"]] == list(range(1, 2 * rows.MAX_CALLS, 2))


def test_a_session_without_rows_tells_nothing() -> None:
    session = Session("s")
    session.add([1], [2], [-0.5], [(0, 0)], finish_reason="stop", is_trained=False)
    assert told_rows(session, session.branches(), attempts=1, log="so long") == []
