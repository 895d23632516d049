"""Runs with several teachers: who scores which row, and what the policy is then taught."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_teacher import NAME, fake_teacher
from support.lasting_services import LastingServices, lasting_services
from support.learning_runs import write_rows
from support.mesh_runs import tiny_model
from support.rollout_services import process_of
from support.tiny_models import tiny_tokenizer, write_tiny_llama

from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.recipe.role_names import kind_of
from rolemesh.engine.experience import Experience
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.models.scoring import compute_logprobs
from rolemesh.engine.specs import ModelSpec
from rolemesh.engine.specs.columns import (
    TEACHER_LOGPROBS,
    teacher_voices,
    top_column,
    top_ids_column,
    weights_column,
)
from rolemesh.services.actor.servicers import ActorRole
from rolemesh.services.reward.servicers import RewardRole
from rolemesh.services.runtime.calls.runtime import Runtime
from rolemesh.services.runtime.servicers.routed_rows import RoutedRows
from rolemesh.services.teacher.servicers import TeacherRole

TOP_K = 3
TOLERANCE = 2e-5
"""Nats: float32 products of other passes."""

DOMAINS = ("math", "code", "both", "law")
ROUTE = {
    "by": "metadata.domain",
    "to": {"math": "one", "code": "two"},
    "default": {"two": 3.0, "one": 1.0},
}
WEIGHTS = {"math": {"one": 1.0}, "code": {"two": 1.0}}
"""Of each domain; of all others as below."""
SHARED = {"one": 0.25, "two": 0.75}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {
        name: write_tiny_llama(folder / name, seed=seed, max_position_embeddings=512)
        for name, seed in (("one", 11), ("two", 12))
    }
    return {"policy": tiny_model(folder / "policy"), **made}


@pytest.fixture
async def services(folders: dict[str, Path], tmp_path: Path) -> AsyncIterator[LastingServices]:
    roles = {
        "actor": ActorRole(),
        "reward": RewardRole(),
        "teacher-one": TeacherRole(),
        "teacher-two": TeacherRole(),
    }
    async with lasting_services(roles, folders["policy"], tmp_path) as up:
        rows = [
            {"prompt": f"{domain} {number}?", "answer": "4", "domain": domain}
            for number in range(4)
            for domain in DOMAINS
        ]
        write_rows(tmp_path / "prompts.jsonl", rows)
        yield up


def changes(
    services: LastingServices, folders: dict[str, Path], route: dict[str, Any], **fields: Any
) -> dict[str, Any]:
    named = {
        name: {"model": {"path": str(folders[name]), "compute_dtype": "float32"}}
        for name in ("one", "two")
    }
    return {
        "run__evaluation": {"num_prompts": 0},
        # Two steps see all rows.
        "run__prompts_per_step": 8,
        "algorithm": {
            "type": "on_policy_distillation",
            "sampling": {"samples_per_prompt": 2, "max_new_tokens": 6},
            "mini_batch_rows": 4,
            "policy_loss": {"type": "distillation", "top_k": TOP_K},
        },
        "actor__data": {"type": "jsonl", "path": str(services.folder / "prompts.jsonl")},
        "teacher": {"named": named, "route": route},
        "critic": None,
        "reference": None,
        **fields,
    }


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Experience]]:
    """What services have brought to themselves, each with the kind of who has."""
    found: list[tuple[str, Experience]] = []
    pull = Runtime.pull

    async def told(self: Runtime, *args: Any, **kwargs: Any) -> Experience:
        batch = await pull(self, *args, **kwargs)
        found.append((self.role.name, batch))
        return batch

    monkeypatch.setattr(Runtime, "pull", told)
    return found


def scored_by(folder: Path, batch: Experience) -> Experience:
    """What a model says of the rows, by itself."""
    spec = ModelSpec.model_validate({"path": folder, "compute_dtype": "float32"})
    model = RankModel(CausalLm(spec, trainable=False))
    return compute_logprobs(model, batch, temperature=1.0, top_k=TOP_K)


def domain_of(tokens: torch.Tensor) -> str:
    """That of the row's prompt."""
    text = tiny_tokenizer().decode(tokens.tolist())
    return next(domain for domain in DOMAINS if f"{domain} " in text)


