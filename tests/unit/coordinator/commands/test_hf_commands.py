"""Commands on recipes that name models at the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_roles import fake_recipe
from support.hf_hub import Hub, serving_hub, use_hub

from rolemesh.coordinator.commands.hub.client_recipes import ClientRecipes
from rolemesh.coordinator.commands.remote_run import text_for
from rolemesh.coordinator.recipe.api_section import ApiSpec
from rolemesh.coordinator.recipe.hf_files import with_files
from rolemesh.coordinator.recipe.loading import dump_recipe, read_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.stores import RedisStoreSpec
from rolemesh.engine.grants import Grant
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
