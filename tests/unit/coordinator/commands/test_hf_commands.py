"""Commands on recipes that name models and data at the hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from support.fake_roles import fake_recipe
from support.hf_hub import TOKEN, Hub, serving_hub, use_hub
from typer.testing import CliRunner

from rolemesh.coordinator.commands.cli import app
from rolemesh.coordinator.commands.hub.client_recipes import ClientRecipes
from rolemesh.coordinator.commands.hub.remote_run import text_for
from rolemesh.coordinator.commands.policies.model_card import model_card
from rolemesh.coordinator.commands.policies.publishing import PushError, push
from rolemesh.coordinator.recipe.hub.hf_files import with_files
from rolemesh.coordinator.recipe.loading import dump_recipe, read_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.api_section import ApiSpec
from rolemesh.coordinator.recipe.sections.stores import RedisStoreSpec
from rolemesh.engine.granted.grants import Grant
from rolemesh.rpc.errors import ForbiddenError, InvalidRequestError

FILES = {"config.json": b"{}", "tokenizer.json": b"{ }", "model.safetensors": b"weights"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving_hub() as served:
        use_hub(served, tmp_path / "home", monkeypatch)
        served.put("me/tiny", FILES)
        yield served


def named_recipe(path: str = "hf:me/tiny") -> Recipe:
    """Its services run elsewhere, so that nothing else of this machine is looked at."""
    roles = ("actor", "critic", "reference", "reward")
    recipe = fake_recipe(services={role: {"address": "127.0.0.1:1"} for role in roles})
    values = recipe.model_dump(mode="json")
    values["actor"]["model"]["path"] = path
    return Recipe.model_validate(values)


def test_a_recipe_for_another_host_keeps_its_names(hub: Hub) -> None:
    values = named_recipe().model_dump(mode="json")
    for role in ("critic", "reference"):
        values[role]["model"]["path"] = "/models/tiny"
    recipe = Recipe.model_validate(values)
    fetched = with_files(recipe)
    for one, name in ((recipe, "hf:me/tiny"), (fetched, fetched.hf_names["actor.model.path"])):
        sent = read_recipe(text_for(one, "trainer.example:50050"), "sent")
        assert sent.actor is not None
        assert str(sent.actor.model.path) == name


def written(tmp_path: Path, recipe: Recipe) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    return str(path)


def called(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_fetch_brings_all_that_a_recipe_names_and_copies_it_where_it_is_wanted(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = {"main/train/0000.parquet": b"rows", "main/other/0000.parquet": b""}
    hub.put("me/rows", parquet, kind="datasets", branch="refs/convert/parquet")
    values = named_recipe().model_dump(mode="json")
    values["actor"]["data"] = {"type": "hf_dataset", "path": "hf:me/rows:main"}
    recipe = written(tmp_path, Recipe.model_validate(values))
    ended = called("fetch", recipe, "--json")
    assert ended.exit_code == 0, ended.output
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    found = {one["field"]: Path(one["folder"]) for one in lines}
    assert list(found) == ["actor.model.path", "actor.data.path"]
    assert (found["actor.data.path"] / "train" / "0000.parquet").read_bytes() == b"rows"
    assert "main/other/0000.parquet" not in hub.fetched()
    # What another program has put there is not what the recipe names.
    (found["actor.model.path"] / "pytorch_model.bin").write_bytes(b"a pickle")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    ended = called("fetch", recipe, "--to", str(tmp_path / "models"))
    copies = (tmp_path / "models" / "me" / "tiny", tmp_path / "models" / "me" / "rows" / "main")
    assert f"--set actor.model.path={copies[0]}\n--set actor.data.path={copies[1]}" in ended.stdout
    assert {one.name: one.read_bytes() for one in copies[0].iterdir()} == FILES
    assert not any(one.is_symlink() for one in (tmp_path / "models").rglob("*"))
    assert called("fetch", recipe, "--to", "/proc/models").exit_code == 2
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    assert called("fetch", recipe).exit_code == 2
    plain = written(tmp_path, named_recipe("/models/tiny"))
    assert called("fetch", plain).stdout == "the recipe names nothing at the hub\n"


def test_a_job_names_commits_and_files_for_containers_ask_for_copies(
    hub: Hub, tmp_path: Path
) -> None:
    values = named_recipe().model_dump(mode="json")
    del values["services"], values["api"]
    recipe = written(tmp_path, Recipe.model_validate(values))
    commit = hub.repos["models", "me/tiny"].branches["main"]
    ended = called("render", "slurm", recipe, "--on", "critic=1")
    assert ended.exit_code == 0, ended.output
    assert f"actor.model.path=hf:me/tiny@{commit}" in ended.stdout
    snapshot = tmp_path / "home" / "hub" / "models--me--tiny" / "snapshots" / commit
    assert f"--folder={snapshot}" in ended.stdout
    for arguments in (("compose",), ("kubernetes", "--image", "x")):
        ended = called("render", *arguments, recipe)
        assert ended.exit_code == 2
        assert "containers reach no hub" in ended.output


CONFIG = {
    "run": {"name": "mine", "steps": 50, "prompts_per_step": 16, "seed": 7},
    "algorithm": {"type": "grpo", "sampling": {"samples_per_prompt": 4, "max_new_tokens": 256}},
    "actor": {
        "model": {"path": f"hf:me/tiny@{'a' * 40}"},
        "optimizer": {"learning_rate": 1e-5},
        "data": {
            "type": "mixture",
            "sources": [
                {"data": {"type": "hf_dataset", "path": f"hf:me/rows@{'b' * 40}:main"}},
                {"data": {"type": "jsonl", "path": "/home/me/secret.jsonl"}},
            ],
        },
    },
    "reward": {"source": {"type": "python", "function": "/home/me/rewards.py:f"}},
}
SCORE = {"step": 40, "score": 0.75, "standard_error": 0.01, "num_prompts": 64, "metrics": {}}


def test_a_card_has_the_facts_of_the_run_and_no_path_of_this_machine() -> None:
    summary = {"held_out": {"before": None, "after": SCORE}, "tokens": 12345}
    card = model_card("me/trained", CONFIG, summary, "mine-1", 40)
    header = yaml.safe_load(card.split("---")[1])
    assert header["base_model"] == "me/tiny"
    assert header["datasets"] == ["me/rows"]
    assert header["tags"] == ["rolemesh", "grpo"]
    for line in (
        "# trained",
        "| run | mine-1 |",
        "| checkpoint | after 40 of 50 steps |",
        f"| base model | me/tiny, commit {'a' * 40} |",
        "| reward | python |",
        "| a step | 16 prompts, 4 completions each |",
        "| held-out score after 40 steps | 0.750 (standard error 0.010, 64 prompts) |",
        "| tokens of training rollouts | 12,345 |",
    ):
        assert f"{line}\n" in card
    assert "/home" not in card


@pytest.mark.parametrize("is_merged", [False, True])
def test_a_card_of_an_adapter_says_so(is_merged: bool) -> None:
    adapter = {"rank": 8, "alpha": 16.0, "scaling": "rslora", "targets": "all_linear"}
    actor = {**CONFIG["actor"], "model": {**CONFIG["actor"]["model"], "adapter": adapter}}
    config = {**CONFIG, "actor": actor}
    card = model_card("me/trained", config, {}, "mine-1", 40, is_merged=is_merged)
    header = yaml.safe_load(card.split("---")[1])
    assert header["library_name"] == ("transformers" if is_merged else "peft")
    assert header["base_model"] == "me/tiny"
    assert header.get("base_model_relation") == (None if is_merged else "adapter")
    merged = ", merged into the base model" if is_merged else ""
    assert f"| adapter | LoRA, rank 8, alpha 16, rslora{merged} |\n" in card


def test_a_model_is_sent_with_the_users_token_or_the_error_says_what_is_missing(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, told in {
        (): "--to is missing: name the folder to write, or a model at the hub with --push",
        ("--to", "x", "--public"): "--public is given, but not --push",
        ("--push", "trained"): "--push trained: give ORG/NAME",
        ("--push", "me/trained@v1"): "give ORG/NAME",
        ("--push", "me/trained"): "log in with `hf auth login`, or set HF_TOKEN",
    }.items():
        ended = called("export", str(tmp_path), *arguments)
        assert ended.exit_code == 2
        assert told in ended.output
    folder = tmp_path / "exported"
    folder.mkdir()
    for name, content in (*FILES.items(), ("README.md", b"# card"), ("notes", b"mine")):
        (folder / name).write_bytes(content)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    page = push(folder, "me/trained", is_public=False, message="after 40 steps")
    assert page == f"{hub.url}/me/trained"
    sent = hub.repos["models", "me/trained"]
    assert sent.is_private
    assert sent.commits[sent.branches["main"]] == {**FILES, "README.md": b"# card"}
    with pytest.raises(PushError, match="the token may not write there"):
        push(folder, "others/trained", is_public=True, message="")
    (folder / "model.safetensors").write_bytes(b"others")
    hub.breaks_off.add(f"/lfs/{hashlib.sha256(b'others').hexdigest()}")
    with pytest.raises(PushError, match=r"could not be sent \(.*model.safetensors.*again"):
        push(folder, "me/trained", is_public=True, message="")
    hub.status = 500
    with pytest.raises(PushError, match="try again"):
        push(folder, "me/trained", is_public=True, message="")


def test_a_client_names_what_the_host_has_fetched_and_granted_and_nothing_is_fetched_for_it(
    hub: Hub, tmp_path: Path
) -> None:
    def read(*folders: Path) -> Recipe:
        api, store = ApiSpec(), RedisStoreSpec(url="redis://127.0.0.1:1/0")
        grant = Grant(folders=(Path.cwd(), Path("/data"), Path("/models"), *folders), hosts=None)
        recipes = ClientRecipes(api=api, store=store, grant=grant)
        text = text_for(named_recipe(), "127.0.0.1:50050")
        return recipes.read(text, [], {}, "run-1", tmp_path / "run", resumes=False)

    cache = tmp_path / "home" / "hub"
    with pytest.raises(ForbiddenError, match=rf"actor.model.path .*--folder {cache}"):
        read()
    with pytest.raises(InvalidRequestError, match="nothing is fetched here, and the cache"):
        read(cache)
    assert hub.asked == []
    fetched = with_files(named_recipe())
    hub.asked.clear()
    found = read(cache)
    assert hub.asked == []
    assert found.hf_names == fetched.hf_names
    # The process of the run gets the commit.
    assert str(fetched.hf_names["actor.model.path"]) in dump_recipe(found)
