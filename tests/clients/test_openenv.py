"""Tests of OpenEnv: its environments played by the policy, and its capture proxy before us."""

from __future__ import annotations

import pytest
from support.client_programs import seen
from support.served_policy import ServedPolicy

pytestmark = pytest.mark.clients


def test_an_episode_over_the_websocket_is_one_branch(policy: ServedPolicy) -> None:
    session = policy.open()
    saw = seen("openenv", "openenv_agent.py", "websocket", session=session)
    kept = policy.kept(session)
    assert [policy.answer(call) for call in kept["calls"]] == saw["texts"]
    assert saw["rewards"] == [text.count("e") / 10 for text in saw["texts"]]
    assert saw["state"]["step_count"] == 3
    assert [branch["calls"] for branch in kept["branches"]] == [[0, 1, 2]]
    policy.check_exact(kept)
    (branch,) = policy.end(session, call_rewards=dict(enumerate(saw["rewards"])))["branches"]
    assert branch["reward"] == pytest.approx(sum(saw["rewards"]))


def test_tools_of_an_mcp_session_are_called_by_the_policy(policy: ServedPolicy) -> None:
    session = policy.open()
    saw = seen("openenv", "openenv_agent.py", "mcp", session=session)
    assert saw["tools"] == ["put"]
    assert [name for name, _ in saw["calls"]] == ["put", "put"]
    assert all(isinstance(arguments["coins"], int) for _, arguments in saw["calls"])
    assert saw["num_calls"] == 2
    kept = policy.kept(session)
    assert [branch["calls"] for branch in kept["branches"]] == [[0, 1]]
    result = policy.text(kept["calls"][1]["added_tokens"])
    assert f"The purse was opened 1 times, last for {saw['calls'][0][1]['coins']} coins." in result
    policy.check_exact(kept, forced={0, 1})


def test_its_capture_proxy_has_the_tokens_of_the_session(policy: ServedPolicy) -> None:
    session, checked = policy.open(), policy.open()
    saw = seen(
        "openenv",
        "openenv_agent.py",
        "capture",
        session=session,
        variables={"CHECKED_BASE_URL": checked.base_url, "CHECKED_KEY": checked.key},
    )
    kept = policy.kept(session)
    policy.check_exact(kept)
    assert saw["opened"]["rollout_type"] == "train"
    entries = saw["entries"]["entries"]
    assert len(entries) == len(kept["calls"]) == 3
    before: list[int] = []
    for entry, call in zip(entries, kept["calls"], strict=True):
        before += call["added_tokens"]
        assert entry["prompt_token_ids"] == before
        assert entry["completion_token_ids"] == call["sampled_tokens"]
        assert entry["per_token_logps"] == pytest.approx(call["logprobs"], abs=1e-6)
        mask = [0] * len(before) + [1] * len(call["sampled_tokens"])
        assert entry["loss_mask"] == mask
        before += call["sampled_tokens"]
    (sequence,) = saw["rollout"]["sequences"]
    (branch,) = kept["branches"]
    assert sequence["input_ids"] == branch["prompt_tokens"] + branch["completion_tokens"]
    # What it thinks of us: nothing to complain of, and the log-probs of what was drawn from.
    assert saw["problems"] == []
    report = saw["report"]
    assert report["capture_level"] == "tokens"
    assert report["rollout_type"] == "train"
    assert report["logprobs_mode"] == "processed"
    assert report["param_fixes"] == []
