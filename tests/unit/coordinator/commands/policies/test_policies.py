"""Tests of which policy and which tasks words of the command line mean, and of how it is served."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from support.fake_roles import fake_recipe
from typer.testing import CliRunner

from rolemesh.coordinator.commands.policies import serving, tasks
from rolemesh.coordinator.commands.policies.policy import find_policy
from rolemesh.coordinator.commands.policies.serving import check_can_serve, wished
from rolemesh.coordinator.commands.policies.tasks import tasks_of
from rolemesh.coordinator.commands.serve_policy import app
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import read_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.engine.specs import EndpointSpec
from rolemesh.engine.specs.evaluation import RowsTaskSpec


def changed(**changes: Any) -> dict[str, Any]:
    recipe = fake_recipe(steps=20).model_dump(mode="json")
    for path, value in changes.items():
        *sections, field = path.split("__")
        inner = recipe
        for section in sections:
            inner = inner[section]
        inner[field] = value
    return recipe


def loaded(**changes: Any) -> Recipe:
    return read_recipe(yaml.safe_dump(changed(**changes)), "test")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with whole checkpoints of steps 4 and 8, and one of step 9 that is not whole."""
    folder = tmp_path / "run"
    for step, is_whole in ((4, True), (8, True), (9, False)):
        checkpoint = folder / "checkpoints" / f"step-{step:08d}"
        (checkpoint / "actor").mkdir(parents=True)
        if is_whole:
            marker = {"roles": {"actor": {"policy_version": 10 * step}}}
            (checkpoint / "COMMITTED").write_text(json.dumps(marker))
    (folder / "config.yaml").write_text(yaml.safe_dump(changed()))
    (folder / "run.json").write_text(json.dumps({"run_id": "id-of-it"}))
    return folder


def test_a_run_is_its_newest_whole_checkpoint(run: Path) -> None:
    found = find_policy(str(run))
    assert (found.run, found.step, found.version) == (run, 8, 80)
    assert found.name == f"{run}, step 8"


def test_a_step_or_a_folder_names_another(run: Path) -> None:
    assert find_policy(str(run), step=4).version == 40
    folder = run / "checkpoints" / "step-00000004"
    for named in (folder, folder / "actor"):
        found = find_policy(str(named))
        assert found.run is not None
        assert (found.run.resolve(), found.step) == (run.resolve(), 4)


def test_the_id_of_a_run_is_found_in_runs(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.parent / "runs").mkdir()
    run.rename(run.parent / "runs" / "it")
    monkeypatch.chdir(run.parent)
    assert find_policy("id-of-it").step == 8


def test_a_model_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert find_policy(str(tmp_path)).folder == tmp_path


@pytest.mark.parametrize(
    ("word", "options", "told"),
    [
        ("nothing", {}, "neither a folder nor the id of a run"),
        ("run", {"step": 5}, r"has checkpoints of steps \[4, 8\]"),
        ("run", {"best": True}, "keeps no best checkpoint"),
        ("run", {"best": True, "step": 4}, "give one of them"),
        ("run/checkpoints/step-00000009", {}, "is no whole checkpoint"),
        ("run/checkpoints/step-00000004", {"step": 4}, "is no run: leave them out"),
        ("run/checkpoints", {}, "no run, no checkpoint and no model folder"),
    ],
)
def test_what_cannot_be_served_says_why(
    run: Path, monkeypatch: pytest.MonkeyPatch, word: str, options: dict[str, Any], told: str
) -> None:
    monkeypatch.chdir(run.parent)
    with pytest.raises(ValueError, match=told):
        find_policy(word, **options)


def test_a_run_without_a_whole_checkpoint_says_so(run: Path) -> None:
    for marker in run.rglob("COMMITTED"):
        marker.unlink()
    with pytest.raises(ValueError, match="has no complete checkpoint"):
        find_policy(str(run))


def test_an_adapters_folder_says_how_it_is_served(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="--merge"):
        find_policy(str(tmp_path))


