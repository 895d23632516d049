"""Adapters in recipes: their folders and names, and whether a base can have them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import write_adapter
from support.fake_roles import fake_recipe
from support.hf_hub import Hub, serving_hub, use_hub
from support.tiny_models import write_tiny_llama

from rolemesh.coordinator.commands.hub.remote_run import text_for
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.hub.hf_files import with_files
from rolemesh.coordinator.recipe.loading import dump_recipe, load_recipe, read_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.checks.inputs import check_paths
from rolemesh.engine.model_folders.adapter_config import CONFIG_FILE, WEIGHTS_FILE
from rolemesh.engine.specs import named_in

FIELD = "actor.model.adapter"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", num_layers=2)


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapters") / "one", base)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving_hub() as served:
        use_hub(served, tmp_path / "home", monkeypatch)
        yield served


def recipe_of(base: Path, role: str = "actor", **adapter: Any) -> Recipe:
    values = fake_recipe().model_dump(mode="json")
    for one in ("actor", "critic", "reference"):
        if values.get(one):
            values[one]["model"]["path"] = str(base)
    data = {"type": "reasoning_gym", "task": "chain_sum"}
    values["actor"]["data"] = data
    values["services"] = {}
    section = {"rank": 4, "alpha": 8, **adapter}
    if role == "reward":
        model = {"path": str(base), "adapter": section}
        judge = {"type": "classifier", "new_head": True, "model": model}
        values["reward"] = {"source": judge, "optimizer": {}, "data": data}
    elif role == "rollout":
        sampler = {"rollout": {"type": "hf"}, "data": data}
        values["rollout"] = {"model": {"path": str(base)}, **sampler}
        values["pools"] = {}
        values["actor"] |= {"rollout": None}
        values["actor"]["model"]["adapter"] = section
    else:
        values[role]["model"]["adapter"] = section
    return Recipe.model_validate(values)


def refusal(base: Path, role: str = "actor", **adapter: Any) -> str:
    with pytest.raises(ValueError, match=r"adapter") as caught:
        check_paths(recipe_of(base, role, **adapter), [role])
    return str(caught.value)


@pytest.mark.parametrize("role", ["actor", "critic", "reward"])
def test_an_adapter_that_fits_passes_and_one_that_does_not_is_named(
    base: Path, adapter: Path, role: str
) -> None:
    field = "reward.source.model.adapter" if role == "reward" else f"{role}.model.adapter"
    for fields in ({}, {"from": str(adapter)}, {"targets": ["q_proj", "mlp.down_proj"]}):
        check_paths(recipe_of(base, role, **fields), [role])
    told = refusal(base, role, targets=["q_proj", "wqkv"])
    assert told.startswith(f"{field}.targets has 'wqkv', but the layers of this model have no such")
    told = refusal(base, role, rank=9999)
    assert told.startswith(f"{field}.rank is 9999, but self_attn.")
    told = refusal(base, role, **{"from": "/none"})
    assert told.startswith(f"{field}.from '/none' is not a folder")


def test_a_folder_that_is_no_such_adapter_is_refused_with_the_remedy(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    given = {"from": str(adapter)}
    of = f"{FIELD}.from {str(adapter)!r}"
    assert refusal(base, **{"from": str(base)}).startswith(f"{FIELD}.from {str(base)!r} has no ")
    told = refusal(base, **given | {"rank": 8})
    assert told.startswith(f"{of} has rank 4, but adapter.rank is 8: give adapter.rank 4")
    assert refusal(base, **given | {"alpha": 9}).startswith(f"{of} has alpha 8")
    assert refusal(base, **given | {"scaling": "rslora"}).startswith(f"{of} has scaling standard")
    assert "also holds" in refusal(base, **given | {"targets": ["q_proj"]})

    copy = tmp_path / "copy"
    shutil.copytree(adapter, copy)
    changed = {"from": str(copy)}

    def rewrite(**changes: Any) -> None:
        config = json.loads((adapter / CONFIG_FILE).read_text())
        (copy / CONFIG_FILE).write_text(json.dumps({**config, **changes}))

    rewrite(use_dora=True)
    assert "has use_dora True" in refusal(base, **changed)
    (copy / CONFIG_FILE).write_text("{")
    assert "cannot be read" in refusal(base, **changed)
    (copy / CONFIG_FILE).unlink()
    assert f"has no {CONFIG_FILE}" in refusal(base, **changed)
    rewrite()
    weights = load_file(copy / WEIGHTS_FILE)
    first = sorted(weights)[0]
    save_file({name: one for name, one in weights.items() if name != first}, copy / WEIGHTS_FILE)
    assert f"lacks {first.removeprefix('base_model.model.')!r}" in refusal(base, **changed)
    save_file({**weights, first: torch.zeros(4, 3)}, copy / WEIGHTS_FILE)
    assert "with the shape [4, 3], but this base takes" in refusal(base, **changed)
    (copy / WEIGHTS_FILE).write_bytes(b"short")
    assert f"{WEIGHTS_FILE} has 5 bytes" in refusal(base, **changed)
    (copy / WEIGHTS_FILE).unlink()
    assert f"has no {WEIGHTS_FILE}" in refusal(base, **changed)


def test_names_of_adapters_at_the_hub_are_fetched_pinned_and_kept(
    hub: Hub, base: Path, adapter: Path
) -> None:
    commit = hub.put_folder("me/adapter", adapter)
    recipe = recipe_of(base, **{"from": "hf:me/adapter"})
    found = with_files(recipe)
    assert found.hf_names == {f"{FIELD}.from": f"hf:me/adapter@{commit}"}
    assert found.actor is not None
    assert found.actor.model.adapter is not None
    folder = found.actor.model.adapter.start
    assert folder is not None
    assert {one.name for one in folder.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE}
    check_paths(found, ["actor"])
    # Another machine gets the name, with its commit.
    for text in (dump_recipe(found), text_for(found, "trainer.example:50050")):
        again = read_recipe(text, "sent")
        assert again.actor is not None
        assert again.actor.model.adapter is not None
        assert str(again.actor.model.adapter.start) == f"hf:me/adapter@{commit}"
    hub.put("me/none", {"config.json": b"{}"})
    with pytest.raises(RecipeError, match=rf"{FIELD}.from is .*has no {CONFIG_FILE}: name an"):
        with_files(recipe_of(base, **{"from": "hf:me/none"}))


def test_a_sampler_apart_adds_the_adapter_to_weights_of_its_own(hub: Hub, base: Path) -> None:
    hub.put_folder("me/base", base)
    values = recipe_of(base, "rollout").model_dump(mode="json")
    values["rollout"]["model"]["path"] = "hf:me/base"
    with_files(Recipe.model_validate(values))
    assert "model.safetensors" in hub.fetched()
    found = with_files(Recipe.model_validate(values))
    assert found.rollout is not None
    check_paths(found, ["rollout"])
    assert "rank is 9999" in refusal(base, "rollout", rank=9999)


def test_relative_folders_become_absolute_where_they_are_sent_and_are_granted(base: Path) -> None:
    recipe = recipe_of(base, **{"from": "adapters/one"})
    sent = read_recipe(text_for(recipe, "127.0.0.1:50050"), "sent")
    assert sent.actor is not None
    assert sent.actor.model.adapter is not None
    assert sent.actor.model.adapter.start == Path.cwd() / "adapters" / "one"
    with pytest.raises(ValueError, match=rf"{FIELD}.from: relative paths"):
        text_for(recipe, "trainer.example:50050")
    assert recipe.actor is not None
    assert "adapters/one" in [one.value for one in named_in(recipe.actor) if one.kind == "path"]


def test_a_wrong_key_is_told_by_the_names_of_a_recipe(tmp_path: Path, base: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe_of(base)))
    with pytest.raises(RecipeError, match=rf"did you mean {FIELD}.from\?"):
        load_recipe([path], overrides=[f"{FIELD}.form=x"])
    with pytest.raises(
        RecipeError, match=r"type, rank, alpha, targets, dropout, scaling, seed, from"
    ):
        load_recipe([path], overrides=[f"{FIELD}.start_at=x"])
