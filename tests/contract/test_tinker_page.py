"""Tests of the page on Tinker's clients: it says of each call what the tests with the SDK say."""

from __future__ import annotations

from pathlib import Path

from support.tinker_calls import UNSERVED, VERSION, table

from rolemesh.coordinator.tinker.batches import LOSSES

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "tinker.md").read_text()


def test_the_page_has_the_table_of_calls() -> None:
    assert table() in PAGE, f"docs/tinker.md: the table of calls is to be\n\n{table()}"
    assert VERSION in PAGE


def test_the_page_gives_each_reason() -> None:
    for reason in sorted(set(UNSERVED.values())):
        assert reason in PAGE, reason


def test_the_page_has_each_loss() -> None:
    for loss in LOSSES:
        assert f"| `{loss}` |" in PAGE, loss
