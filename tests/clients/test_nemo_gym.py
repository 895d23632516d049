"""Tests of a resources server of NeMo-Gym: with an agent of ours, with its own, and as a reward."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from support.client_programs import PROGRAMS, free_ports, program_of_page, python_of, seen, serving
from support.served_policy import ServedPolicy, Session

from rolemesh.engine.sandbox.host import find_sandbox
from rolemesh.engine.specs import RewardSpec
from rolemesh.services.reward.outside.base import Judgement, RewardRow
from rolemesh.services.reward.outside.make import make_outside_reward

pytestmark = pytest.mark.clients

SERVERS = {
    "bank": "resources_servers/bank",
    "bank_agent": "responses_api_agents/simple_agent",
    "policy_model": "responses_api_models/vllm_model",
}
"""What `gym env start` starts beside its head server, by the names of the configuration."""

CALL_S = 300.0

EXAMPLE_URL = "http://127.0.0.1:8000"
"""Of the page's resources server."""

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


@dataclass(frozen=True)
class Gym:
    """The servers that `gym env start` has started."""

    bank: str
    """URL of our resources server."""
    agent: str
    """URL of NeMo-Gym's own agent."""
    session: Session
    """The one that this agent's model server asks the policy in."""


@pytest.fixture(scope="module")
def gym(policy: ServedPolicy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gym]:
    """The bank, an agent and a model server, started as their users start them."""
    environment = python_of("nemo_gym").parents[1]
    folder = tmp_path_factory.mktemp("gym")
    shutil.copytree(PROGRAMS / "resources_servers", folder / "resources_servers")
    # uv would make an environment for each server that has none: here all have one and the same.
    for path in SERVERS.values():
        (folder / path).mkdir(parents=True, exist_ok=True)
        (folder / path / ".venv").symlink_to(environment)
    head, *ports = free_ports(1 + len(SERVERS))
    places = [
        f"++{name}.{path.replace('/', '.')}.port={port}"
        for (name, path), port in zip(SERVERS.items(), ports, strict=True)
    ]
    session = policy.open(seed=5)
    command = (
        *("gym", "env", "start", "--config", "resources_servers/bank/configs/bank.yaml"),
        *("--model-type", "vllm_model/vllm_model_for_training", "--model", "policy"),
        *("--model-url", session.base_url, "--model-api-key", session.key),
        *("++skip_venv_if_present=true", "++head_server.host=127.0.0.1"),
        *(f"++head_server.port={head}", *places),
    )
    no_report = {"RAY_USAGE_STATS_ENABLED": "0"}
    with serving("nemo_gym", *command, ports=ports, folder=folder, variables=no_report):
        bank, agent, _ = (f"http://127.0.0.1:{port}" for port in ports)
        yield Gym(bank, agent, session)


