"""Models and data at the hub: fetched by its own client, pinned, and refused with a remedy."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from support.hf_hub import TOKEN, Hub, client_environment, serving_hub, use_hub

from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.hub.hf_files import with_files
from rolemesh.coordinator.recipe.loading import dump_recipe, load_recipe, read_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.saving.resume import ResumeError, check_changes
from rolemesh.engine.data.files.tables import hf_records
from rolemesh.engine.specs import HfDatasetSpec

WEIGHTS = bytes(range(256)) * 8
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "chat_template.jinja": b"{{ messages }}",
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": WEIGHTS[::-1],
    # What a model's folder may hold besides: of other formats, twice as large, or code.
    "pytorch_model.bin": b"a pickle",
    "modeling_tiny.py": b"raise SystemExit",
    "consolidated.safetensors": WEIGHTS,
    "onnx/model.json": b"{}",
    "README.md": b"# Tiny",
}
LIGHT = ["chat_template.jinja", "config.json", "tokenizer.json"]
WANTED = sorted([*LIGHT, *(f"model-0000{one}-of-00002.safetensors" for one in (1, 2))])
REPO = "me/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving_hub() as served:
        use_hub(served, tmp_path / "home", monkeypatch)
        yield served


def recipe_of(path: str, **more: object) -> Recipe:
    """A recipe of two roles with the same model."""
    model = {"path": path}
    actor = {"model": model, "rollout": {"type": "hf"}}
    return read_recipe(
        json.dumps(
            {
                "run": {"name": "small", "steps": 2, "prompts_per_step": 4},
                "algorithm": {"type": "ppo"},
                "actor": {**actor, "data": {"type": "reasoning_gym", "task": "chain_sum"}, **more},
                "critic": {"model": model},
                "reward": {"source": {"type": "arithmetic"}},
            }
        ),
        "recipe",
    )


def path_of(recipe: Recipe) -> Path:
    assert recipe.actor is not None
    return recipe.actor.model.path


def refused(path: str, **how: bool) -> str:
    with pytest.raises(RecipeError) as caught:
        with_files(recipe_of(path), **how)
    return str(caught.value)


def test_a_name_becomes_a_folder_of_the_cache_with_what_models_need(
    hub: Hub, tmp_path: Path
) -> None:
    commit = hub.put(REPO, FILES)
    found = with_files(recipe_of(f"hf:{REPO}"))
    folder = path_of(found)
    assert folder == tmp_path / "home" / "hub" / "models--me--tiny" / "snapshots" / commit
    assert found.critic is not None
    assert found.critic.model.path == folder
    assert sorted(one.name for one in folder.iterdir()) == WANTED
    assert (folder / "model-00001-of-00002.safetensors").read_bytes() == WEIGHTS
    # Both roles are served by one fetch.
    assert hub.fetched() == WANTED
    name = f"hf:{REPO}@{commit}"
    assert found.hf_names == {"actor.model.path": name, "critic.model.path": name}
    # A judge's model in a list of rewards, at a branch of its own.
    hub.put(REPO, FILES, branch="v2")
    judge = {"type": "classifier", "model": {"path": f"hf:{REPO}@v2"}}
    tree = yaml.safe_load(dump_recipe(recipe_of("models/tiny")))
    tree["reward"] = [{"source": {"type": "arithmetic"}}, {"source": judge, "name": "judge"}]
    judged = with_files(Recipe.model_validate(tree))
    ((field, _),) = judged.hf_names.items()
    assert field == "reward.source.rewards.1.source.model.path"
    assert with_files(read_recipe(dump_recipe(judged), "config.yaml")) == judged


def test_records_name_the_commit_and_a_resumed_run_keeps_it(hub: Hub, tmp_path: Path) -> None:
    commit = hub.put(REPO, FILES)
    begun = with_files(recipe_of(f"hf:{REPO}"))
    kept = tmp_path / "config.yaml"
    kept.write_text(dump_recipe(begun))
    assert yaml.safe_load(kept.read_text())["actor"]["model"]["path"] == f"hf:{REPO}@{commit}"
    began_with = load_recipe([kept])
    hub.put(REPO, FILES | {"config.json": b'{"new": true}'})
    # Named as before, by the recipe's own name, and by the run's record: the same bytes.
    for recipe in (recipe_of(f"hf:{REPO}"), began_with):
        found = with_files(recipe, began_with=began_with)
        assert path_of(found) == path_of(begun)
        assert check_changes(began_with, found) == []
    asked = len(hub.asked)
    with_files(began_with)
    assert len(hub.asked) == asked  # a commit that is there is not asked for
    moved = with_files(recipe_of(f"hf:{REPO}@main"), began_with=began_with)
    with pytest.raises(ResumeError, match=f"actor.model.path was 'hf:{REPO}@{commit}', is 'hf:"):
        check_changes(began_with, moved)


def test_settings_and_tokenizer_come_without_weights_where_these_are_not_needed(hub: Hub) -> None:
    hub.put(REPO, FILES)
    with_files(recipe_of(f"hf:{REPO}"), weights=False)
    assert hub.fetched() == LIGHT


def test_offline_the_cache_answers_or_the_error_says_what_it_lacks(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.put(REPO, FILES)
    fetched = with_files(recipe_of(f"hf:{REPO}"), weights=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert with_files(recipe_of(f"hf:{REPO}"), weights=False) == fetched
    told = refused(f"hf:{REPO}")
    assert told.startswith(f"actor.model.path is 'hf:{REPO}@{commit}': HF_HUB_OFFLINE is set")
    assert "lacks 2 files, e.g. model-00001-of-00002.safetensors: unset it, or run" in told
    assert "lacks which commit that is" in refused("hf:me/other")
    assert "lacks all of it" in refused(f"hf:me/other@{commit}")
    assert "nothing is fetched here" in refused("hf:me/other", fetches=False)


def test_a_hub_that_is_down_leaves_the_cache(hub: Hub) -> None:
    hub.put(REPO, FILES)
    fetched = with_files(recipe_of(f"hf:{REPO}"))
    hub.status = 500
    assert with_files(recipe_of(f"hf:{REPO}")) == fetched
    assert "does not answer, and the cache lacks it" in refused("hf:me/other")


def test_a_download_that_breaks_off_goes_on_where_it_was(hub: Hub) -> None:
    hub.put(REPO, FILES)
    broken = "model-00002-of-00002.safetensors"
    hub.breaks_off.add(broken)
    found = with_files(recipe_of(f"hf:{REPO}"))
    assert (path_of(found) / broken).read_bytes() == WEIGHTS[::-1]
    assert hub.fetched().count(broken) == 2


@pytest.mark.parametrize(
    ("altered", "told"),
    [
        pytest.param(WEIGHTS[:-1] + b"?", "came with other bytes than the hub lists", id="hash"),
        pytest.param(WEIGHTS + b"more", "came with other bytes", id="size"),
    ],
)
@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "tokenizer.json"])
def test_other_bytes_than_listed_do_not_stay_in_the_cache(
    hub: Hub, name: str, altered: bytes, told: str
) -> None:
    hub.put(REPO, FILES | {"tokenizer.json": WEIGHTS})
    hub.altered[name] = altered
    assert told in refused(f"hf:{REPO}")
    hub.altered.clear()
    found = with_files(recipe_of(f"hf:{REPO}"))
    assert (path_of(found) / name).read_bytes() == WEIGHTS


def test_what_cannot_be_had_is_refused_with_the_remedy(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put(REPO, FILES)
    hub.put("me/private", FILES)
    hub.put("me/gated", FILES)
    hub.put("me/old", {"config.json": b"{}", "pytorch_model.bin": b""})
    hub.put("me/adapter", {"adapter_model.safetensors": b""})
    hub.repos["models", "me/private"].is_private = True
    hub.repos["models", "me/gated"].is_gated = True
    cases = {
        "hf:me/none": "has no such model that you may read: correct the name, or, if it is private",
        "hf:me/private": "log in with `hf auth login`, or set HF_TOKEN",
        "hf:me/gated": f"accept them at {hub.url}/me/gated, then log in",
        f"hf:{REPO}@v9": "the model has no revision 'v9'",
        f"hf:{REPO}@{'0' * 40}": f"the model has no revision '{'0' * 40}'",
        "hf:me/old": "has no model*.safetensors",
        "hf:me/adapter": "has no config.json",
        "hf:tiny": "give hf:ORG/NAME or hf:ORG/NAME@REVISION",
        "hf:https://hub/me/tiny": "give hf:ORG/NAME",
        "hf:me/tiny:main": "a model has no :CONFIG",
    }
    for path, told in cases.items():
        text = refused(path)
        assert text.startswith("actor.model.path is 'hf:"), path
        assert told in text, path
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    assert "does not accept the token (status 401)" in refused(f"hf:{REPO}")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "give a token that may read it" in refused("hf:me/none")
    for name in ("me/private", "me/gated"):
        assert with_files(recipe_of(f"hf:{name}")).hf_names
    assert {who for _, _, who in hub.asked} == {"", "Bearer hf_expired", f"Bearer {TOKEN}"}


def table(*prompts: str) -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"prompt": list(prompts)}), stream)
    return stream.getvalue()


CONVERTED = {
    "main/train/0000.parquet": table("one", "two"),
    "main/train/0001.parquet": table("three"),
    "main/test/0000.parquet": table("four"),
    "socratic/train/0000.parquet": table("five"),
    # The hub's viewer writes it beside.
    "main/train/index.duckdb": b"",
}


def rows_of(path: str, **more: object) -> tuple[Recipe, list[str]]:
    """The recipe with its data brought, and the prompts of its training and held-out rows."""
    data = {"type": "hf_dataset", "path": path, **more}
    recipe = with_files(recipe_of("models/tiny", data=data))
    assert recipe.actor is not None
    spec = recipe.actor.data
    assert isinstance(spec, HfDatasetSpec)
    splits = [one for one in (spec.split, spec.held_out_split) if one]
    records = [hf_records(spec, split, "data", list) for split in splits]
    return recipe, [record["prompt"] for one in records for record, _ in one]


def data_refused(path: str, **more: object) -> str:
    with pytest.raises(RecipeError) as caught:
        rows_of(path, **more)
    return str(caught.value)


def test_data_are_the_parquet_files_of_a_configuration_and_the_splits_that_are_read(
    hub: Hub,
) -> None:
    commit = hub.put("me/rows", CONVERTED, kind="datasets", branch="refs/convert/parquet")
    recipe, prompts = rows_of("hf:me/rows:main:train")
    assert prompts == ["one", "two", "three"]
    assert hub.fetched() == ["main/train/0000.parquet", "main/train/0001.parquet"]
    assert recipe.hf_names == {"actor.data.path": f"hf:me/rows@{commit}:main:train"}
    assert with_files(read_recipe(dump_recipe(recipe), "config.yaml")) == recipe
    # The fields of the section say the same.
    _, prompts = rows_of("hf:me/rows", name="main", held_out_split="test")
    assert prompts == ["one", "two", "three", "four"]
    _, prompts = rows_of("hf:me/rows:main:test")
    assert prompts == ["four"]
    # Wherever rows may be named.
    source = {"type": "hf_dataset", "path": "hf:me/rows:socratic"}
    mixed = {"type": "mixture", "sources": [{"data": source}]}
    found = with_files(recipe_of("models/tiny", data=mixed))
    assert found.hf_names == {"actor.data.sources.0.data.path": f"hf:me/rows@{commit}:socratic"}
    assert with_files(read_recipe(dump_recipe(found), "config.yaml")) == found


def test_branches_of_a_data_set_may_be_named_and_a_single_configuration_need_not(hub: Hub) -> None:
    pushed = {"data/train-00000-of-00001.parquet": table("six"), "data/test.parquet": table("7")}
    hub.put("me/pushed", pushed, kind="datasets")
    _, prompts = rows_of("hf:me/pushed@main", held_out_split="test")
    assert prompts == ["six", "7"]
    hub.put("me/pushed", {"default/train/0000.parquet": table("eight")}, kind="datasets")
    assert rows_of("hf:me/pushed@main")[1] == ["eight"]


READS_WITH_THE_LIBRARY = """
import json, sys, datasets
for name, config, revision, split in json.loads(sys.argv[1]):
    found = datasets.load_dataset(name, config, revision=revision, split=split)
    print(json.dumps(found["prompt"][:]))
