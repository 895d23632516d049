"""Parts of rewards: which numbers become one, and which are refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rolemesh.services.reward.outside.counts import RequestCounts
from rolemesh.services.reward.outside.parts import (
    MAX_PARTS,
    OWN_METRICS,
    PartsFaultError,
    checked,
    means,
    split,
)


def test_numbers_are_parts_and_all_else_is_left_out() -> None:
    given = {
        "score": torch.tensor(1.0),
        "acc": False,
        "f1.macro": np.float64(0.25),
        "loss": torch.tensor(2.0),
        **{"pred": "42", "none": None, "list": [1], "no name": "x", "several": torch.zeros(2)},
    }
    assert split(given, "it") == (given["score"], {"acc": 0.0, "f1.macro": 0.25, "loss": 2.0})
    assert split(given, "it", "loss")[1] == {"score": 1.0, "acc": 0.0, "f1.macro": 0.25}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"acc": math.nan}, "'acc', which is nan; give a finite float32, or leave the part out"),
        ({"acc": 10**400}, "'acc', which is 1000"),
        ({"two words": 1}, "'two words'; name it with 1 to 64 letters, digits and characters of"),
        ({"a" * 65: 1}, "name it with 1 to 64"),
        ({3: 1}, "the part 3; name it"),
        ({"mean": 1}, "'mean', a metric of every source; give it another name"),
        ({f"p{n}": n for n in range(MAX_PARTS + 1)}, "it has 33 parts; give at most 32"),
    ],
)
def test_a_number_that_can_be_no_part_is_named(parts: dict[Any, Any], message: str) -> None:
    with pytest.raises(PartsFaultError, match=message):
        split({"score": 1.0, **parts}, "it")


def test_a_part_is_never_called_as_a_metric_of_the_requests() -> None:
    assert {*RequestCounts(seconds=[1.0]).metrics()} < OWN_METRICS


def test_means_are_over_the_rows_that_have_the_part() -> None:
    rows = [{"acc": 1.0}, {"acc": 0.0, "form": 1.0}, {}]
    assert means(rows) == {"acc": 0.5, "form": 1.0}


@pytest.mark.parametrize("given", [None, [], [1.0], [{"a b": 1.0}], [{"acc": 1e300}]])
def test_a_process_may_not_send_other_parts(given: Any) -> None:
    with pytest.raises(ValueError, match=r"parts|name it|finite"):
        checked(given, 1)
