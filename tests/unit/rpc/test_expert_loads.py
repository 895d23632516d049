"""Loads of experts as they travel: what is told arrives, and what cannot be is refused by name."""

from __future__ import annotations

import pytest

from rolemesh.rpc.calls.expert_loads import (
    MAX_CHOICES,
    MAX_NUMBERS,
    checked_loads,
    loads_message,
    summed_loads,
)
from rolemesh.v1 import experience_pb2, trainer_pb2


def test_what_is_told_arrives() -> None:
    loads = {1: [3, 0, MAX_CHOICES], 4: [0, 0, 0]}
    sent = trainer_pb2.UpdateResult(expert_loads=loads_message(loads)).SerializeToString()
    assert checked_loads(trainer_pb2.UpdateResult.FromString(sent).expert_loads) == loads
    assert checked_loads([]) == {}


def test_the_largest_answer_fits_into_a_message() -> None:
    layers = {layer: [MAX_CHOICES] * 1024 for layer in range(MAX_NUMBERS // 1024)}
    answer = trainer_pb2.UpdateResult(expert_loads=loads_message(layers))
    assert answer.ByteSize() < 2 * 2**20
    assert checked_loads(answer.expert_loads) == layers


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([(0, [1, -1])], r"expert_loads\[0\]\.choices holds -1: give 0 to"),
        ([(0, [1, MAX_CHOICES + 1])], rf"\[0\]\.choices holds {MAX_CHOICES + 1}: give 0 to"),
        ([(-1, [1, 1])], r"\[0\]\.layer is -1, behind -1: number layers from 0"),
        ([(2, [1, 1]), (2, [1, 1])], r"\[1\]\.layer is 2, behind 2"),
        ([(2, [1, 1]), (1, [1, 1])], r"\[1\]\.layer is 1, behind 2"),
        ([(0, [1, 1]), (1, [1])], r"\[1\]\.choices has 1 numbers, and the first layer has 2"),
        ([(0, [])], r"\[0\]\.choices has 0 numbers"),
        ([(0, [1] * (MAX_NUMBERS + 1))], rf"1 layers of {MAX_NUMBERS + 1} experts: tell at most"),
        ([(n, [1] * 1024) for n in range(129)], r"129 layers of 1024 experts: tell at most"),
    ],
    ids=["negative", "large", "layer below 0", "twice", "descending", "ragged", "none", "wide",
         "deep"],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(layers: list[tuple[int, list[int]]], words: str) -> None:
    told = [experience_pb2.LayerLoads(layer=layer, choices=choices) for layer, choices in layers]
    with pytest.raises(ValueError, match=words):
        checked_loads(told)


def test_several_updates_add_up() -> None:
    assert summed_loads([]) == summed_loads([{}, {}]) == {}
    parts = [{1: [1, 2], 3: [0, 5]}, {}, {1: [4, 0], 3: [1, 1]}]
    assert summed_loads(parts) == {1: [5, 2], 3: [1, 6]}
    assert parts[0] == {1: [1, 2], 3: [0, 5]}
    for other in ({1: [1, 2]}, {1: [1, 2, 3], 3: [0, 5, 0]}, {1: [1, 2], 2: [0, 5]}):
        with pytest.raises(ValueError, match="of different layers or experts"):
            summed_loads([parts[0], other])
