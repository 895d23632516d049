"""The table of columns against what the comments of the protos promise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from rolemesh.coordinator.compliance.contract import column_schema
from rolemesh.engine.experience import Column
from rolemesh.engine.specs import (
    EstimatorSpec,
    LossSpec,
    SelectionSpec,
    TokenTruncationSpec,
    TracedLossSpec,
)
from rolemesh.engine.specs.columns import COLUMNS, DATA_COLUMNS, PAIR_COLUMNS, ROLLOUT_COLUMNS
from rolemesh.v1 import experience_pb2, tensor_pb2

PROTOS = Path(__file__).resolve().parents[2] / "protos" / "rolemesh" / "v1"

PROMISE = re.compile(
    r"(\w+)[\s/]+\(?(int64|float32|bool),[\s/]+(row|sequence|completion)\b"
    r"|^  //   ((?:\w+, )*\w+): text, row",
    re.MULTILINE,
)
"""E.g. "loss_mask  bool, completion: ...", "is_judged (bool, row)", or names of texts. It may go on
in the next line of the comment."""


def promised(proto: str) -> dict[str, tuple[str, str]]:
    """Kind and dtype of the columns that a proto's comments name."""
    found = {}
    for name, dtype, kind, texts in PROMISE.findall((PROTOS / proto).read_text()):
        if texts:
            found |= dict.fromkeys(texts.split(", "), ("text", "uint8"))
        else:
            found[name] = (kind, dtype)
    return found


@pytest.mark.parametrize(
    ("proto", "names"),
    [
        ("rollout.proto", {*ROLLOUT_COLUMNS, "environment_rewards", "session", "images"}),
        ("data.proto", {*DATA_COLUMNS, *PAIR_COLUMNS, "images"}),
        ("reward.proto", {"rewards", "is_judged", "loss_mask"}),
        ("trainer.proto", {"advantages", "returns", "token_rewards"}),
        ("value.proto", {"values"}),
    ],
)
def test_protos_promise_what_the_table_says(proto: str, names: set[str]) -> None:
    assert promised(proto) == {name: tuple(COLUMNS[name]) for name in names}


@pytest.mark.parametrize("specs", [EstimatorSpec, LossSpec, SelectionSpec])
def test_the_table_has_what_parts_read_and_make(specs: Any) -> None:
    for spec in get_args(get_args(specs)[0]):
        form = TokenTruncationSpec()
        if spec is TracedLossSpec:
            # It reads what its caller names.
            continue
        part = spec.model_construct(kl_in_loss=1.0, off_policy=form, kl_in_reward=object())
        made = part.makes() if hasattr(part, "makes") else ()
        assert {*part.columns(), *part.optional_columns(), *made} <= COLUMNS.keys(), spec


@pytest.mark.parametrize("name", COLUMNS)
def test_a_named_column_has_the_kind_and_type_of_the_table(name: str) -> None:
    rows: dict[str, list[Any]] = {"text": ["a", ""], "row": [1, 0]}
    column = Column.named(name, rows.get(COLUMNS[name].kind, [[1, 0], []]))
    assert column.num_rows == 2
    assert (column.kind.value, str(column.values.dtype)) == (
        COLUMNS[name].kind,
        f"torch.{COLUMNS[name].dtype}",
    )


def test_the_suite_expects_the_kinds_and_types_of_the_table() -> None:
    assert column_schema("loss_mask") == experience_pb2.ColumnSchema(
        name="loss_mask",
        kind=experience_pb2.COLUMN_KIND_COMPLETION,
        dtype=tensor_pb2.DATA_TYPE_BOOL,
    )
