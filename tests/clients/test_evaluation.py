"""Tests of lm-eval and inspect-ai with tasks of their own kinds, against the policy's endpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.client_programs import run
from support.served_policy import ServedPolicy

pytestmark = pytest.mark.clients

TASKS = Path(__file__).with_name("tasks")
ROWS = [json.loads(line) for line in (TASKS / "sky.jsonl").read_text().splitlines()]

ABOUT = 0.3
"""Of a sum of a few log-probs; two batches differ by less than 0.1 in each."""


def evaluated(policy: ServedPolicy, out: Path, model: str, route: str, *more: str) -> Any:
    """What lm-eval says of tasks: results and samples by task, and what the session kept."""
    session = policy.open()
    tokenizer = f",tokenizer={policy.folder}" if model == "local-completions" else ""
    run(
        "evaluation",
        *("lm_eval", "run", "--model", model),
        *("--model_args", f"model={policy.model},base_url={session.base_url}/{route}{tokenizer}"),
        *("--include_path", str(TASKS), "--output_path", str(out), "--log_samples"),
        *more,
        session=session,
        folder=TASKS,
    )
    (results,) = out.rglob("results_*.json")
    samples = {
        name.name.removeprefix("samples_").partition("_")[0]: [
            json.loads(line) for line in name.read_text().splitlines()
        ]
        for name in out.rglob("samples_*.jsonl")
    }
    for rows in samples.values():
        rows.sort(key=lambda row: int(row["doc_id"]))
    return json.loads(results.read_text())["results"], samples, policy.kept(session)


def test_likelihoods_of_lm_eval_are_those_of_the_model(
    policy: ServedPolicy, tmp_path: Path
) -> None:
    results, samples, kept = evaluated(
        policy, tmp_path, "local-completions", "completions", "--tasks", "sky,says"
    )
    # Each word has its own likelihood, and the three right ones the greatest.
    assert results["sky"]["acc,none"] == 1
    assert len(samples["sky"]) == len(ROWS)
    for row, sample in zip(ROWS, samples["sky"], strict=True):
        text = policy.encoded(row["text"])
        for word, ((likelihood, _),) in zip(row["words"], sample["resps"], strict=True):
            whole = text + policy.encoded(word)
            expected = sum(policy.logprobs(whole)[len(text) :])
            assert float(likelihood) == pytest.approx(expected, abs=ABOUT)
    written = [sample["resps"][0][0] for sample in samples["says"]]
    answers = [policy.answer(call) for call in kept["calls"]]
    assert all(any(answer.startswith(text) for answer in answers) for text in written)
    policy.check_exact(kept)


def test_lm_eval_chats(policy: ServedPolicy, tmp_path: Path) -> None:
    _, samples, kept = evaluated(
        policy,
        tmp_path,
        *("local-chat-completions", "chat/completions", "--tasks", "says"),
        "--apply_chat_template",
    )
    written = [sample["resps"][0][0] for sample in samples["says"]]
    answers = [policy.answer(call) for call in kept["calls"]]
    assert len(answers) == len(ROWS)
    assert all(any(answer.startswith(text) for answer in answers) for text in written)
    for row in ROWS:
        assert any(row["text"] in policy.text(call["added_tokens"]) for call in kept["calls"])


def inspected(policy: ServedPolicy, out: Path, task: str) -> tuple[dict[str, Any], dict[str, Any]]:
    session = policy.open()
    run(
        "evaluation",
        *("inspect", "eval", f"{TASKS / 'greeting.py'}@{task}"),
        *("--model", f"openai-api/ours/{policy.model}"),
        *("--log-dir", str(out), "--log-format", "json", "--display", "plain"),
        variables={"OURS_BASE_URL": session.base_url, "OURS_API_KEY": session.key},
    )
    (log,) = out.glob("*.json")
    said = json.loads(log.read_text())
    assert said["status"] == "success"
    return said, policy.kept(session)


def test_inspect_scores_answers(policy: ServedPolicy, tmp_path: Path) -> None:
    log, kept = inspected(policy, tmp_path, "greeting")
    texts = sorted(
        sample["output"]["choices"][0]["message"]["content"] for sample in log["samples"]
    )
    assert texts == sorted(policy.answer(call) for call in kept["calls"])
    right = sum("ello" in text.lower() for text in texts) / len(texts)
    assert log["results"]["scores"][0]["metrics"]["accuracy"]["value"] == right
    policy.check_exact(kept)


def test_inspect_runs_tools_that_the_policy_calls(policy: ServedPolicy, tmp_path: Path) -> None:
    log, kept = inspected(policy, tmp_path, "forecast")
    ((_, call, result, _),) = [sample["messages"] for sample in log["samples"]]
    (asked,) = call["tool_calls"]
    assert asked["function"] == "weather"
    assert result["content"] == f"It rains in {asked['arguments']['city']}."
    assert [call["parent"] for call in kept["calls"]] == [None, 0]
    assert result["content"] in policy.text(kept["calls"][1]["added_tokens"])
    policy.check_exact(kept, forced={0, 1})
