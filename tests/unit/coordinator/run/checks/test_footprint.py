"""Estimates of memory and disk follow from the sizes of the models, which headers of files tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.fake_recipes import PPO, fake_recipe
from support.tiny_models import write_tiny_llama
from transformers import AutoModelForCausalLM

from rolemesh.coordinator.recipe.model_sizes import num_parameters, num_trained_parameters
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.checks.footprint import PROCESS_BYTES, footprint_of, free_bytes, gib
from rolemesh.engine.models.adapters.adapters import attach
from rolemesh.engine.specs import AdapterSpec, ModelSpec


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", num_layers=3)


def test_headers_tell_the_number_of_parameters(model: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model)
    total = sum(parameter.numel() for parameter in loaded.parameters())
    layer = sum(parameter.numel() for parameter in loaded.model.layers[0].parameters())
    assert num_parameters(model) == total
    assert num_parameters(model, num_layers=1) == total - 2 * layer


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]"])
def test_what_cannot_be_read_has_no_number(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    assert num_parameters(tmp_path) is None


def ppo(model: Path, **changes: Any) -> Recipe:
    values = fake_recipe(algorithm=PPO).model_dump(mode="json")
    for role in ("actor", "critic", "reference"):
        values[role]["model"]["path"] = str(model)
    values["run"] |= changes
    return Recipe.model_validate(values)


SERVICES = dict.fromkeys(("actor", "critic", "reference", "reward"))


def test_disk_is_told_in_words(model: Path, tmp_path: Path) -> None:
    found = footprint_of(ppo(model, steps=100, checkpoint={"every_steps": 10, "keep": 2}), SERVICES)
    told = found.disk_in(tmp_path / "runs")
    assert told.startswith(f"at most {gib(3 * found.checkpoint + found.export)} in {tmp_path}/runs")
    assert f"3 x {gib(found.checkpoint)} of checkpoints" in told
    assert free_bytes(tmp_path / "not" / "made" / "yet") == free_bytes(tmp_path) > 0


def test_a_trained_role_takes_four_numbers_a_weight_and_saves_three(model: Path) -> None:
    size = num_parameters(model) or 0
    found = footprint_of(ppo(model), SERVICES)
    assert found.memory == {
        "actor": 16 * size + PROCESS_BYTES,
        "critic": 16 * size + PROCESS_BYTES,
        "reference": 4 * size + PROCESS_BYTES,
        "reward": PROCESS_BYTES,
    }
    assert found.checkpoint == 2 * 12 * size
    assert found.cuts == 2 * found.checkpoint
    assert found.export == 2 * size


def test_a_matrix_that_muon_steps_has_a_moment_less(model: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model)
    matrices = sum(
        weight.numel() for weight in loaded.model.layers.parameters() if weight.dim() > 1
    )
    values = ppo(model).model_dump(mode="json")
    del values["actor"]["optimizer"]
    both = footprint_of(Recipe.model_validate(values), SERVICES)
    values["actor"]["optimizer"] = {"type": "muon"}
    one = footprint_of(Recipe.model_validate(values), SERVICES)
    assert both.memory["actor"] - one.memory["actor"] == 4 * matrices
    assert both.checkpoint - one.checkpoint == 4 * matrices
    assert both.cuts - one.cuts == 2 * 4 * matrices


def test_an_average_takes_a_number_more_of_each_trained_weight(model: Path) -> None:
    size = num_parameters(model) or 0
    values = ppo(model).model_dump(mode="json")
    values["teacher"] = {"of": "actor", "average": 0.99}
    found = footprint_of(Recipe.model_validate(values), SERVICES)
    assert found.memory["actor"] == 20 * size + PROCESS_BYTES
    assert found.memory["critic"] == 16 * size + PROCESS_BYTES
    assert found.checkpoint == (16 + 12) * size


@pytest.mark.parametrize("targets", ["all_linear", ["q_proj", "down_proj"]])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_of_an_adapter_only_its_factors_are_trained_saved_and_exported(
    model: Path, targets: Any, device: str
) -> None:
    size = num_parameters(model) or 0
    values = ppo(model).model_dump(mode="json")
    values["actor"]["model"] |= {"adapter": {"rank": 2, "targets": targets}}
    values["pools"] = {"main": {"devices": [device], "roles": list(SERVICES)}}
    recipe = Recipe.model_validate(values)
    assert recipe.actor is not None
    lm = AutoModelForCausalLM.from_pretrained(model)
    attach(lm, recipe.actor.model.adapter)
    factors = sum(one.numel() for name, one in lm.named_parameters() if ".lora_" in name)
    assert num_trained_parameters(recipe.actor.model) == factors
    found = footprint_of(recipe, SERVICES)
    if device == "cpu":
        assert found.memory["actor"] == 4 * size + 16 * factors + PROCESS_BYTES
    else:
        # The base lies in bfloat16.
        assert found.device_memory["actor"] == 2 * size + 16 * factors
        assert found.device_rest["actor"] == 2 * size + 12 * factors
    assert found.checkpoint == 12 * size + 12 * factors  # the critic's, and the actor's
    assert found.export == 4 * factors


def test_of_a_family_without_a_plan_headers_tell_what_an_adapter_trains(
    model: Path, tmp_path: Path
) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "other"}))
    for adapter in (AdapterSpec(rank=2), AdapterSpec(rank=2, targets=("q_proj",))):
        for num_layers in (None, 2):
            known, other = (
                num_trained_parameters(ModelSpec(path=path, adapter=adapter, num_layers=num_layers))
                for path in (model, tmp_path)
            )
            assert known == other
    assert num_trained_parameters(ModelSpec(path=Path("/none"), adapter=AdapterSpec())) is None


@pytest.mark.parametrize(
    ("steps", "every", "keep", "number"), [(4, 0, 2, 1), (4, 2, 2, 2), (5, 2, 2, 3), (90, 1, 4, 5)]
)
def test_as_many_checkpoints_are_counted_as_lie_there_at_most(
    steps: int, every: int, keep: int, number: int, model: Path
) -> None:
    recipe = ppo(model, steps=steps, checkpoint={"every_steps": every, "keep": keep})
    assert footprint_of(recipe, SERVICES).checkpoints_kept == number


@pytest.mark.parametrize(("evaluated", "number"), [(1, 4), (2, 2), (4, 1)])
def test_the_best_checkpoint_is_counted_beside_the_others(
    evaluated: int, number: int, model: Path
) -> None:
    recipe = ppo(
        model,
        steps=4,
        evaluation={"every_steps": evaluated},
        checkpoint={"every_steps": 0, "keep": 2, "keep_best": {}},
    )
    assert footprint_of(recipe, SERVICES).checkpoints_kept == number


def test_services_that_run_elsewhere_take_no_memory_here(model: Path) -> None:
    found = footprint_of(ppo(model), {**SERVICES, "actor": "10.0.0.7:50051"})
    assert set(found.memory) == {"critic", "reference", "reward"}


def test_a_model_that_is_not_here_is_told(tmp_path: Path) -> None:
    found = footprint_of(ppo(tmp_path / "none"), SERVICES)
    assert found.unknown == [str(tmp_path / "none")]
    assert found.checkpoint == 0
