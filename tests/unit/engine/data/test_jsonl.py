"""Lines of JSON: a fast reader that gives, and refuses, what Python's own does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolemesh.engine.data.files import jsonl
from rolemesh.engine.data.files.jsonl import Lines
from rolemesh.engine.data.rows import DataInvalidError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def read(folder: Path, *lines: bytes) -> list[object]:
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    return [value for value, _ in jsonl.records(path, "data.path")]


@given(value=VALUES, is_ascii=st.booleans())
def test_a_value_is_the_one_that_python_reads(
    value: object, is_ascii: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    folder = tmp_path_factory.mktemp("lines")
    # NaN equals itself in text alone.
    assert repr(read(folder, text.encode())) == repr([json.loads(text)])


@pytest.mark.parametrize(
    "line",
    [
        *("NaN", "[-Infinity]", "1e999", "-0", "-0.0", "5e-324", "9" * 60, "0.1"),
        *(r'"\ud800"', r'"\ud83d\ude00"', '"\u2028\x7f"', '{"a": 1, "a": 2}', " 3\t"),
    ],
)
def test_what_is_odd_is_read_as_ever(line: str, tmp_path: Path) -> None:
    assert repr(read(tmp_path, line.encode())) == repr([json.loads(line)])


def test_empty_lines_and_a_byte_order_mark_are_skipped(tmp_path: Path) -> None:
    assert read(tmp_path, b'\xef\xbb\xbf{"a": 1}', b"", b"  \r", b"2\r", b"") == [{"a": 1}, 2]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"[1,]", r"line 2: not JSON"),
        (b"'a'", r"line 2: not JSON"),
        (b'"a\tb"', r"line 2: not JSON \(Invalid control character"),
        (b'"\xff"', r"not UTF-8 \(invalid start byte at byte 3\)"),
        (b"[" * 5000, r"line 2: nests too deep"),
    ],
)
def test_a_fault_is_named_with_its_place(line: bytes, told: str, tmp_path: Path) -> None:
    with pytest.raises(DataInvalidError, match=told):
        read(tmp_path, b"1", line)


def test_some_lines_of_a_file_are_read_with_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"1\n\n[3]\n4\n")
    found = list(jsonl.records(path, "data.path", Lines(start=3, end=7, first=3)))
    assert found == [([3], f"data.path {path}, line 3")]
