"""Tests of `rolemesh plan` as people call it: what it shows, writes and refuses."""

from __future__ import annotations

import asyncio
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from support.mapping_jobs import LLAMAS
from support.public_models import CONFIGS, config_folder
from support.recorded_folders import CALLS, run_folder

from rolemesh.coordinator.commands.plan import app
from rolemesh.coordinator.mapping.job import from_recipe
from rolemesh.coordinator.mapping.machines.devices import DEVICES
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.run.checks.planning import plan_step
from rolemesh.coordinator.run.saving.turns import TURNS_FILE, Turn

REPOSITORY = Path(__file__).resolve().parents[4]
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
RECIPE = """
run: {{name: planned, steps: 1, prompts_per_step: 128}}
algorithm: {{type: ppo, sampling: {{max_new_tokens: 1024}}, mini_batch_rows: 64}}
actor:
  model: {{path: {model}}}
  rollout: {{type: vllm, max_model_len: 2048}}
  data: {{type: jsonl, path: data.jsonl}}
critic: {{model: {{path: {model}}}}}
reference: {{model: {{path: {model}}}}}
reward: {{source: {{type: arithmetic}}}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return recipe_of(tmp_path, QWEN)


def recipe_of(directory: Path, config: dict[str, Any], text: str = RECIPE) -> Path:
    model = directory / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(config))
    path = directory / "recipe.yaml"
    path.write_text(text.format(model=model))
    return path


def plan(*arguments: str | Path, code: int = 0) -> str:
    result = typer.testing.CliRunner().invoke(app, [str(one) for one in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def planned(*arguments: str | Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(plan(*arguments, "--json"))
    return told


def test_a_plan_says_where_each_role_is_and_what_the_step_takes(recipe: Path) -> None:
    told = planned(recipe, "--gpus", "8", "--gpu", "h100")
    roles = {role["role"] for pool in told["pools"] for role in pool["roles"]}
    assert roles == {"actor", "critic", "reference"}
    used = sum(pool["size"] for pool in told["pools"])
    assert used + told["idle_devices"] == 8
    for pool in told["pools"]:
        assert pool["most_bytes"] < 0.9 * DEVICES["h100"].memory_bytes
        assert 0 < pool["busy"] <= 1
    assert max(task["end"] for task in told["tasks"]) == pytest.approx(told["period"])
    assert told["tokens_per_s"] == pytest.approx(128 * 2048 / told["period"])
    assert 0 < told["utilisation"] <= 1
    assert [one["period"] for one in told["runners_up"]] == sorted(
        one["period"] for one in told["runners_up"]
    )
    assert told["partitions"] == 5


def test_explain_says_why_others_lose_and_what_is_assumed(recipe: Path) -> None:
    shown = plan(recipe, "--gpus", "8", "--gpu", "h100", "--explain")
    assert "% slower" in shown
    assert "for 128 rows of 1024 tokens of prompt and 1024 of completion in the mean" in shown
    assert "seconds are assumptions" in shown
    assert "--set" in shown
    assert "actor.generate" in shown
    bare = plan(recipe, "--gpus", "8", "--gpu", "h100")
    assert "% slower" not in bare


def test_a_role_on_several_machines_is_said_not_to_start_yet(recipe: Path) -> None:
    arguments = (recipe, "--gpus=16", "--gpu=h100", "--together=actor,critic,reference")
    (note,) = planned(*arguments)["notes"]
    assert "start such a service on several hosts yourself" in note
    assert "--at-most actor=8" in plan(*arguments)
    assert not planned(*arguments, "--at-most=actor=8")["notes"]


def test_adapters_fit_where_whole_models_do_not(recipe: Path) -> None:
    """7B with a critic, and the base as reference, on one GPU: also as a recipe."""
    adapters = [f"--set={role}.model.adapter={{rank: 16}}" for role in ("actor", "critic")]
    adapters.append("--set=reference.model=null")
    path = recipe.parent / "planned.yaml"
    told = planned(recipe, "--gpus", "1", "--gpu", "l40s", *adapters, "--write", path)
    (pool,) = told["pools"]
    assert {role["role"] for role in pool["roles"]} == {"actor", "critic"}
    assert pool["most_bytes"] < 0.9 * DEVICES["l40s"].memory_bytes
    assert "actor.compute_reference_logprobs" in {task["name"] for task in told["tasks"]}
    assert load_recipe([path]).served_by_actor == {"reference"}
    plan(recipe, "--gpus", "1", "--gpu", "l40s", code=1)


SFT = """
run: {{name: planned, steps: 1, prompts_per_step: 64, numerics: fast}}
algorithm: {{type: sft, mini_batch_rows: 64}}
actor: {{model: {{path: {model}}}, data: {{type: jsonl, path: data.jsonl}}}}
"""


def test_experts_are_shared_out_where_their_gathers_take_longer_than_rows(tmp_path: Path) -> None:
    """Few tokens and many experts: rows travel, and the written recipe says so."""
    recipe, path = recipe_of(tmp_path, CONFIGS["Qwen3-30B-A3B"], SFT), tmp_path / "planned.yaml"
    lengths = ("--prompt-tokens=64", "--completion-tokens=64")
    told = planned(recipe, "--gpus=8", "--gpu=h100", *lengths, "--write", path)
    (role,) = told["pools"][0]["roles"]
    assert role["layout"] == "1-1-8 fsdp 8 ep 8"
    assert load_recipe([path]).layout("actor").ep == role["cut"]["ep"] == 8
    # Of a model without experts nothing is said.
    dense = recipe_of(tmp_path, QWEN, SFT)
    assert "ep:" not in plan(dense, "--gpus=8", "--gpu=h100", *lengths, "--explain")


def test_rows_that_fit_on_no_gpu_are_cut(tmp_path: Path) -> None:
    """7B on rows of 131,072 tokens: the written recipe says how many ranks have a row."""
    recipe = recipe_of(tmp_path, CONFIGS["Qwen2.5-7B-Instruct"], SFT)
    path = tmp_path / "planned.yaml"
    lengths = ("--prompt-tokens=2048", "--completion-tokens=129024")
    told = planned(recipe, "--gpus=8", "--gpu=h100", *lengths, "--write", path)
    (role,) = told["pools"][0]["roles"]
    assert " cp " in role["layout"]
    layout = load_recipe([path]).layout("actor")
    assert layout.cp == role["cut"]["cp"] > 1
    assert layout.described() == role["layout"]


def test_the_recipe_of_a_mixture_for_8_gpus_has_the_layout_of_its_plan(tmp_path: Path) -> None:
    model = config_folder(tmp_path, "Qwen3-30B-A3B")
    path = REPOSITORY / "recipes" / "gpu" / "grpo-30b-a3b-8-gpus.yaml"
    settings = [f"--set={role}.model.path={model}" for role in ("actor", "reference")]
    told = planned(path, "--gpus=8", "--gpu=h100", *settings)
    (pool,) = told["pools"]
    loaded = load_recipe([path])
    for role in pool["roles"]:
        own, found = loaded.layout(role["role"]), role["cut"]
        assert {name: getattr(own, name) for name in ("pp", "tp", "dp", "fsdp", "ep")} == {
            name: found[name] for name in ("pp", "tp", "dp", "fsdp", "ep")
        }
    actor = pool["roles"][0]["cut"]
    assert loaded.actor is not None
    assert loaded.actor.model.micro_batch_tokens == actor["micro_batch_tokens"]
    assert (actor["generate_tp"], actor["recompute"], actor["offload"]) == (4, "full", True)


@pytest.mark.parametrize("gpus", [4, 8, 16])
def test_the_written_recipe_loads_with_the_plan_in_it(recipe: Path, gpus: int) -> None:
    path = recipe.parent / "planned.yaml"
    told = planned(recipe, "--gpus", str(gpus), "--gpu", "a100-80", "--write", path)
    loaded = load_recipe([path])
    assert loaded.run == load_recipe([recipe]).run
    for pool in told["pools"]:
        spec = loaded.pools[pool["name"]]
        assert len(spec.devices) == pool["size"]
        assert set(spec.roles) == {role["role"] for role in pool["roles"]}
        for role in pool["roles"]:
            layout = loaded.layout(role["role"])
            assert layout.world_size == role["ranks"]
            assert layout.fsdp == role["cut"]["fsdp"]
            assert layout.tp == role["cut"]["tp"]
    devices = [device for spec in loaded.pools.values() for device in spec.devices]
    assert len(set(devices)) == len(devices)
    assert loaded.pools["reward"].devices == ("cpu",)
    assert loaded.actor is not None
    assert loaded.actor.rollout is not None
    assert 0 < getattr(loaded.actor.rollout, "gpu_memory_utilization", 0) < 0.9
    # The planned recipe builds its graph, and planning it again changes nothing.
    assert asyncio.run(plan_step(loaded))
    again = planned(path, "--gpus", str(gpus), "--gpu", "a100-80")
    assert again["period"] == pytest.approx(told["period"], rel=0.05)


def test_the_written_recipe_says_what_was_predicted(recipe: Path) -> None:
    path = recipe.parent / "planned.yaml"
    told = planned(recipe, "--gpus", "4", "--gpu", "a100-80", "--write", path)
    loaded = load_recipe([path])
    section = loaded.plan
    assert section is not None
    assert section.step_s == told["period"]
    assert section.tokens == told["tokens"] == 128 * 2048
    assert (section.rows, section.basis) == (told["rows"], told["basis"])
    assert [
        (task.name, task.pool or "", task.start_s, task.end_s, task.is_ahead)
        for task in section.tasks
    ] == [
        (task["name"], task["pool"], task["start"], task["end"], task["is_ahead"])
        for task in told["tasks"]
    ]
    assert {name: pool.roles for name, pool in section.pools.items()} == {
        **{
            pool["name"]: {role["role"]: role["layout"] for role in pool["roles"]}
            for pool in told["pools"]
        },
        "reward": {"reward": "1-1-1"},
    }
    for pool in told["pools"]:
        assert section.pools[pool["name"]].devices == f"{pool['size']} a100-80"
    # Planned again, it says what was predicted last.
    again = planned(path, "--gpus=8", "--gpu=h100", "--write", path)
    new = load_recipe([path]).plan
    assert new is not None
    assert new.step_s == again["period"] < section.step_s


def test_parameters_that_are_not_cut_are_written_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    role_of = from_recipe._role

    def replicated(*arguments: Any) -> Any:
        found = role_of(*arguments)
        if found is None:
            return None
        return replace(found, freedom=replace(found.freedom, cuts_over_data=(False,)))

    monkeypatch.setattr(from_recipe, "_role", replicated)
    path = tmp_path / "planned.yaml"
    tiny = recipe_of(tmp_path, LLAMAS["tiny"])
    told = planned(tiny, "--gpus=2", "--gpu=h100", "--together=actor,critic", "--write", path)
    cuts = {role["role"]: role["cut"] for pool in told["pools"] for role in pool["roles"]}
    assert any(cut["dp"] > 1 and cut["fsdp"] == 1 for cut in cuts.values())
    for role, cut in cuts.items():
        assert load_recipe([path]).layout(role).fsdp == cut["fsdp"]


def test_the_drawing_is_an_svg_with_every_long_task(recipe: Path) -> None:
    path = recipe.parent / "step.svg"
    plan(recipe, "--gpus", "8", "--gpu", "h100", "--svg", path)
    root = ET.parse(path).getroot()
    titles = [one.text or "" for one in root.iter("{http://www.w3.org/2000/svg}title")]
    for name in ("actor.generate", "actor.update", "critic.update"):
        assert any(title.startswith(name) for title in titles)
    width = float(root.attrib["viewBox"].split()[2])
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        if "x" in rect.attrib:
            assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width


def test_shorter_completions_make_a_shorter_step(recipe: Path) -> None:
    arguments = (recipe, "--gpus", "8", "--gpu", "h100", "--prompt-tokens", "256")
    long, short = planned(*arguments), planned(*arguments, "--completion-tokens", "200")
    assert short["period"] < 0.8 * long["period"]


@pytest.mark.parametrize("name", ["async-grpo", "dapo", "online-dpo", "safe-rlhf", "remax"])
def test_recipes_of_the_repository_can_be_planned(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMAS["tiny"]))
    loaded = load_recipe([REPOSITORY / "recipes" / f"{name}.yaml"])
    models = [
        f"--set={role}.model.path={tmp_path}"
        for role in loaded.roles
        if hasattr(loaded.section(role), "model")
    ]
    path = tmp_path / "planned.yaml"
    file = REPOSITORY / "recipes" / f"{name}.yaml"
    told = planned(file, *models, "--gpus", "4", "--gpu", "h100", "--write", path)
    assert load_recipe([path]).pools
    roles = {role["role"] for pool in told["pools"] for role in pool["roles"]}
    assert "actor" in roles
    if name == "async-grpo":
        # Sampling for later steps needs devices of its own.
        pool = next(p for p in told["pools"] if any(r["role"] == "rollout" for r in p["roles"]))
        assert len(pool["roles"]) == 1
        shown = plan(file, *models, "--gpus", "1", "--gpu", "h100", code=1)
        assert "needs 2 devices, and there are 1" in " ".join(shown.split())


def test_schedules_are_compared_and_none_is_chosen(recipe: Path) -> None:
    arguments = (recipe, "--gpus=8", "--gpu=h100", "--completion-tokens=300")
    told = planned(*arguments, "--schedules")
    found = told["schedules"]
    assert list(found) == [
        "the actor samples",
        "rollout services, sync",
        "rollout services, one step ahead",
        "rollout services, async",
    ]
    # The recipe's own is planned; sampling ahead hides the shorter of sampling and training.
    assert told["period"] == pytest.approx(found["the actor samples"])
    assert found["rollout services, one step ahead"] < found["rollout services, sync"]
    assert "changes what is learnt" in plan(*arguments, "--schedules")
    assert planned(*arguments)["schedules"] == {}


def test_rows_that_are_given_need_lengths(tmp_path: Path) -> None:
    text = """