def test_the_runs_sampler_says_how_and_the_command_line_over_it(run: Path) -> None:
    rollout = {"type": "vllm", "max_model_len": 96, "dtype": "float32", "adapters": "slots"}
    (run / "config.yaml").write_text(yaml.safe_dump(changed(actor__rollout=rollout)))
    found = wished(find_policy(str(run)), ["endpoint.model_name=mine"], 77)
    assert found.rollout["dtype"] == "float32"
    # An adapter is merged into what is served.
    assert "adapters" not in found.rollout
    assert (found.endpoint.model_name, found.endpoint.port) == ("mine", 77)
    assert not found.has_length
    again = wished(find_policy(str(run)), ["rollout.max_model_len=64"])
    assert again.rollout["max_model_len"] == 64
    assert again.has_length


def test_what_is_served_is_no_shorter_than_what_the_runs_sampler_takes(run: Path) -> None:
    for changes in (
        {"actor__rollout": {"type": "hf", "max_model_len": 5000, "dtype": "float32"}},
        {
            "rollout": {
                "model": {"path": "m"},
                "rollout": {"type": "vllm", "max_model_len": 5000, "dtype": "float32"},
            }
        },
    ):
        (run / "config.yaml").write_text(yaml.safe_dump(changed(**changes)))
        found = wished(find_policy(str(run)), [])
        assert (found.rollout["max_model_len"], found.rollout["dtype"]) == (5000, "float32")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("rollout.max_len=3", r"rollout\.max_len"),
        ("rollout.max_model_len=1", r"rollout\.max_model_len"),
        ("endpoint.host=0.0.0.0", "certificate and token_variable"),
        ("actor.x=1", "give fields of rollout or endpoint"),
        ("rollout=3", "give fields of rollout or endpoint"),
    ],
)
def test_a_wrong_setting_is_refused(run: Path, override: str, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        wished(find_policy(str(run)), [override])


def test_a_port_in_use_is_refused_before_a_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} on 127.0.0.1 cannot be bound"):
            check_can_serve(EndpointSpec(port=port))


def test_without_vllm_the_command_says_what_to_install(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving.importlib.util, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, [str(run)])
    assert done.exit_code == 2
    assert "torch and vllm is not installed here: install rolemesh[gpu]" in done.output


def test_words_name_gym_tasks_with_size_and_seed() -> None:
    first, second = tasks_of(["chain_sum:7:3,gcd"], None, size=9)
    assert (first.name, first.data.held_out_size, first.data.seed) == ("chain_sum", 7, 3)
    assert (second.name, second.data.held_out_size, second.data.seed) == ("gcd", 9, 0)
    assert first.data.train_size == 0
    assert first.reward.type == "reasoning_gym"


def test_held_out_is_the_runs_data_with_its_reward() -> None:
    recipe = loaded()
    (task,) = tasks_of(["held_out"], recipe)
    assert task.data == recipe.actor.data
    assert task.reward == recipe.reward.source
    assert task.num_prompts == recipe.run.evaluation.num_prompts


