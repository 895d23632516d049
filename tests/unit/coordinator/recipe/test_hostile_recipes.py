"""Recipes that stand for more than they say: refused with a line, before memory is taken."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest
import yaml

from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import MAX_BYTES, MAX_NODES, load_recipe, read_recipe

MOST_BYTES = 16 << 20
"""The first of the bombs below took 328 MiB."""

MOST_SECONDS = 20.0

BOMB = "\n".join(
    (
        "a0: &a0 [" + ", ".join(["lol"] * 10) + "]",
        *(f"a{n}: &a{n} [" + ", ".join([f"*a{n - 1}"] * 10) + "]" for n in range(1, 9)),
        "run: *a8",
    )
)
MERGES = "\n".join(
    (
        "a0: &a0 {k: v, l: v, m: v}",
        *(f"a{n}: &a{n} {{<<: [" + ", ".join([f"*a{n - 1}"] * 10) + "]}" for n in range(1, 9)),
        "run: *a8",
    )
)


def refusal(text: str) -> str:
    began = time.monotonic()
    with pytest.raises(RecipeError) as refused:
        read_recipe(text, "sent")
    assert time.monotonic() - began < MOST_SECONDS
    return str(refused.value)


@pytest.mark.parametrize("text", [BOMB, MERGES], ids=["lists", "merges"])
def test_aliases_count_as_all_that_they_stand_for(text: str) -> None:
    assert len(text) < 1000
    tracemalloc.start()
    try:
        said = refusal(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES
    assert said.startswith("sent:")
    assert f"more than {MAX_NODES} values and keys, with all that aliases stand for" in said


@pytest.mark.parametrize("text", ["run: &a [*a]", "run: &a {b: {c: *a}}", "&a [*a]"])
def test_an_alias_inside_what_it_stands_for_is_refused(text: str) -> None:
    assert "an alias stands for what it is a part of" in refusal(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run: " + "[" * 51 + "]" * 51, "nests more than 50 levels"),
        ("run: " + "[" * 100_000, "nests more than 50 levels"),
        ("run: [" + "1, " * 25_000 + "1]", f"more than {MAX_NODES} values"),
        ("#" * (MAX_BYTES + 1), f"give {MAX_BYTES} at most"),
        ("run: !!timestamp word", "a value is not what it says"),
        ("run: !!int word", "a value is not what it says"),
        ("run: !!int ''", "a value is not what it says"),
        ("run: !!bool word", "a value is not what it says"),
        ("run: 2020-13-45", "a value is not what it says"),
        ("run: " + "1" * 5000, "a value is not what it says"),
        ("run: !!python/object:os.system [x]", "not valid YAML"),
        ("run: {[1]: 2}", "not valid YAML"),
    ],
    ids=lambda value: value[:20],
)
def test_what_no_recipe_needs_is_refused_in_words(text: str, says: str) -> None:
    assert says in refusal(text)


def test_dates_are_read_as_dates_whatever_other_libraries_do_to_yaml(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As lm-format-enforcer does, which vLLM imports for the first call with a form.
    known = yaml.SafeLoader.yaml_constructors
    monkeypatch.setitem(known, "tag:yaml.org,2002:timestamp", known["tag:yaml.org,2002:str"])
    assert "a value is not what it says" in refusal("run: 2020-13-45")


def test_a_file_is_read_up_to_the_limit_and_no_further(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("w") as file:
        file.truncate(1 << 34)
    with pytest.raises(RecipeError, match=f"{path}: has {MAX_BYTES + 1} characters"):
        load_recipe([path])


@pytest.mark.parametrize("text", ["{b: *shared, c: *shared}", "{<<: *shared, c: 1}"])
def test_aliases_that_people_write_stay_allowed(text: str) -> None:
    with pytest.raises(RecipeError) as refused:
        read_recipe(f"shared: &shared {{type: jsonl, path: x}}\nactor: {text}\n", "sent")
    assert "shared: unknown key" in str(refused.value)


def test_every_recipe_of_ours_is_far_below_the_limits() -> None:
    for path in Path("recipes").glob("*.yaml"):
        nodes = sum(
            isinstance(event, yaml.ScalarEvent | yaml.AliasEvent | yaml.CollectionStartEvent)
            for event in yaml.parse(path.read_text())
        )
        assert nodes < MAX_NODES / 20
