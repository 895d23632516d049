"""One version is said everywhere, and the changelog has it in the form of keepachangelog.com."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from pathlib import Path

import pytest
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
CHANGELOG = (REPOSITORY / "CHANGELOG.md").read_text()
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")])


def releases() -> list[tuple[str, str, str]]:
    """Version, day and text of each release, as they stand."""
    heading = r"^## \[([^\]]+)\](?: - (\S+))?$"
    _, *parts = re.split(heading, CHANGELOG, flags=re.MULTILINE)
    return [
        (name, day or "", text)
        for name, day, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    ]


def test_the_newest_release_is_that_of_the_package() -> None:
    assert [name for name, _, _ in releases()][:2] == ["Unreleased", VERSION]


def test_releases_go_from_new_to_old_with_their_day() -> None:
    _, *made = releases()
    versions = [Version(name) for name, _, _ in made]
    days = [date.fromisoformat(day) for _, day, _ in made]
    assert len(made) > 1
    assert versions == sorted(set(versions), reverse=True)
    assert days == sorted(days, reverse=True)


def test_each_release_has_the_known_kinds_of_changes_and_none_is_empty() -> None:
    for name, _, text in releases():
        _, *parts = re.split(r"^### (\w+)$", text, flags=re.MULTILINE)
        kinds, entries = parts[::2], parts[1::2]
        assert set(kinds) <= KINDS, name
        assert len(kinds) == len(set(kinds)), name
        assert all("\n- " in entry for entry in entries), name
        assert bool(kinds) or name == "Unreleased"


def test_every_link_of_the_changelog_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", CHANGELOG)
    ours = [link for link in links if "://" not in link]
    assert len(ours) > 10
    assert [link for link in ours if not (REPOSITORY / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_the_files_of_this_version(page: Path) -> None:
    named = re.findall(r"rolemesh-(\d+(?:\.\d+)+)[.-]", page.read_text())
    assert set(named) <= {VERSION}


def test_the_page_on_what_works_is_of_this_version() -> None:
    page = (REPOSITORY / "docs" / "state.md").read_text()
    assert page.splitlines()[2].startswith(f"Version {VERSION} ")


def test_the_readme_names_the_wheel_that_make_dist_writes() -> None:
    assert f"rolemesh-{VERSION}-py3-none-any.whl" in (REPOSITORY / "README.md").read_text()
