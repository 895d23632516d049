"""Tests of whether two tokenizers mean the same by a token id."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rolemesh.engine.model_folders.model_files import ModelFolderError
from rolemesh.engine.model_folders.vocabularies import check_same_vocabulary

BPE = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}, "added_tokens": [
    {"id": 2, "content": "<end>"}
]}  # fmt: skip
UNIGRAM = {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0], ["<end>", 0.0]]}}


def write(folder: Path, content: Any) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(
        content if isinstance(content, str) else json.dumps(content), encoding="utf-8"
    )
    return folder


@pytest.mark.parametrize(
    "other",
    [
        BPE,
        UNIGRAM,
        # Whatever cuts a text into tokens may differ: the policy's ids are scored, not texts.
        {**BPE, "pre_tokenizer": {"type": "Whitespace"}},
    ],
)
def test_equal_tables_are_the_same_vocabulary(tmp_path: Path, other: Any) -> None:
    check_same_vocabulary(write(tmp_path / "policy", BPE), write(tmp_path / "teacher", other))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            {**BPE, "model": {"vocab": {"a": 0, "c": 1}}},
            "of 3 and 3 tokens 1 differ, the first is 1, here 'b' and there 'c'",
        ),
        ({"model": BPE["model"]}, "1 differ, the first is 2, here '<end>' and there none"),
        (
            {**BPE, "model": {"vocab": {"a": 0, "b": 1, "more": 3}}},
            "of 3 and 4 tokens 1 differ, the first is 3, here none and there 'more'",
        ),
        ("{", "cannot be told from"),
        ({"model": {"vocab": [1]}}, "cannot be told from"),
    ],
)
def test_another_vocabulary_is_refused_by_its_first_token(
    tmp_path: Path, other: Any, says: str
) -> None:
    policy, teacher = write(tmp_path / "policy", BPE), write(tmp_path / "teacher", other)
    with pytest.raises(ModelFolderError, match=re.escape(says)) as caught:
        check_same_vocabulary(policy, teacher)
    assert str(caught.value).startswith(f"teacher.model.path is {str(teacher)!r}")


def test_a_folder_without_the_file_is_refused_with_its_place(tmp_path: Path) -> None:
    policy = write(tmp_path / "policy", BPE)
    with pytest.raises(ModelFolderError, match=r"none/tokenizer\.json.*put the tokenizer\.json"):
        check_same_vocabulary(policy, tmp_path / "none")


def test_one_folder_is_its_own_vocabulary(tmp_path: Path) -> None:
    check_same_vocabulary(tmp_path / "remote", tmp_path / "remote")