@pytest.mark.parametrize("sampler", [{"type": "sync"}, {"type": "sync", "block_rows": 2}], ids=str)
async def test_each_row_is_taught_by_its_own_teachers(
    services: LastingServices,
    folders: dict[str, Path],
    pulled: list[tuple[str, Experience]],
    sampler: dict[str, Any],
) -> None:
    made = services.recipe(**changes(services, folders, ROUTE, schedule__sampler=sampler))
    run = await services.train(made)
    voices = teacher_voices(2)
    updates = [
        batch for role, batch in pulled if role == "actor" and top_column(voices[0]) in batch
    ]
    estimates = [batch for role, batch in pulled if role == "actor" and TEACHER_LOGPROBS in batch]
    assert len(updates) == len(estimates) == 2
    seen = set()
    for batch, estimated in zip(updates, estimates, strict=True):
        told = {name: scored_by(folders[name], batch) for name in SHARED}
        for row, tokens in enumerate(batch["tokens"].rows()):
            domain = domain_of(tokens)
            seen.add(domain)
            expected = WEIGHTS.get(domain, SHARED)
            weights = [float(batch[weights_column(voice)].values[row]) for voice in voices]
            assert sorted(weights) == pytest.approx(sorted([*expected.values(), 0.0][:2]))
            logprobs = torch.zeros(())
            for voice, weight in zip(voices, weights, strict=True):
                found = [batch[name(voice)] for name in (top_column, top_ids_column)]
                top, ids = [[*one.rows()][row] for one in found]
                if weight == 0:
                    # Rows have as many voices; one that says nothing is all zeros.
                    assert not top.any()
                    assert not ids.any()
                    continue
                (name,) = [one for one, share in expected.items() if share == pytest.approx(weight)]
                theirs = {key: [*column.rows()][row] for key, column in told[name].columns.items()}
                torch.testing.assert_close(top, theirs["top"], rtol=0, atol=TOLERANCE)
                assert torch.equal(ids, theirs["top_ids"])
                sampled = [*estimated[voice].rows()][row]
                torch.testing.assert_close(sampled, theirs["logprobs"], rtol=0, atol=TOLERANCE)
                logprobs = logprobs + weight * sampled
    assert seen == {*DOMAINS}
    for record, graph in zip(run.records, run.graphs, strict=True):
        assert record["time/teacher"] > 0
        for name in ("kl/teacher", "kl/teacher/one", "kl/teacher/two"):
            assert record[name] > 0.01
        asked = [node["role"] for node in graph if node["method"] == "compute_logprobs"]
        # Each has first voices, and "one" all second ones: it is asked for both in each block.
        num_blocks = 8 if "block_rows" in sampler else 1
        voices_of = ["teacher-one", "teacher-two", "teacher-one"]
        assert sorted(asked) == sorted(voices_of * num_blocks)
    # No teacher has scored a row for another one: tokens of a step are those of its own rows.
    for graph, batch in zip(run.graphs, updates, strict=True):
        nodes = [node for node in graph if node["method"] == "compute_logprobs"]
        lengths = batch["tokens"].lengths()
        voices_B = sum((batch[weights_column(voice)].values > 0).long() for voice in voices)
        assert sum(node["num_tokens"] for node in nodes) == int((lengths * voices_B).sum())


