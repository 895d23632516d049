"""What rows that were read before depend on."""

from __future__ import annotations

from pathlib import Path

from rolemesh.engine import data
from rolemesh.engine.data.reading import index


def test_rows_are_read_anew_when_any_code_that_makes_them_has_changed() -> None:
    (folder,) = map(Path, data.__path__)
    code = {path for path in folder.glob("**/*") if path.suffix == ".py"}
    assert {"rows.py", "jsonl.py", "rendering.py", "index.py"} <= {path.name for path in code}
    assert code <= set(index._CODE)
    assert all(path.is_file() for path in index._CODE)