run: {{name: dpo, steps: 1, prompts_per_step: 8}}
algorithm: {{type: dpo, mini_batch_rows: 8}}
actor: {{model: {{path: {model}}}, data: {{type: jsonl, path: pairs.jsonl}}}}
reference: {{model: {{path: {model}}}}}
"""
    path = recipe_of(tmp_path, LLAMAS["tiny"], text)
    shown = plan(path, "--gpus", "2", "--gpu", "h100", code=2)
    assert "give --prompt-tokens and --completion-tokens" in shown
    told = planned(path, "--gpus=2", "--gpu=h100", "--prompt-tokens=64", "--completion-tokens=64")
    assert told["period"] > 0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--gpus=0", "--gpu=h100"), 2, "--gpus is 0: give 1 to 4096"),
        (("--gpus=4", "--gpu=h1000"), 2, "'h1000' is no device: give one of a100-40"),
        (
            ("--gpus=4", "--gpus=4", "--gpu=h100"),
            2,
            "--gpus is given 2 times and --gpu 1 times",
        ),
        (
            ("--gpus=4", "--gpu=h100", "--together=actor,critic", "--apart=actor,critic"),
            2,
            "actor and critic are to be apart, and also together",
        ),
        (("--gpus=4", "--gpu=h100", "--together=actor"), 2, "give roles, e.g. --together"),
        (("--gpus=4", "--gpu=h100", "--at-most=actor"), 2, "give ROLE=VALUE"),
        (("--gpus=4", "--gpu=h100", "--at-most=actor=x"), 2, "give a whole number"),
        (("--gpus=4", "--gpu=h100", "--on=actor=l40s"), 2, "actor is to be on 'l40s', but"),
        (("--gpus=4", "--gpu=h100", "--at-most=judge=1"), 2, "names the role 'judge'"),
        (
            ("--gpus=4", "--gpu=h100", "--completion-tokens=2000"),
            2,
            "--completion-tokens is 2000, but sampling.max_new_tokens is 1024",
        ),
        (
            ("--gpus=4", "--gpu=h100", "--prompt-tokens=2000"),
            2,
            "--prompt-tokens is 2000, but max_model_len is 2048",
        ),
        (
            ("--gpus=1", "--gpu=h100", "--no-offload"),
            1,
            "critic needs 1 more h100 GPU or offload",
        ),
        (
            ("--gpus=8", "--gpu=h100", "--at-most=actor=1", "--no-offload"),
            1,
            "actor needs 1 more h100 GPU or offload",
        ),
        (
            ("--gpus=1", "--gpu=h200", "--apart=actor,critic"),
            1,
            "the placement that is wished needs 2 devices, and there are 1: 1 more",
        ),
    ],
)
def test_what_is_wrong_or_missing_is_said(
    recipe: Path, arguments: tuple[str, ...], code: int, text: str
) -> None:
    shown = plan(recipe, *arguments, code=code)
    assert text in " ".join(shown.split())


def test_what_is_said_to_be_missing_is_enough_and_no_less_is(recipe: Path) -> None:
    shown = plan(recipe, "--gpus=2", "--gpu=rtx4090", code=1)
    lacks = [int(number) for number in re.findall(r"needs (\d+) more", shown)]
    assert lacks
    enough = 2 + max(lacks)
    assert planned(recipe, f"--gpus={enough}", "--gpu=rtx4090")["pools"]
    assert "needs 1 more" in plan(recipe, f"--gpus={enough - 1}", "--gpu=rtx4090", code=1)


def test_a_model_that_nothing_is_known_of_is_named(tmp_path: Path) -> None:
    path = recipe_of(tmp_path, {"model_type": "mamba"})
    assert "model_type 'mamba'" in plan(path, "--gpus=1", "--gpu=h100", code=2)
    (tmp_path / "model" / "config.json").unlink()
    assert "has no config.json that can be read" in plan(path, "--gpus=1", "--gpu=h100", code=2)


def test_two_kinds_of_devices_are_numbered_one_after_the_other(recipe: Path) -> None:
    path = recipe.parent / "planned.yaml"
    told = planned(
        recipe, "--gpus=4", "--gpu=h100", "--gpus=4", "--gpu=l40s", "--on=reference=l40s",
        "--on=actor=h100", "--on=critic=h100", "--write", path,
    )  # fmt: skip
    kinds = {role["role"]: pool["device"] for pool in told["pools"] for role in pool["roles"]}
    assert kinds == {"actor": "h100", "critic": "h100", "reference": "l40s"}
    loaded = load_recipe([path])
    devices = [device for pool in loaded.pools.values() for device in pool.devices]
    assert len(devices) == len(set(devices))


def test_a_plan_from_a_run_stands_on_its_calls_its_rows_and_its_settings(tmp_path: Path) -> None:
    directory = run_folder(tmp_path, steps=9, run__directory="here")
    settings = {"actor.model.micro_batch_tokens": 1024}
    turn = Turn(step=3, settings=settings, best=settings, is_last=True)
    (directory / TURNS_FILE).write_text(json.dumps(turn.to_dict()) + "\n")
    written = tmp_path / "next.yaml"
    shown = plan("--from-run", directory, "--gpus=2", "--gpu=cpu", f"--write={written}")
    # The median of steps 5 to 9.
    measured_s = 7 * (sum(CALLS) + 0.03)
    assert f"as it was placed: {measured_s:.3g} s a step measured" in shown
    assert "30 tokens of prompt" in shown
    assert "8 calls of 1 runs" in shown
    planned = load_recipe([written])
    assert planned.run.directory is None
    told = json.loads(plan("--from-run", directory, "--gpus=2", "--gpu=cpu", "--json"))
    assert told["from_run"]["measured_s"] == pytest.approx(measured_s)
    # The calls of the run are all that its predictions were fitted to.
    assert told["from_run"]["predicted_s"] == pytest.approx(measured_s, rel=0.2)
    assert f"The run before: {measured_s:.3g} s a step." in written.read_text()


def test_a_plan_from_a_run_has_no_other_recipe_and_one_kind_of_device(
    recipe: Path, tmp_path: Path
) -> None:
    directory = run_folder(tmp_path / "made")
    gpus = ("--gpus=2", "--gpu=cpu")
    shown = plan(recipe, "--from-run", directory, *gpus, code=2)
    assert "has a recipe and rows of its own" in shown
    assert "no recipe is given" in plan(*gpus, code=2)
    kinds = ("--gpus=2", "--gpu=h100", "--gpus=2", "--gpu=a100-80")
    assert "give one" in plan("--from-run", directory, *kinds, code=2)
    assert "has no config.yaml" in plan("--from-run", tmp_path, *gpus, code=2)