def played(gym: Gym, policy: ServedPolicy, row: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    session = policy.open()
    saw = seen("openai", "gym_agent.py", gym.bank, json.dumps(row), session=session)
    return saw, policy.kept(session)


def check_tokens(verified: dict[str, Any], kept: dict[str, Any], num_calls: int) -> None:
    """Holds what the verifier was shown to the one branch that the session has kept."""
    (branch,) = kept["branches"]
    assert kept["state"] == "ended"
    assert branch["reward"] == verified["reward"]
    items = [item for item in verified["response"]["output"] if "prompt_token_ids" in item]
    whole = branch["prompt_tokens"] + branch["completion_tokens"]
    assert len(items) == len(kept["calls"]) == num_calls
    for item, call in zip(items, kept["calls"], strict=True):
        assert [*map(int, item["generation_token_ids"])] == call["sampled_tokens"]
        assert item["generation_log_probs"] == pytest.approx(call["logprobs"], abs=1e-6)
        assert item["prompt_token_ids"] == whole[: call["num_prompt_tokens"]]


def test_the_verifier_sees_the_tokens_that_are_trained_with_its_reward(
    gym: Gym, policy: ServedPolicy
) -> None:
    saw, kept = played(gym, policy, ROW)
    assert saw["failure"] is None
    components = saw["verified"]["reward_components"]
    assert (components["paid"], components["kept"]) == (1, 1)
    assert saw["verified"]["reward"] == sum(components.values())
    check_tokens(saw["verified"], kept, num_calls=3)
    policy.check_exact(kept, forced={0, 1})


def test_its_own_agent_and_model_server_see_what_was_sampled(
    gym: Gym, policy: ServedPolicy
) -> None:
    params = {**ROW["responses_create_params"], "tool_choice": "required"}  # type: ignore[dict-item]
    row = {**ROW, "responses_create_params": {**params, "parallel_tool_calls": False}}
    answer = httpx.post(f"{gym.agent}/run", json=row, timeout=CALL_S)
    assert answer.is_success, answer.text
    verified = answer.json()
    # Its model server drops `strict` of a tool, so the model may write arguments that are refused.
    results = [item["output"] for item in verified["response"]["output"] if "output" in item]
    has_paid = any("balance" in json.loads(result) for result in results)
    assert verified["reward_components"] == {"paid": 1, "kept": has_paid, "said": 0}
    kept = policy.end(gym.session, reward=verified["reward"])
    # It asks the session's /tokenize for the prompts.
    check_tokens(verified, kept, num_calls=2)
    policy.check_exact(kept, forced={0, 1})


@pytest.mark.parametrize(
    ("judge", "failure"),
    [("raises", "status 500: "), ("gives up", "judge_failed")],
    ids=["status", "class"],
)
def test_a_verifier_that_failed_is_no_reward_of_0(
    gym: Gym, policy: ServedPolicy, judge: str, failure: str
) -> None:
    saw, kept = played(gym, policy, {**ROW, "judge": judge})
    assert saw["failure"].startswith(failure)
    assert saw["verified"].get("reward", 0) == 0
    assert kept["state"] == "ended"
    assert [branch["reward"] for branch in kept["branches"]] == [None]


@pytest.mark.parametrize(("judge", "reward"), [("sits", 0), ("raises", None), ("gives up", None)])
def test_the_frame_of_the_page_ends_a_session_with_what_the_verifier_says(
    gym: Gym,
    policy: ServedPolicy,
    monkeypatch: pytest.MonkeyPatch,
    judge: str,
    reward: float | None,
) -> None:
    session = policy.open()
    openai_url, key = session.base_url, session.key
    turn = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    said = httpx.post(
        f"{openai_url}/chat/completions",
        json=turn,
        headers={"authorization": f"Bearer {key}"},
        timeout=CALL_S,
    )
    assert said.is_success
    monkeypatch.setenv("OPENAI_BASE_URL", openai_url)
    monkeypatch.setenv("OPENAI_API_KEY", key)
    frame = program_of_page("NeMo-Gym")
    assert EXAMPLE_URL in frame
    exec(frame.replace(EXAMPLE_URL, gym.bank), {"row": {**ROW, "judge": judge}, "output": []})  # noqa: S102
    (branch,) = policy.kept(session)["branches"]
    assert branch["reward"] == reward


# --- as a reward of a run -----------------------------------------------------------------


def says(coins: int, **fields: Any) -> RewardRow:
    """A row whose completion says how much is on the account."""
    question, answer = "How much do I have?", f"You have {coins} coins."
    return RewardRow(
        prompt=question,
        completion=answer,
        query=question + answer,
        answer="",
        metadata={"deposits": 0, **fields},
    )


async def judged(gym: Gym, rows: Sequence[RewardRow], **given: Any) -> Judgement:
    source = {"type": "nemo_gym", "urls": f"{gym.bank}/verify", "tries": 1, **given}
    spec = RewardSpec.model_validate({"source": source}).source
    reward = make_outside_reward("bank", spec, find_sandbox("off"))  # type: ignore[arg-type]
    try:
        return await reward.judge(rows)
    finally:
        await reward.close()


async def test_a_run_s_rows_have_sessions_of_their_own(gym: Gym) -> None:
    rows = [says(3, start=3), says(4, start=5), says(7, start=7), says(2, start=2)]
    assert (await judged(gym, rows, seeds_session=True)).rewards == [3, 2, 3, 3]
    # Without a session the server knows no account: only the number of deposits is right.
    assert (await judged(gym, rows)).rewards == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"judge": "raises"}, "status 500"),
        ({"judge": "gives up"}, "judge_failed"),
        ({"deposits": "many"}, "status 422"),
    ],
    ids=["status", "class", "field"],
)
async def test_a_row_that_it_does_not_judge_fails(
    gym: Gym, fields: dict[str, Any], found: str
) -> None:
    judgement = await judged(gym, [says(3, start=3), says(3, **fields)], seeds_session=True)
    assert judgement.rewards[0] == 3
    assert [*judgement.failures] == [1]
    assert found in str(judgement.failures[1])
