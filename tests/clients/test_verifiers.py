"""Tests of verifiers: a taskset of two turns, by two of its harnesses and both of its clients."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.client_programs import ENVIRONMENTS, PROGRAMS, run
from support.served_policy import ServedPolicy

pytestmark = pytest.mark.clients

NUM_TASKS = 2

ROUNDED = 1e-4
"""Its files have log-probs with four digits behind the point."""

RENDERED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "</think>")
"""Tokens that its renderer of Qwen 3 asks a tokenizer for."""


@pytest.fixture(scope="module")
def tokenizer(policy: ServedPolicy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's tokenizer, whose spare special tokens are called what the renderer asks for.

    It takes a token for missing that is also the unknown one.
    """
    folder = tmp_path_factory.mktemp("tokenizer")
    whole = json.loads((policy.folder / "tokenizer.json").read_text())
    vocabulary = whole["model"]["vocab"]
    spare = [token for token in whole["added_tokens"] if token["id"] > 2]
    for token, name in zip(spare, RENDERED, strict=False):
        vocabulary[name] = vocabulary.pop(token["content"])
        token["content"] = name
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    settings = json.loads((policy.folder / "tokenizer_config.json").read_text())
    del settings["unk_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text((policy.folder / "config.json").read_text())
    return folder


def evaluated(
    policy: ServedPolicy, out: Path, harness: str, *client: str
) -> tuple[list[dict[str, Any]], dict[str, Any], Any]:
    """Runs vf-eval against a session: the traces, what the session kept, and the session."""
    # One task after the other, so that each call has the same seed each time.
    session = policy.open(seed=11)
    run(
        "verifiers",
        *("vf-eval", "said-twice", "-n", str(NUM_TASKS), "-c", "1", "--no-rich", "--no-push"),
        *("-o", str(out), "--run.name", harness),
        *("--env.agent.harness.id", harness, "--env.agent.runtime.type", "subprocess"),
        *("-m", policy.model, "--client.base-url", session.base_url),
        *("--client.api-key-var", "OPENAI_API_KEY"),
        *("--sampling.max-tokens", "24", "--sampling.temperature", "1"),
        *client,
        session=session,
        variables={
            "PYTHONPATH": str(PROGRAMS),
            "UV_CACHE_DIR": str(ENVIRONMENTS / "uv-cache"),
            "UV_PYTHON_DOWNLOADS": "never",
        },
    )
    episodes = [
        json.loads(line) for line in (out / harness / "traces.jsonl").read_text().splitlines()
    ]
    assert len(episodes) == NUM_TASKS
    traces = [trace for episode in episodes for trace in episode["traces"]]
    assert [trace["errors"] for trace in traces] == [[]] * NUM_TASKS
    assert all(trace["metrics"]["turns"] == 2 for trace in traces)
    return traces, policy.kept(session), session


def reward_of(trace: Mapping[str, Any]) -> float:
    total: float = sum(each["score"] * each["weight"] for each in trace["rewards"].values())
    return total


def branches_of(trace: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Paths of nodes from a root to a leaf."""
    nodes = trace["nodes"]
    parents = {node.get("parent") for node in nodes}
    for number in range(len(nodes)):
        if number in parents:
            continue
        path, at = [], number
        while at is not None:
            path.append(nodes[at])
            at = nodes[at].get("parent")
        yield path[::-1]


@pytest.mark.parametrize("harness", ["null", "bash"])
def test_its_eval_client_asks_the_policy(
    policy: ServedPolicy, tmp_path: Path, harness: str
) -> None:
    traces, kept, session = evaluated(policy, tmp_path, harness)
    assert len(kept["calls"]) == 2 * NUM_TASKS
    # It streams, asks for the usage, and keeps no token ids: texts and counts are what it has. The
    # bash harness shows the model another system prompt in the second turn, so that one is a root.
    said = [
        [node["message"]["content"] for node in trace["nodes"] if node["sampled"]]
        for trace in traces
    ]
    answers = {call["number"]: policy.answer(call) for call in kept["calls"]}
    assert sorted(answers.values()) == sorted(text for texts in said for text in texts)
    assert len(set(answers.values())) == len(answers)
    rewards = {}
    for branch in kept["branches"]:
        shown = {answers[number] for number in branch["calls"]}
        (trace,) = [trace for trace, mine in zip(traces, said, strict=True) if shown <= set(mine)]
        rewards[branch["calls"][-1]] = reward_of(trace)
    lengths = {answers[call["number"]]: len(call["sampled_tokens"]) for call in kept["calls"]}
    for trace, texts in zip(traces, said, strict=True):
        counted = [call["usage"]["completion_tokens"] for call in trace["calls"]]
        assert counted == [lengths[text] for text in texts]
    policy.check_exact(kept)
    ended = policy.end(session, call_rewards=rewards)
    for branch in ended["branches"]:
        assert branch["reward"] == rewards[branch["calls"][-1]]
    assert harness == "bash" or len(ended["branches"]) == NUM_TASKS


@pytest.mark.parametrize("harness", ["null", "bash"])
def test_its_train_client_has_the_branches_of_the_session(
    policy: ServedPolicy, tmp_path: Path, tokenizer: Path, harness: str
) -> None:
    traces, kept, session = evaluated(
        policy,
        tmp_path,
        harness,
        *("--client.type", "train", "--client.renderer.name", "qwen3"),
        *("--client.renderer-model-name", str(tokenizer)),
    )
    policy.check_exact(kept)
    ours = {
        tuple(branch["prompt_tokens"] + branch["completion_tokens"]): branch
        for branch in kept["branches"]
    }
    rewards, theirs = {}, {}
    for trace in traces:
        for path in branches_of(trace):
            tokens = tuple(token for node in path for token in node["token_ids"])
            branch = ours[tokens]
            mask = [False] * len(branch["prompt_tokens"]) + branch["loss_mask"]
            assert [bit for node in path for bit in node["mask"]] == mask
            sampled = [
                logprob
                for logprob, bit in zip(branch["logprobs"], branch["loss_mask"], strict=True)
                if bit
            ]
            logprobs = [logprob for node in path for logprob in node["logprobs"]]
            assert logprobs == pytest.approx(sampled, abs=ROUNDED)
            rewards[branch["calls"][-1]] = theirs[tokens] = reward_of(trace)
    assert theirs.keys() == ours.keys()
    ended = policy.end(session, call_rewards=rewards)
    for branch in ended["branches"]:
        tokens = tuple(branch["prompt_tokens"] + branch["completion_tokens"])
        assert branch["reward"] == theirs[tokens]
    # The null harness says the second turn behind the first one: its tokens are those of it.
    assert harness == "bash" or len(ended["branches"]) == NUM_TASKS


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_log_probs_of_tokens_name_them_as_its_client_checks(
    policy: ServedPolicy, is_stream: bool
) -> None:
    session = policy.open()
    sampling = {"max_tokens": 4, "logprobs": 1, "seed": 3, "skip_special_tokens": False}
    answer = httpx.post(
        f"{session.base_url.removesuffix('/v1')}/inference/v1/generate",
        json={
            "model": policy.model,
            "token_ids": policy.encoded("One, two,"),
            "sampling_params": sampling,
            "stream": is_stream,
        },
        headers={"authorization": f"Bearer {session.key}"},
        timeout=60,
    )
    assert answer.is_success, answer.text
    lines = answer.text.splitlines() if is_stream else [f"data: {answer.text}"]
    parts = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    whole = [json.loads(part) for part in parts if part != "[DONE]"]
    places = [
        place
        for part in whole
        for choice in part["choices"]
        for place in (choice.get("logprobs") or {}).get("content") or ()
    ]
    (call,) = policy.kept(session)["calls"]
    assert [place["token_id"] for place in places] == call["sampled_tokens"]
    named = [entry for place in places for entry in (place, *place["top_logprobs"])]
    assert all(entry["token"] == f"token_id:{entry['token_id']}" for entry in named)
    assert [place["logprob"] for place in places] == pytest.approx(call["logprobs"], abs=1e-6)
