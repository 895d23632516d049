"""Tests of an agent between a resources server in the form of NeMo-Gym and the policy."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.client_programs import seen
from support.served_policy import ServedPolicy

pytestmark = pytest.mark.clients

ROW = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "Pay 5 coins in, two times."}],
        "tools": [
            {
                "type": "function",
                "name": "deposit",
                "description": "Pays an amount in.",
                "parameters": {
                    "type": "object",
                    "properties": {"amount": {"type": "integer", "minimum": 1, "maximum": 9}},
                    "required": ["amount"],
                    "additionalProperties": False,
                },
                "strict": True,
            }
        ],
        "temperature": 1.0,
        "max_output_tokens": 64,
    },
    "deposits": 2,
}


def played(policy: ServedPolicy, row: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    session = policy.open()
    saw = seen("openai", "gym_agent.py", json.dumps(row), session=session)
    return saw, policy.kept(session)


def test_the_verifier_sees_the_tokens_that_are_trained_with_its_reward(
    policy: ServedPolicy,
) -> None:
    saw, kept = played(policy, ROW)
    assert saw["failure"] is None
    verified = saw["verified"]
    assert verified["reward"] == 2
    assert verified["reward_components"] == {"paid": 1, "kept": 1}
    (branch,) = kept["branches"]
    assert kept["state"] == "ended"
    assert branch["reward"] == 2
    items = [item for item in verified["response"]["output"] if "prompt_token_ids" in item]
    whole = branch["prompt_tokens"] + branch["completion_tokens"]
    assert len(items) == len(kept["calls"]) == 3
    for item, call in zip(items, kept["calls"], strict=True):
        prompt = item["prompt_token_ids"]
        assert prompt == whole[: len(prompt)]
        assert item["generation_token_ids"] == call["sampled_tokens"]
        assert item["generation_log_probs"] == pytest.approx(call["logprobs"], abs=1e-6)
    policy.check_exact(kept, forced={0, 1})


def test_a_verifier_that_failed_is_no_reward_of_0(policy: ServedPolicy) -> None:
    saw, kept = played(policy, {**ROW, "judge": "down"})
    assert saw["verified"]["reward"] == 0
    assert saw["failure"] == "judge_failed"
    assert kept["state"] == "ended"
    assert [branch["reward"] for branch in kept["branches"]] == [None]