def test_held_out_rows_of_agents_are_played_by_them() -> None:
    agent = {"type": "program", "command": ["python", "mine.py"], "max_turns": 3}
    change = {
        "actor__endpoint": {},
        "actor__rollout": {"type": "vllm"},
        "reward__source": {"type": "environment"},
    }
    recipe = loaded(actor__environment=agent, **change)
    (task,) = tasks_of(["held_out"], recipe)
    assert task.agent == recipe.actor.environment
    assert (task.reward, task.answer_tag) == (None, None)
    silent = loaded(
        actor__environment={**agent, "gives_reward": False},
        **{**change, "reward__source": {"type": "arithmetic"}},
    )
    with pytest.raises(RecipeError, match=r"gives no reward \(actor\.environment\.gives_reward\)"):
        tasks_of(["held_out"], silent)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "reward is left out: give it, or agent"),
        ({"agent": {"type": "program", "command": ["a"]}, "reward": {"type": "arithmetic"}}, "bes"),
        ({"agent": {"type": "program", "command": ["a"], "gives_reward": False}}, "nothing else"),
        (
            {
                "agent": {"type": "program", "command": ["a"]},
                "environment": {"type": "calculator"},
            },
            "played by one of them",
        ),
        ({"environment": {"type": "calculator"}}, "reward is left out"),
        ({"reward": {"type": "environment"}}, "there is none: give environment"),
        ({"reward": [{"source": {"type": "environment"}}]}, "there is none: give environment"),
        ({"reward": {"type": "arithmetic"}, "max_model_len": 64}, "without environment"),
    ],
)
def test_a_task_has_one_judge(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        RowsTaskSpec.model_validate({"data": {"type": "jsonl", "path": "a"}, **given})


def test_a_suite_has_gym_tasks_and_rows(tmp_path: Path) -> None:
    suite = {
        "sums": {"task": "chain_sum", "size": 5, "answer_tag": "answer"},
        "gcd": {"seed": 2},
        "mine": {"data": {"type": "jsonl", "path": "a"}, "reward": {"type": "arithmetic"}},
    }
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite, sort_keys=False))
    sums, gcd, mine = tasks_of([str(tmp_path / "suite.yaml")], None, size=11)
    assert (sums.name, sums.data.task, sums.data.held_out_size) == ("sums", "chain_sum", 5)
    assert sums.answer_tag == "answer"
    assert (gcd.data.task, gcd.data.held_out_size) == ("gcd", 11)
    assert (mine.num_prompts, mine.reward.type) == (11, "arithmetic")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--tasks is missing"),
        (["held_out"], "no run is named"),
        (["chain_sum,chain_sum:5"], "two tasks are called"),
        (["chain_sum:x"], "size"),
        (["chain_sum:1:2:3"], "NAME:SIZE:SEED"),
        (["none.yaml"], "cannot be read"),
    ],
)
def test_wrong_tasks_are_refused(words: list[str], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        tasks_of(words, None)


def test_held_out_rows_of_an_environment_are_played_by_it() -> None:
    recipe = loaded(
        actor__environment={"type": "calculator", "max_turns": 3},
        reward__source={"type": "environment"},
    )
    (task,) = tasks_of(["held_out"], recipe)
    assert task.environment == recipe.actor.environment
    assert task.reward == recipe.reward.source
    # The bound of the run's sampler decides where an episode is cut.
    assert task.max_model_len == recipe.actor.rollout.max_model_len


def test_a_classifier_at_the_hub_is_brought_with_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brought: list[tuple[str, str]] = []
    monkeypatch.setattr(tasks, "model_folder", lambda *given: brought.append(given))
    judge = {"type": "classifier", "model": {"path": "/cache/judge"}}
    recipe = loaded(reward__source=judge)
    with pytest.raises(RecipeError, match=r"task held_out: reward\.model\.path '/cache/judge'"):
        tasks_of(["held_out"], recipe)
    monkeypatch.setattr(tasks, "judge_folders", lambda *given: ())
    names = {"actor.model.path": "hf:org/policy@1", "reward.source.model.path": "hf:org/judge@2"}
    (task,) = tasks_of(["held_out"], recipe.knowing(names))
    assert task.reward.model.path == Path("/cache/judge")
    assert brought == [("hf:org/judge@2", "reward.source.model.path")]


def test_a_reward_that_the_run_trains_is_refused() -> None:
    judge = {"type": "classifier", "model": {"path": "judge"}}
    data = {"type": "jsonl", "path": "pairs.jsonl"}
    recipe = loaded(reward={"source": judge, "optimizer": {"learning_rate": 1e-5}, "data": data})
    with pytest.raises(RecipeError, match=r"trains its reward model \(reward\.optimizer\)"):
        tasks_of(["held_out"], recipe)
