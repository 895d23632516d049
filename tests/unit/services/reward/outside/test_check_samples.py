"""Rows of a file with which a reward is tried."""

from __future__ import annotations

import json
from pathlib import Path

from rolemesh.services.reward.outside.check.samples import WRONG, read_rows


def test_a_file_is_read_as_the_data_of_a_run_is(tmp_path: Path) -> None:
    rows = [
        {"prompt": "2 + 2?\u2028", "answer": ["4", "four"], "level": 1},
        {"prompt": "True?", "answer": True},
        {"prompt": "1 + 1?", "answer": 2},
    ]
    path = tmp_path / "rows.jsonl"
    lines = (json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text("\r\n".join(lines), encoding="utf-8-sig", newline="")
    found = [(row.completion, row.answer, row.metadata) for row in read_rows(path)]
    several = ('["4", "four"]', {"level": 1, "answer": ["4", "four"]})
    assert found == [
        ("4", *several),
        (WRONG, *several),
        ("true", "true", {"answer": True}),
        (WRONG, "true", {"answer": True}),
        ("2", "2", {}),
        (WRONG, "2", {}),
    ]
