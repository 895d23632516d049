"""What hurts elsewhere: every report is named, and every test that answers it exists and runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.named_tests import collected

PAGE = Path(__file__).resolve().parents[2] / "docs" / "what-hurts-elsewhere.md"
HEADER = "| report | there | here | shown by |"
LATER = {"slow", "gpu", "containers", "clients", "skip", "xfail"}
"""Marks of tests that `make test` does not run on a CPU, or whose failure it does not tell."""
NAMES = {"RL": "NeMo-RL", "Gym": "NeMo-Gym"}
"""Repositories whose own name says too little."""
REPORT = re.compile(r"\[([\w.-]+)#(\d+)\]\(https://github\.com/([\w-]+)/([\w.-]+)/issues/(\d+)\)")
TEST = re.compile(r"`tests/([\w/]+\.py)::(test_\w+)`")
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| [")]


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_each_section_is_a_table_of_reports() -> None:
    _, *sections = re.split(r"^## .*$", PAGE.read_text(), flags=re.MULTILINE)
    assert all(section.strip().startswith(HEADER) for section in sections)
    assert len(ROWS) >= 25
    assert len(set(ROWS)) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("]")[0].removeprefix("| ["))
def test_a_report_is_answered_by_tests_that_run(row: str) -> None:
    reports, there, here, shown = cells(row)
    assert REPORT.sub("", reports).replace(",", "").strip() == ""
    for name, number, _, repository, linked in REPORT.findall(reports):
        assert (name, number) == (NAMES.get(repository, repository), linked)
    assert len(there) > 20
    assert len(here) > 20
    assert TEST.sub("", shown).strip() == ""
    for file, test in TEST.findall(shown):
        assert test in collected(file), f"{file} has no {test}"
        assert not collected(file)[test] & LATER, f"{file}::{test} is not run by make test"