"""


def test_rows_are_those_of_the_hubs_own_library(hub: Hub, tmp_path: Path) -> None:
    hub.put("me/rows", CONVERTED, kind="datasets", branch="refs/convert/parquet")
    # What its converter was given: configurations are told in the card.
    parts = {
        "main/train-00000-of-00002.parquet": CONVERTED["main/train/0000.parquet"],
        "main/train-00001-of-00002.parquet": CONVERTED["main/train/0001.parquet"],
        "main/test-00000-of-00001.parquet": CONVERTED["main/test/0000.parquet"],
        "socratic/train-00000-of-00001.parquet": CONVERTED["socratic/train/0000.parquet"],
    }
    configs = [
        {
            "config_name": config,
            "data_files": [{"split": one, "path": f"{config}/{one}-*"} for one in splits],
        }
        for config, splits in {"main": ["train", "test"], "socratic": ["train"]}.items()
    ]
    card = f"---\n{yaml.safe_dump({'configs': configs})}---\n".encode()
    hub.put("me/rows", {**parts, "README.md": card}, kind="datasets")
    pushed = {f"data/{one}-00000-of-00001.parquet": table(one) for one in ("train", "test")}
    hub.put("me/pushed", pushed, kind="datasets")
    cases = {
        "hf:me/rows:main:train": ("me/rows", "main", None, "train"),
        "hf:me/rows:main:test": ("me/rows", "main", None, "test"),
        "hf:me/rows:socratic": ("me/rows", "socratic", None, "train"),
        "hf:me/rows@main:main": ("me/rows", "main", "main", "train"),
        "hf:me/pushed@main": ("me/pushed", None, "main", "train"),
    }
    # It reads its variables when it is imported.
    told = subprocess.run(
        [sys.executable, "-c", READS_WITH_THE_LIBRARY, json.dumps([*cases.values()])],
        env={**os.environ, **client_environment(hub, tmp_path / "library")},
        check=True,
        capture_output=True,
        text=True,
    )
    expected = [json.loads(line) for line in told.stdout.splitlines()]
    assert expected[0] == ["one", "two", "three"]
    assert [rows_of(path)[1] for path in cases] == expected


def test_data_that_cannot_be_had_are_refused_with_the_remedy(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put("me/rows", CONVERTED, kind="datasets", branch="refs/convert/parquet")
    hub.put("me/pushed", {"rows.csv": b""}, kind="datasets")
    for path, told in {
        "hf:me/rows": "several configurations (main, socratic): name one, as in hf:me/rows:main",
        "hf:me/rows:main:dev": "no Parquet files of split 'dev' in configuration 'main': name a",
        "hf:me/rows:other": "(Parquet files there: main/test/0000.parquet, main/train/0000.parquet",
        "hf:me/pushed": "name their branch, as in hf:me/pushed@main, or download it",
        "hf:me/none": f"{hub.url} has no such data set that you may read",
        "hf:me/rows:a:b:c": "behind which data may have :CONFIG or :CONFIG:SPLIT",
    }.items():
        assert told in data_refused(path), path
    assert "actor.data.name is 'socratic': give one of" in data_refused(
        "hf:me/rows:main", name="socratic"
    )
    assert "actor.data.split is 'test': give one of" in data_refused(
        "hf:me/rows:main:train", split="test"
    )
    told = data_refused("hf:me/rows", type="parquet")
    assert "give a path of this machine, or, for rows, data of type hf_dataset" in told
    hub.repos["datasets", "me/rows"].is_gated = True
    assert f"accept them at {hub.url}/datasets/me/rows, then" in data_refused("hf:me/rows:main")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set, and the cache" in data_refused("hf:me/rows:main")


def test_an_installation_without_the_client_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install huggingface_hub" in refused("hf:me/tiny")
    assert with_files(recipe_of("models/tiny")).hf_names == {}
