"""A real server of vLLM on a CPU as a teacher: its numbers are those of a teacher of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_calls import FakeCall
from support.learning_runs import learn, service_processes
from support.learning_tasks import LIKED, OTHER, VOCAB_SIZE, sampled_recipe, write_task
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.vllm_servers import VllmServer, vllm_servers

from rolemesh.engine.experience import Experience
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.models.scoring import compute_logprobs
from rolemesh.engine.specs import ModelSpec, TeacherServerSpec
from rolemesh.services.teacher.served import Scored, TeacherAtServers, TeacherFailedError

pytestmark = pytest.mark.slow

TOP_K = 8
FLOAT32 = 2e-5
"""Sums in another order, as in test_vllm_servers."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"), 1)


@pytest.fixture(scope="module")
def server(task: Path) -> Iterator[VllmServer]:
    with vllm_servers(task / "model", task, [("--no-enable-lora",)]) as (started,):
        yield started


def taught(server: VllmServer, batch: Experience, top_k: int, **fields: Any) -> tuple[Scored, str]:
    """What the server says of a batch, and how far its tokens were compared."""

    async def score() -> Scored:
        call: Any = FakeCall()
        return await teacher.score(batch, "logprobs", top_k, call)

    teacher = TeacherAtServers(TeacherServerSpec.model_validate({"urls": server.url, **fields}))
    try:
        teacher.open()
        return asyncio.run(score()), teacher.compared
    finally:
        teacher.close()


def test_a_teacher_at_a_server_says_what_ours_says(task: Path, server: VllmServer) -> None:
    batch, model = token_batch(vocab_size=VOCAB_SIZE), str(task / "model")
    found, compared = taught(server, batch, TOP_K, model=model, policy_folder=model)
    assert compared.endswith("and 5 texts")
    spec = ModelSpec.model_validate({"path": model, "compute_dtype": "float32"})
    ours = RankModel(CausalLm(spec, trainable=False))
    expected = compute_logprobs(ours, batch, temperature=1.0, top_k=TOP_K + 1)
    columns = found.columns
    torch.testing.assert_close(
        columns["logprobs"].values, expected["logprobs"].values, rtol=0, atol=FLOAT32
    )
    top = expected["top"].values
    torch.testing.assert_close(columns["logprobs_top"].values, top[:, :-1], rtol=0, atol=FLOAT32)
    # Where neighbours in the order are nearer than rounding, either may come first.
    gaps = -top.diff(dim=1)
    is_apart = torch.minimum(gaps, torch.cat([gaps[:, :1], gaps[:, :-1]], 1)) > 2 * FLOAT32
    assert is_apart.float().mean() > 0.95
    same = columns["logprobs_top_ids"].values == expected["top_ids"].values[:, :-1]
    assert same[is_apart].all()


def test_what_a_server_cannot_say_names_what_to_change(
    task: Path, server: VllmServer, tmp_path: Path
) -> None:
    model = str(task / "model")
    other = write_tiny_llama(tmp_path / "other", seed=1)
    short = token_batch(vocab_size=VOCAB_SIZE)

    def rows_to(longest: int) -> Experience:
        return token_batch(
            prompt_lengths=(longest - 24, 3), completion_lengths=(24, 4), vocab_size=VOCAB_SIZE
        )

    for batch, top_k, fields, told in (
        (short, 21, {"model": model}, "--max-logprobs 21"),
        (rows_to(64), 2, {"model": model}, "has 64 tokens.*--max-model-len 65"),
        (short, 2, {"model": "nobody"}, "serves no model 'nobody'"),
        (short, 2, {"model": model, "policy_folder": other}, "lacks a token of"),
    ):
        with pytest.raises(TeacherFailedError, match=told):
            taught(server, batch, top_k, **fields)
    # One token less is taken.
    taught(server, rows_to(63), 2, model=model)


async def test_a_run_is_taught_by_a_server(server: VllmServer, task: Path, tmp_path: Path) -> None:
    model = str(task / "model")
    algorithm = {
        "type": "on_policy_distillation",
        "policy_loss": {"type": "distillation", "top_k": TOP_K},
    }
    recipe = sampled_recipe(task, algorithm, seed=1, steps=2, worth={LIKED: 1.0, OTHER: 0.5})
    recipe["actor"]["model"]["path"] = str(write_task(tmp_path / "student", 2) / "model")
    recipe["teacher"] = {"server": {"urls": [server.url], "model": model, "policy_folder": model}}
    with service_processes(tmp_path, ("actor", "reward", "teacher")) as services:
        run = await learn(recipe, services, tmp_path / "run")
    assert len(run.records) == 2
    assert all(one > 0 for one in run.curve("kl/teacher"))
    assert all(0 < one < 1 for one in run.curve("teacher_mass"))
