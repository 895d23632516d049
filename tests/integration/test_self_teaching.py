"""The policy as its own teacher, over real services: runs, and what is asked by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.learning_runs import learn, service_processes, write_rows
from support.learning_tasks import LETTERS, VOCAB_SIZE, model_of, sampled_recipe, write_task
from support.tiny_models import tiny_tokenizer
from transformers import AutoModelForCausalLM

from rolemesh.coordinator.sdk import AsyncMesh, PromptSlice
from rolemesh.engine.data.rendering.rendering import Renderer
from rolemesh.engine.data.rows import PromptRow
from rolemesh.engine.weights.checkpoints.checkpoint import open_checkpoint
from rolemesh.rpc.errors import InvalidRequestError

HINT = {"template": "{prompt} (say {answer}, {metadata.hint})"}
TOLERANCE = 2e-5
"""Nats: float32 products in another order."""


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("services")
    with service_processes(folder, ("actor", "teacher", "reward")) as addresses:
        yield addresses


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_task(tmp_path_factory.mktemp("task"), 1)
    rows = [{"prompt": one, "answer": one.upper(), "hint": f"not {one}"} for one in "abcdefgh"]
    write_rows(folder / "prompts.jsonl", rows)
    return folder


def _recipe(task: Path, teacher: dict[str, Any], **algorithm: Any) -> dict[str, Any]:
    section = {"type": "on_policy_distillation", **algorithm}
    made = sampled_recipe(task, section, seed=1, steps=3, worth={LETTERS: 1.0})
    return {**made, "teacher": teacher}


def _by_hand(folder: Path, prompt: str, tokens: list[int]) -> torch.Tensor:
    """Log-probs of tokens behind the hinted prompt, by transformers alone."""
    told = f"{prompt} (say {prompt.upper()}, not {prompt})"
    renderer = Renderer(tiny_tokenizer(VOCAB_SIZE))
    row = PromptRow(messages=({"role": "user", "content": told},))
    before = renderer.tokens(renderer.prompt_text(row))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[*before, *tokens]])
    with torch.no_grad():
        logprobs = model(ids).logits[0, len(before) - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize(
    ("teacher", "algorithm"),
    [
        ({"of": "actor"}, {}),
        (
            {"of": "actor", "average": 0.9, "prompt": HINT},
            {"policy_loss": {"type": "distillation", "top_k": 4}},
        ),
        (
            {"of": "actor", "average": 0.9, "prompt": HINT},
            {"type": "grpo", "policy_loss": {"kl_in_loss": 0.1}},
        ),
    ],
    ids=["now", "average-and-hint", "kl"],
)
async def test_a_policy_learns_from_itself(
    task: Path,
    services: dict[str, str],
    tmp_path: Path,
    teacher: dict[str, Any],
    algorithm: dict[str, Any],
) -> None:
    used = {role: services[role] for role in ("actor", "reward")}
    run = await learn(_recipe(task, teacher, **algorithm), used, tmp_path / "run")
    for line in (tmp_path / "run/dataflow.jsonl").read_text().splitlines():
        served = [(one["role"], one["method"]) for one in json.loads(line)["nodes"]]
        assert ("actor", "compute_teacher_logprobs") in served
        assert not any(role == "teacher" for role, _ in served)
    assert all(record["time/teacher"] > 0 for record in run.records)
    if not algorithm:
        # The policy as it is now: what remains is the sampler's rounding.
        assert abs(run.records[0]["kl/teacher"]) < TOLERANCE
    else:
        # Before the first step the average is the policy, but not what it is told.
        told = "kl_loss" if "type" in algorithm else "distillation_loss"
        assert run.curve(told)[0] > 100 * TOLERANCE
    checkpoint = open_checkpoint(tmp_path / "run/checkpoints/step-00000003/actor")
    assert ("average" in checkpoint.groups) == ("average" in teacher)


async def test_scores_behind_a_hint_are_those_of_a_prompt_rendered_by_hand(
    task: Path, services: dict[str, str]
) -> None:
    recipe = _recipe(task, {"of": "actor"})
    actor = {key: recipe["actor"][key] for key in ("model", "rollout", "data")}
    actor["teacher"] = {"average": 0.9, "prompt": HINT}
    teacher = {"model": model_of(task / "model"), "prompt": HINT}
    addresses = {role: services[role] for role in ("actor", "teacher")}
    async with AsyncMesh(addresses, run_id="self-teaching") as mesh:
        await mesh["actor"].initialize(actor)
        await mesh["teacher"].initialize(teacher)
        batch = await mesh["actor"].sample(
            PromptSlice(start=0, count=4), samples_per_prompt=2, max_new_tokens=6
        )
        batch |= await mesh["actor"].compute_logprobs(batch, "own", as_teacher=True, top_k=3)
        batch |= await mesh["teacher"].compute_logprobs(batch, "other", top_k=3)
        batch |= await mesh["actor"].compute_logprobs(batch, "plain")
        names = ("tokens", "prompt_lengths", "answer", "own", "own_top", "other", "other_top")
        columns = await mesh.fetch(batch, [*names, "plain"])
        with pytest.raises(InvalidRequestError, match=r"as_teacher is true, .* none that learns"):
            await mesh["teacher"].compute_logprobs(batch, "x", as_teacher=True)
        with pytest.raises(InvalidRequestError, match="without_adapter"):
            await mesh["actor"].compute_logprobs(batch, "x", as_teacher=True, without_adapter=True)
        for role in mesh.values():
            await role.drain()
    rows = columns["tokens"].rows()
    for number, tokens in enumerate(rows):
        length = int(columns["prompt_lengths"].values[number])
        completion = [int(one) for one in tokens[length:]]
        prompt = columns["answer"].strings()[number].lower()
        expected = _by_hand(task / "model", prompt, completion)
        for name in ("own", "other"):
            values = torch.tensor(columns[name].rows()[number])
            torch.testing.assert_close(values, expected, rtol=0, atol=TOLERANCE)
            top = columns[f"{name}_top"].rows()[number]
            assert top.shape == (len(completion), 3)
        plain = torch.tensor(columns["plain"].rows()[number])
        assert not torch.allclose(plain, expected, atol=1e-3)
