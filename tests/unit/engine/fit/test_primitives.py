"""What `rolemesh calibrate` measures: that everything is there, and grows with the work."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rolemesh.coordinator.mapping.primitives import Primitive
from rolemesh.engine.fit import primitives


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # One thread is timed by its own seconds, whatever else runs beside the tests.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(primitives, "_TRY_S", 0.05)
    monkeypatch.setattr(primitives, "_WIDTHS", {"cpu": (64, 256)})
    monkeypatch.setattr(primitives, "_ROWS", {"cpu": ((1, 16, 2), (16, 48, 16))})
    yield
    torch.set_num_threads(threads)


def taken(some: Any) -> list[Primitive]:
    return [Primitive(**one) for one in some]


@pytest.mark.usefixtures("quick")
def test_products_take_longer_where_they_are_wider() -> None:
    small, large = taken(primitives._products(torch.device("cpu")))
    # 16 times the operations, which wide products make faster: half of that is left at least.
    assert large.seconds > 4 * small.seconds


@pytest.mark.usefixtures("quick")
def test_a_model_is_scored_updated_and_sampled_and_takes_longer_with_more_rows() -> None:
    found = taken(primitives._model(torch.device("cpu"), 64, 1))
    assert [one.kind for one in found] == ["score", "update", "decode"] * 2
    for few, many in zip(found[:3], found[3:], strict=True):
        # 57 times the tokens, and 8 times the steps of decoding.
        assert many.seconds > 1.5 * few.seconds
    # The same sizes, forward and backward.
    assert found[4].seconds > found[3].seconds
    assert found[0].config is not None
    assert found[0].config["num_hidden_layers"] == 1


@pytest.mark.usefixtures("quick")
def test_copies_are_counted_by_the_bytes_that_move() -> None:
    cpu = torch.device("cpu")
    within = Primitive(**primitives._copied("memory", 1 << 20, cpu, cpu))
    across = Primitive(**primitives._copied("host", 1 << 20, cpu, cpu))
    assert (within.sizes["bytes"], across.sizes["bytes"]) == (2 << 20, 1 << 20)


@pytest.mark.slow
def test_a_process_measures_a_machine_in_a_minute() -> None:
    command = [sys.executable, "-m", "rolemesh.services.preview.primitives", "cpu", "1"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    *lines, last = map(json.loads, printed.splitlines())
    kinds = {one["kind"] for one in lines}
    assert kinds == {"matmul", "memory", "host", "reduce", "score", "update", "decode"}
    assert last["type"] == "machine"
    assert last["threads"] == 1
    # More bytes take longer to sum over ranks.
    reduces = [one["seconds"] for one in lines if one["kind"] == "reduce"]
    assert reduces[-1] > reduces[0]