async def test_two_services_of_one_model_teach_as_one_does(
    services: LastingServices, folders: dict[str, Path], tmp_path: Path
) -> None:
    # The first has two ranks, of which each scores some of its rows; no row goes to the third.
    route = {"by": "metadata.domain", "to": {"code": "two", "none": "idle"}, "default": "one"}
    several = changes(services, {**folders, "two": folders["one"]}, route)
    named = several["teacher"]["named"]
    named |= {"one": {**named["one"], "layout": {"dp": 2}}, "idle": named["two"]}
    with process_of("teacher", tmp_path, "--layout", "dp=2") as (address, _):
        here = services.addresses
        services.addresses = {
            **here, "teacher-one": address, "teacher-idle": here["teacher-one"]
        }  # fmt: skip
        run = await services.train(services.recipe(**several))
    alone = changes(services, folders, route)
    alone["teacher"] = several["teacher"]["named"]["two"]
    services.addresses = {
        kind_of(role): address for role, address in here.items() if role != "teacher-two"
    }
    one = await services.train(services.recipe(**alone))
    for ours, theirs in zip(run.numbers, one.numbers, strict=True):
        for name in ("one", "two"):
            assert ours.pop(f"kl/teacher/{name}") > 0
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


async def test_a_policy_and_servers_may_be_teachers_beside_a_model(
    services: LastingServices, folders: dict[str, Path]
) -> None:
    route = {"by": "metadata.domain", "to": {"code": "two", "law": "own"}, "default": "one"}
    made = changes(services, folders, route)
    with fake_teacher() as server:
        made["teacher"]["named"] |= {
            "two": {
                "server": {
                    "urls": [server.url],
                    "model": NAME,
                    "policy_folder": str(services.model),
                }
            },
            "own": {"of": "actor", "average": 0.9},
        }
        run = await services.train(services.recipe(**made))
        asked = [domain_of(torch.tensor(row)) for row in server.rows]
    # Four prompts of the domain, with two completions each.
    assert asked == ["code"] * 8
    for graph in run.graphs:
        names = {(node["role"], node["method"]) for node in graph}
        assert ("actor", "compute_teacher_logprobs") in names
        assert {("teacher-one", "compute_logprobs"), ("teacher-two", "compute_logprobs")} <= names


async def test_a_kl_in_the_loss_of_grpo_is_to_each_rows_own_teacher(
    services: LastingServices, folders: dict[str, Path], pulled: list[tuple[str, Experience]]
) -> None:
    route = {"by": "metadata.domain", "to": {"code": "two"}, "default": "one"}
    grpo = {
        "type": "grpo",
        "sampling": {"samples_per_prompt": 2, "max_new_tokens": 6},
        "policy_loss": {"kl_in_loss": 0.1},
        "mini_batch_rows": 4,
    }
    await services.train(services.recipe(**changes(services, folders, route, algorithm=grpo)))
    updates = [
        batch
        for role, batch in pulled
        if role == "actor" and {"tokens", "reference_logprobs"} <= {*batch.columns}
    ]
    assert updates
    for batch in updates:
        told = {name: scored_by(folders[name], batch)["logprobs"] for name in SHARED}
        for row, tokens in enumerate(batch["tokens"].rows()):
            name = "two" if domain_of(tokens) == "code" else "one"
            found, expected = (
                [*one.rows()][row] for one in (batch["reference_logprobs"], told[name])
            )
            torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


async def test_a_row_without_a_teacher_ends_the_run_by_its_name(
    services: LastingServices, folders: dict[str, Path]
) -> None:
    route = {"by": "metadata.domain", "to": {"math": "one", "code": "two", "both": "one"}}
    with pytest.raises(RunError, match=r"has 'law' as its metadata\.domain, and teacher\.route"):
        await services.train(services.recipe(**changes(services, folders, route)))


async def test_a_service_that_ignores_the_route_is_named(
    services: LastingServices, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = RoutedRows.of

    async def deaf(runtime: Runtime, request: Any, call: Any) -> RoutedRows:
        request.ClearField("route")
        return await of(runtime, request, call)

    monkeypatch.setattr(RoutedRows, "of", deaf)
    with pytest.raises(RunError, match=r"the teacher-(one|two) was asked for its own rows and"):
        await services.train(services.recipe(**changes(services, folders, ROUTE)))
