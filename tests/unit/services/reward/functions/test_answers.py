"""Tests that a function's answer is accepted only if it is one finite number for each row."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from rolemesh.services.reward.outside.functions.answers import (
    FunctionFaultError,
    numbers,
    openrlhf,
    rewards,
)


@pytest.mark.parametrize(
    "given",
    [
        [1.0, 0.5],
        (1, 0.5),
        [True, 0.5],
        torch.tensor([1.0, 0.5], requires_grad=True),
        [torch.tensor(1.0), np.float32(0.5)],
        np.array([1.0, 0.5], dtype=np.float16),
    ],
    ids=["list", "tuple", "bool", "tensor", "scalars", "array"],
)
def test_every_kind_of_list_is_read(given: Any) -> None:
    assert numbers(given, 2, "it", may_be_none=True) == [1.0, 0.5]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, "None of type NoneType"),
        (1.0, "1.0 of type float"),
        ("ab", "'ab' of type str"),
        ({"a": 1, "b": 2}, "of type dict"),
        ([1.0], "1 entries for 2"),
        ([1.0, 2.0, 3.0], "3 entries for 2"),
        ([1.0, "2.0"], "at row 1 is '2.0' of type str"),
        ([1.0, [2.0]], r"at row 1 is \[2.0\] of type list"),
        (torch.zeros(2, 1), r"at row 0 is \[0.0\]"),
        (torch.tensor(1.0), "1.0 of type float"),
        ([1.0, torch.zeros(3)], "at row 1 is no single number"),
        ([1.0, math.nan], "at row 1 is nan"),
        ([math.inf, 1.0], "at row 0 is inf"),
        ([1.0, 10**400], "at row 1 is too large"),
        ([1.0, 1e39], "at row 1 is too large"),
        ([1.0, 1 + 2j], "of type complex"),
        ([1.0, Decimal("0.5")], "of type Decimal"),
    ],
)
def test_what_is_no_list_of_numbers_is_refused_by_row(given: Any, found: str) -> None:
    with pytest.raises(FunctionFaultError, match=found):
        numbers(given, 2, "it", may_be_none=True)


def test_none_means_not_applicable_only_where_the_form_has_it() -> None:
    assert numbers([None, 1.0], 2, "it", may_be_none=True) == [None, 1.0]
    with pytest.raises(FunctionFaultError, match="at row 0 is None"):
        numbers([None, 1.0], 2, "it", may_be_none=False)


def test_openrlhf_scores_and_logs_become_means() -> None:
    given = {
        "rewards": torch.tensor([1.0, 3.0]),
        "scores": [0.0, 1.0],
        "extra_logs": {"length": torch.tensor([10, 20])},
    }
    assert openrlhf(given, 2) == ([1.0, 3.0], [{}, {}], {"scores": 0.5, "length": 15.0})


def test_an_entry_may_be_an_object_with_score_and_parts() -> None:
    given: list[Any] = [{"score": np.float32(0.5), "acc": True, "pred": "4"}, 1, {"score": None}]
    parts = [{"acc": 1.0}, {}, {}]
    assert rewards(given, 3, "it", may_be_none=True) == ([0.5, 1.0, None], parts)
    assert openrlhf({"rewards": given[:2]}, 2) == ([0.5, 1.0], parts[:2], {})
    with pytest.raises(FunctionFaultError, match=r"at row 1 .*\['acc'\]; give .* 'score'"):
        rewards([1.0, {"acc": 1}], 2, "it", may_be_none=True)
    with pytest.raises(FunctionFaultError, match="at row 0 is 'high'"):
        rewards([{"score": "high"}], 1, "it", may_be_none=True)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"reward": [1.0]}, r"keys \['reward'\]"),
        ({"rewards": [1.0], "extra_logs": [1.0]}, "'extra_logs' is"),
        ({"rewards": [1.0], "extra_logs": {"a": [1.0, 2.0]}}, "'extra_logs' 'a' has 2 entries"),
        ({"rewards": [None]}, "'rewards' at row 0 is None"),
    ],
)
def test_other_openrlhf_answers_are_refused(given: Any, found: str) -> None:
    with pytest.raises(FunctionFaultError, match=found):
        openrlhf(given, 1)
