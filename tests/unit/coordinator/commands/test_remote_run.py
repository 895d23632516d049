"""Tests of a recipe that is sent to a coordinator: its paths, there and on another host."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fake_roles import fake_recipe

from rolemesh.coordinator.commands.hub.remote_run import text_for
from rolemesh.coordinator.recipe.loading import read_recipe
from rolemesh.coordinator.recipe.schema import Recipe


def recipe_with(folder: str) -> Recipe:
    """A recipe with a path, a path within a list, a file with code, and what is only for here."""
    values = fake_recipe().model_dump(mode="json")
    rows = {"type": "jsonl", "path": f"{folder}rows.jsonl"}
    values["actor"]["data"] = {"type": "mixture", "sources": [{"data": rows}]}
    values["actor"]["model"]["path"] = f"{folder}model"
    for role in ("critic", "reference"):
        values[role]["model"]["path"] = "/models/other"
    values["algorithm"] = {"type": "custom", "function": f"{folder}mine.py:step"}
    values["run"]["directory"] = "runs/x"
    values["api"]["token_file"] = "token"
    return Recipe.model_validate(values)


def test_relative_paths_are_those_of_the_sender_where_the_coordinator_sees_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sent = read_recipe(text_for(recipe_with("sub/"), "127.0.0.1:50050"), "sent")
    assert sent.actor is not None
    assert sent.actor.model.path == tmp_path / "sub/model"
    assert sent.actor.data.sources[0].data.path == tmp_path / "sub/rows.jsonl"  # type: ignore[union-attr]
    assert sent.algorithm.function == f"{tmp_path / 'sub/mine.py'}:step"  # type: ignore[union-attr]
    assert sent.critic is not None
    assert str(sent.critic.model.path) == "/models/other"
    assert (sent.run.directory, sent.api.token_file) == (None, None)


def test_relative_paths_are_refused_for_another_host_and_absolute_ones_are_not() -> None:
    with pytest.raises(ValueError, match="give absolute paths of that host") as refused:
        text_for(recipe_with(""), "trainer.example:50050")
    named = str(refused.value).partition(": ")[0]
    assert named == "algorithm.function, actor.model.path, actor.data.sources.0.data.path"
    sent = read_recipe(text_for(recipe_with("/data/"), "trainer.example:50050"), "sent")
    assert sent.actor is not None
    assert str(sent.actor.model.path) == "/data/model"
