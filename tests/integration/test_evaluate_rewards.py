"""`rolemesh evaluate` with classifiers and environments, at an endpoint whose answers are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.evaluations import evaluated, rolemesh, rows_beside
from support.mesh_runs import tiny_model
from support.sum_server import sum_server
from support.tiny_models import write_tiny_classifier
from transformers import AutoModelForSequenceClassification, AutoTokenizer

LONGEST = 96
"""Tokens that the classifier sees."""
NUMBERS = [(1, 2), (30, 4), (5, 60), (7, 4)]
ROUNDING = 1e-5
"""Sums of float32 in another order, of logits of about 1."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge") / "model"
    return write_tiny_classifier(folder, seed=4, max_position_embeddings=LONGEST)


@pytest.fixture
def suite(tmp_path: Path) -> Callable[..., Path]:
    """Writes a suite of sums, judged as told."""

    def write(prompts: list[str], **task: Any) -> Path:
        rows = [{"prompt": text, "answer": "11"} for text in prompts]
        for name, given in (("held", rows), ("train", [{"prompt": "t", "answer": "1"}])):
            lines = "".join(json.dumps(row) + "\n" for row in given)
            (tmp_path / f"{name}.jsonl").write_text(lines)
        files = {
            "path": str(tmp_path / "train.jsonl"),
            "held_out_path": str(tmp_path / "held.jsonl"),
        }
        path = tmp_path / "suite.yaml"
        path.write_text(yaml.safe_dump({"sums": {"data": {"type": "jsonl", **files}, **task}}))
        return path

    return write


def classifier(folder: Path) -> dict[str, Any]:
    model = {"path": str(folder), "compute_dtype": "float32", "micro_batch_tokens": 128}
    return {"type": "classifier", "label": 1, "model": model}


def logit(folder: Path, text: str) -> float:
    """What transformers makes of one text."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(model(tokens).logits[0, 1])


def test_a_classifier_scores_what_the_policy_saw_and_said(
    policy: Path, judge: Path, suite: Callable[..., Path], tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(policy)
    prompts = [f"{one} + {other}" for one, other in NUMBERS]
    reward = [{"source": classifier(judge), "weight": 2.0}, {"source": {"type": "arithmetic"}}]
    path = suite([*prompts[:2], f"3 + 4 {'words ' * 60}", *prompts[2:]], reward=reward)
    with sum_server(lambda terms, _: str(sum(terms)), decode=tokenizer.decode) as (url, _):
        code, (told,) = evaluated(
            tmp_path, "--url", url, "--tokenizer", str(policy), "--tasks", str(path)
        )
    rows = rows_beside(tmp_path / told["file"])
    assert [row["row"] for row in rows] == [0, 1, 2, 3, 4]
    # One is longer than the classifier can see: the others are judged without it.
    longest = rows.pop(2)
    assert code == 3
    assert longest["score"] is None
    assert f"but the classifier sees at most {LONGEST}" in longest["why"]
    for row, prompt, numbers in zip(rows, prompts, NUMBERS, strict=True):
        turns = [{"role": "user", "content": prompt}]
        seen = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        # A bare number that is wrong has 0.1 of arithmetic, a right one 1.
        other = 1.0 if sum(numbers) == 11 else 0.1
        expected = 2.0 * logit(judge, f"{seen}{sum(numbers)}") + other
        assert row["score"] == pytest.approx(expected, abs=ROUNDING)
    assert len({row["score"] for row in rows}) == 4
    mean = sum(row["score"] for row in rows) / 4
    assert told["tasks"]["sums"]["score"]["mean"] == pytest.approx(mean)


def test_a_classifier_that_cannot_judge_here_is_refused(
    policy: Path, judge: Path, suite: Callable[..., Path], tmp_path: Path
) -> None:
    with sum_server(lambda terms, _: str(sum(terms))) as (url, seen):
        asked = ("evaluate", "--url", url, "--tasks")
        blind = rolemesh(tmp_path, *asked, str(suite(["1 + 2"], reward=classifier(judge))))
        path = suite(["1 + 2"], reward=classifier(policy / "nowhere"))
        absent = rolemesh(tmp_path, *asked, str(path), "--tokenizer", str(policy))
        assert seen == []
    assert blind.returncode == absent.returncode == 2
    assert "reads prompts as the policy's template renders them" in blind.stderr
    assert "give --tokenizer" in blind.stderr
    assert "task sums: reward.model.path" in absent.stderr
    assert "nowhere' does not exist" in absent.stderr


def test_an_endpoint_without_token_ids_plays_no_episodes(
    policy: Path, suite: Callable[..., Path], tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(policy)
    played = {"environment": {"type": "calculator"}, "reward": {"type": "environment"}}
    path = suite(["1 + 2"], **played, max_model_len=64)
    with sum_server(lambda terms, _: str(sum(terms)), decode=tokenizer.decode) as (url, _):
        asked = ("evaluate", "--url", url, "--tokenizer", str(policy), "--tasks", str(path))
        done = rolemesh(tmp_path, *asked)
    assert done.returncode == 1
    assert "task sums is played in episodes, which take an endpoint that speaks" in done.stderr
    assert url.removesuffix("/v1") in done.stderr
    assert not list(tmp_path.glob("evaluations/*"))
