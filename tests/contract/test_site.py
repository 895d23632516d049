"""Tests of the documentation site: its navigation, its reference, and a strict build."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from rolemesh.coordinator.commands.cli import COMMANDS
from rolemesh.coordinator.dataflow.roles import ROLE_HANDLES
from rolemesh.coordinator.explained.keys import keys_of
from rolemesh.coordinator.explained.metrics import METRICS
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.rpc.reasons import REASONS

REPOSITORY = Path(__file__).resolve().parents[2]
WRITTEN = sorted((REPOSITORY / "docs").glob("*.md"))
CALLS = {f"{role}.{name}" for role, handle in ROLE_HANDLES.items() for name in dir(handle)}
"""Calls of a role, which look like settings."""
GENERATOR = REPOSITORY / ".venv-docs" / "bin" / "python"


def loaded(name: str) -> ModuleType:
    """A module of docs/, which is in no package."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / f"docs/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The module docs/reference.py."""
    return loaded("reference")


@pytest.fixture(scope="module")
def pages(reference: ModuleType) -> dict[str, str]:
    made: dict[str, str] = reference.pages()
    return made


def leaves(nav: Any) -> Iterator[str]:
    match nav:
        case str():
            yield nav
        case list():
            for each in nav:
                yield from leaves(each)
        case dict():
            for each in nav.values():
                yield from leaves(each)


def test_the_navigation_has_every_page_once(pages: dict[str, str]) -> None:
    # A plain loader: the file has no tags of mkdocs.
    nav = list(leaves(yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"]))
    written = {path.name for path in WRITTEN}
    assert sorted(nav) == sorted({"index.md", *written, *pages})


@pytest.mark.parametrize("page", WRITTEN, ids=lambda path: path.name)
def test_a_page_says_something(page: Path) -> None:
    title, _, text = page.read_text().partition("\n")
    assert title.startswith("# ")
    assert len(text.split()) > 50


def test_the_reference_has_every_key_metric_reason_and_command(pages: dict[str, str]) -> None:
    recipe = "\n".join(text for name, text in pages.items() if "recipe-" in name)
    sections = [Recipe]
    for section in sections:
        for key in keys_of(section):
            assert f"| `{key.name}` |" in recipe, f"{section.__name__}.{key.name}"
            sections.extend(inner for inner in key.sections if inner not in sections)
    metrics = pages["reference/metrics.md"]
    named = [name for of_topic in METRICS.values() for name in of_topic]
    assert [name for name in named if f"`{name}`" not in metrics] == []
    reasons = pages["reference/reasons.md"]
    assert [name for name in REASONS if f"`{name}`" not in reasons] == []
    commands = pages["reference/commands.md"]
    assert [name for name in COMMANDS if f"## rolemesh {name}\n" not in commands] == []


def test_every_row_of_a_reference_table_has_the_cells_of_its_head(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            rows = [len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()]
            assert len(set(rows)) == 1, f"{name}: {table[:200]}"


def test_stars_are_characters_in_the_reference(pages: dict[str, str]) -> None:
    assert r"""as in 'reward/\*'.""" in pages["reference/commands.md"]


def test_the_recipes_for_given_answers_are_whole(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "given-answers.md").read_text()
    files = dict(re.findall(r"`([\w-]+\.yaml)`:\n\n```yaml\n(.*?)^```", page, re.M | re.S))
    found = {}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        found[name] = load_recipe([tmp_path / name]).algorithm.type
    assert found == {"sft.yaml": "sft", "dpo.yaml": "dpo"}


@pytest.mark.parametrize(("html", "passes"), [("<h1>A</h1>\n", False), ("<h1>A</h1><p>b", True)])
def test_a_page_without_a_body_fails_the_build(html: str, passes: bool) -> None:
    if not GENERATOR.exists():
        pytest.skip("there is no .venv-docs: make docs makes it")
    code = (
        "import sys, types, hooks\n"
        "page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri='state.md'))\n"
        "hooks.on_page_content(sys.argv[1], page, None, None)\n"
    )
    made = subprocess.run(
        [GENERATOR, "-c", code, html],
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY / 'docs'}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (made.returncode == 0) is passes
    assert ("state.md has no body" in made.stderr) is not passes


@pytest.fixture(scope="module")
def paths(reference: ModuleType) -> set[str]:
    """Every dotted path of a recipe."""
    found = {key.name for key in keys_of(Recipe)}
    for section, places in reference._places().items():
        found |= {f"{place}.{key.name}" for place in places for key in keys_of(section)}
        found |= {f"{place}.type" for place in places}
    return found


def test_the_tables_for_other_systems_are_those_that_recipes_are_made_by() -> None:
    others = loaded("others")
    page = (REPOSITORY / "docs" / "from-others.md").read_text()
    # `python docs/others.py` writes them anew.
    assert others.with_tables(page) == page


def test_settings_named_for_other_systems_are_keys_of_a_recipe(paths: set[str]) -> None:
    text = (REPOSITORY / "docs" / "from-others.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    named = [name for row in rows for name in re.findall(r"`([a-z_]+\.[a-z_.]+)", row[-1])]
    assert len(named) > 40
    assert [name for name in named if name not in paths] == []


# The page on other systems has their names.
@pytest.mark.parametrize(
    "page",
    [path for path in WRITTEN if path.stem != "from-others"],
    ids=lambda path: path.name,
)
def test_settings_named_in_a_page_are_keys_of_a_recipe(page: Path, paths: set[str]) -> None:
    # An entry of a mapping: services.<role>.address, pools.NAME.sleep.
    named = re.findall(r"`([a-z_]+(?:\.(?:<?[a-zA-Z_]+>?))+)(?:=[^`]*|: [^`]*)?`", page.read_text())
    tops = {key.name for key in keys_of(Recipe)} - {"rollout"}
    settings = [
        re.sub(r"^(services|pools)\.[^.]+", r"\1", name)
        for name in named
        if name.split(".")[0] in tops and name not in CALLS
    ]
    assert [name for name in settings if name not in paths] == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(
    tmp_path: Path,
) -> None:
    if not GENERATOR.exists():
        pytest.skip("there is no .venv-docs: make docs makes it")
    built = subprocess.run(
        [GENERATOR, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": "src", "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    found = list(tmp_path.rglob("*.html"))
    assert len(found) > 40
    loaded = re.compile(r"<(?:script|img|iframe)[^>]+src=[\"']?https?:|<link[^>]+rel=[\"']?"
                        r"(?:stylesheet|preconnect|icon)[\"']?[^>]+href=[\"']?https?:")  # fmt: skip
    assert [str(page) for page in found if loaded.search(page.read_text())] == []
