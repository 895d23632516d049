"""Tests of an agent that has the openai SDK alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.client_programs import seen
from support.served_policy import ServedPolicy

pytestmark = pytest.mark.clients


def asked(policy: ServedPolicy, what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the program saw of a session, and what the session kept."""
    session = policy.open()
    saw = seen("openai", "openai_agent.py", what, session=session)
    return saw, policy.kept(session)


def answers(policy: ServedPolicy, kept: dict[str, Any]) -> list[str]:
    return [policy.answer(call) for call in kept["calls"]]


def test_turns_are_one_branch_of_the_tokens_that_were_sampled(policy: ServedPolicy) -> None:
    saw, kept = asked(policy, "turns")
    assert answers(policy, kept) == saw["texts"]
    assert [call["finish_reason"] for call in kept["calls"]] == saw["finish_reasons"]
    for call, logprobs in zip(kept["calls"], saw["logprobs"], strict=True):
        assert call["logprobs"] == pytest.approx(logprobs, abs=1e-6)
    assert [branch["calls"] for branch in kept["branches"]] == [[0, 1, 2]]
    policy.check_exact(kept)


def test_tools_that_were_forced_go_on_token_for_token(policy: ServedPolicy) -> None:
    saw, kept = asked(policy, "tools")
    assert [name for name, _ in saw["calls"]] == ["add", "add"]
    for _, arguments in saw["calls"]:
        assert {name: type(value) for name, value in json.loads(arguments).items()} == {
            "a": int,
            "b": int,
        }
    # One that is named ends with "stop" in OpenAI's protocol.
    assert saw["finish_reasons"] == ["stop", "tool_calls"]
    assert answers(policy, kept)[2] == saw["text"]
    assert [branch["calls"] for branch in kept["branches"]] == [[0, 1, 2]]
    result = policy.text(kept["calls"][1]["added_tokens"])
    assert result.endswith("<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n")
    policy.check_exact(kept, forced={0, 1})


def test_streams_are_kept_as_answers_are(policy: ServedPolicy) -> None:
    saw, kept = asked(policy, "streams")
    texts = answers(policy, kept)
    assert texts[0] == saw["texts"][0]
    # The client gets no stop string; what was sampled has it.
    assert texts[1].startswith(saw["texts"][1])
    assert " the" in texts[1].removeprefix(saw["texts"][1])
    assert len(kept["calls"][0]["sampled_tokens"]) == saw["completion_tokens"]
    assert saw["content_events"] > 1
    streamed = saw["logprobs"]
    assert kept["calls"][1]["logprobs"][: len(streamed)] == pytest.approx(streamed, abs=1e-6)
    name, arguments = saw["call"]
    assert name == "add"
    assert json.loads(arguments).keys() == {"a", "b"}
    # Tools are shown before the first message, so that prompt is another one.
    assert [branch["calls"] for branch in kept["branches"]] == [[0, 1], [2]]
    policy.check_exact(kept, forced={2})


def test_each_of_several_choices_is_a_branch(policy: ServedPolicy) -> None:
    saw, kept = asked(policy, "choices")
    first = [call for call in kept["calls"] if call["parent"] is None]
    assert sorted(policy.answer(call) for call in first) == sorted(saw["texts"])
    assert set(saw["top"]) == {2}
    (last,) = [call for call in kept["calls"] if call["parent"] is not None]
    assert policy.answer(kept["calls"][last["parent"]]) == saw["texts"][1]
    assert len(kept["branches"]) == 3
    policy.check_exact(kept)


def test_conversations_at_once_do_not_mix(policy: ServedPolicy) -> None:
    saw, kept = asked(policy, "side_by_side")
    texts = answers(policy, kept)
    paths = sorted([texts[number] for number in branch["calls"]] for branch in kept["branches"])
    assert paths == sorted(saw["texts"])
    assert [call["is_trained"] for call in kept["calls"]].count(False) == 1
    policy.check_exact(kept)


def test_answers_without_a_seed_are_drawn_apart(policy: ServedPolicy) -> None:
    saw, kept = asked(policy, "unseeded")
    # That two of them are equal by luck has a probability of about e to the minus 40.
    assert len(set(saw["texts"])) == 8
    # And within one, tokens too: with the same noise at each step it would say the same few.
    sampled = [call["sampled_tokens"] for call in kept["calls"]]
    assert sum(len(set(tokens)) for tokens in sampled) > 0.6 * sum(map(len, sampled))


def test_refusals_name_what_is_wrong(policy: ServedPolicy) -> None:
    saw, kept = asked(policy, "refusals")
    assert saw["model"] == ["policy", 2048]
    assert saw["field"][:3] == ["BadRequestError", 400, "service_tier"]
    assert saw["unknown"][:3] == ["BadRequestError", 400, "mirostat"]
    assert saw["overlong"][:2] == ["BadRequestError", 400]
    assert "maximum context length is 2048" in saw["overlong"][3]
    assert saw["key"][:2] == ["AuthenticationError", 401]
    text, logprobs = saw["completion"]
    (call,) = kept["calls"]
    assert policy.answer(call) == text
    assert call["logprobs"] == pytest.approx(logprobs, abs=1e-6)
    policy.check_exact(kept)
