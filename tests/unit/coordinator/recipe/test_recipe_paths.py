"""Files and folders that a recipe names are looked for before anything is started."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.fake_roles import fake_recipe
from support.model_files import write_empty_model

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.checks.inputs import check_paths
from rolemesh.engine.specs import ActorSpec, CriticSpec, ReferenceSpec, RewardSpec, RolloutRoleSpec


def recipe_with(tmp_path: Path, **actor: Any) -> Recipe:
    """A recipe whose actor has a model, and these fields."""
    model = write_empty_model(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    section = {
        "model": {"path": str(model)},
        "rollout": {"type": "hf"},
        "data": {"type": "jsonl", "path": str(rows)},
        **actor,
    }
    return fake_recipe().model_copy(update={"actor": ActorSpec.model_validate(section)})


@pytest.mark.parametrize(
    ("role", "field"),
    [
        ("actor", "actor.model.path"),
        ("critic", "critic.model.path"),
        ("reference", "reference.model.path"),
        ("reward", "reward.source.rewards.1.source.model.path"),
        ("cost", "cost.source.model.path"),
        ("rollout", "rollout.model.path"),
    ],
)
def test_the_model_folder_of_each_role_is_looked_at(tmp_path: Path, role: str, field: str) -> None:
    folder = write_empty_model(tmp_path / "folder")
    model = {"path": str(folder)}
    judge = {"type": "classifier", "model": model}
    sections = {
        "actor": {},
        "critic": CriticSpec(model=model),
        "reference": ReferenceSpec(model=model),
        "reward": RewardSpec(source=[{"source": {"type": "arithmetic"}}, {"source": judge}]),
        "cost": RewardSpec(source=judge),
        "rollout": RolloutRoleSpec(
            model=model,
            rollout={"type": "hf"},
            data={"type": "reasoning_gym", "task": "chain_sum"},
        ),
    }
    recipe = recipe_with(tmp_path, model=model)
    if role != "actor":
        recipe = recipe.model_copy(update={role: sections[role]})
    check_paths(recipe, [role])
    with (folder / "model.safetensors").open("r+b") as weights:
        weights.truncate(9)
    if role == "rollout":
        check_paths(recipe, [role])  # its weights come from the actor
        (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=f"^{re.escape(f'{field} {str(folder)!r}')}"):
        check_paths(recipe, [role])


def test_a_recipe_whose_files_are_there_passes(tmp_path: Path) -> None:
    parquet, saved = tmp_path / "tables", tmp_path / "saved" / "main"
    for folder in (parquet / "inner", saved):
        folder.mkdir(parents=True)
    (parquet / "inner" / "a.parquet").write_bytes(b"")
    sources = [
        {"data": {"type": "parquet", "path": str(parquet)}},
        {"data": {"type": "parquet", "path": str(parquet / "inner" / "a.parquet")}},
        {"data": {"type": "hf_dataset", "path": str(saved.parent), "name": "main"}},
        {"data": {"type": "reasoning_gym", "task": "chain_sum"}},
    ]
    check_paths(recipe_with(tmp_path, data={"type": "mixture", "sources": sources}), ["actor"])


@pytest.mark.parametrize(
    ("section", "field", "what"),
    [
        ({"data": {"type": "jsonl", "path": "GONE"}}, "actor.data.path", "which is no file"),
        (
            {"data": {"type": "jsonl", "path": "rows.jsonl", "held_out_path": "GONE"}},
            "actor.data.held_out_path",
            "which is no file",
        ),
        (
            {"data": {"type": "parquet", "path": "GONE"}},
            "actor.data.path",
            "neither a file nor a folder of .parquet files",
        ),
        (
            {"data": {"type": "parquet", "path": "rows.jsonl", "held_out_path": "GONE"}},
            "actor.data.held_out_path",
            "neither a file nor a folder of .parquet files",
        ),
        (
            {"data": {"type": "hf_dataset", "path": "GONE"}},
            "actor.data.path",
            "which is no folder",
        ),
        (
            {"data": {"type": "hf_dataset", "path": ".", "name": "GONE"}},
            "actor.data.path with actor.data.name",
            "which is no folder",
        ),
        (
            {
                "data": {
                    "type": "mixture",
                    "sources": [
                        {"data": {"type": "reasoning_gym", "task": "chain_sum"}},
                        {"data": {"type": "jsonl", "path": "GONE"}},
                    ],
                }
            },
            "actor.data.sources.1.data.path",
            "which is no file",
        ),
        (
            {"pretraining_data": {"type": "parquet", "path": "GONE"}},
            "actor.pretraining_data.path",
            "neither a file nor a folder of .parquet files",
        ),
    ],
)
def test_what_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: dict[str, Any], field: str, what: str
) -> None:
    recipe = recipe_with(tmp_path, **section)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="GONE") as caught:
        check_paths(recipe, ["actor"])
    assert str(caught.value).startswith(f"{field} is ")
    assert what in str(caught.value)


def test_a_folder_without_tables_is_no_parquet_source(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    data = {"type": "parquet", "path": str(tmp_path / "empty")}
    with pytest.raises(ValueError, match=r"actor\.data\.path is '.*empty'"):
        check_paths(recipe_with(tmp_path, data=data), ["actor"])


def test_roles_that_run_elsewhere_are_not_looked_at(tmp_path: Path) -> None:
    check_paths(recipe_with(tmp_path, data={"type": "jsonl", "path": "/gone"}), ["reward"])
