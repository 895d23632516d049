"""A rank's tensors while their boxes arrive."""

from __future__ import annotations

import torch

from rolemesh.engine.layout.manifest import Parameter, Piece, RankShard, WeightLayout
from rolemesh.engine.weights.assembly import Assembly
from rolemesh.engine.weights.copies import Copy

TOP = Piece("rows", ((0, 3), (0, 2)), "padded", (0, 0))
LAST = Piece("rows", ((3, 4), (0, 2)), "padded", (3, 0))
AGAIN = Piece("rows", ((0, 4), (0, 2)), "again", (0, 0))
LAYOUT = WeightLayout(
    {"rows": Parameter((4, 2), "bfloat16")},
    (RankShard((TOP, LAST, AGAIN), {"padded": (6, 2), "again": (4, 2), "empty": (0, 2)}),),
    "bfloat16",
)
ROWS = torch.arange(8.0).view(4, 2)


def duplicate() -> Copy:
    return Copy("rows", AGAIN.box, 0, "padded", (0, 0), 0, "again", (0, 0))


def test_a_tensor_is_whole_with_its_last_box_and_padded_rows_are_zero() -> None:
    assembly = Assembly(LAYOUT, 0, duplicates=[duplicate()])
    assert [name for name, _ in assembly.whole()] == ["empty"]
    assembly.put(TOP, ROWS[:3])
    assert not list(assembly.whole())
    assembly.put(LAST, ROWS[3:])
    found = dict(assembly.whole())
    assert list(found) == ["again", "padded"]
    assert torch.equal(found["again"], ROWS.bfloat16())
    assert torch.equal(found["padded"], torch.cat([ROWS, torch.zeros(2, 2)]).bfloat16())


def test_boxes_that_the_rank_holds_itself_are_copied_when_the_tensor_is_begun() -> None:
    own = [
        Copy("rows", piece.box, 0, "held", (piece.box[0][0], 0), 0, piece.tensor, piece.origin)
        for piece in (TOP, AGAIN)
    ]
    assembly = Assembly(LAYOUT, 0, own=own, tensors={"held": ROWS})
    found = dict(assembly.whole())
    assert torch.equal(found["again"], ROWS.bfloat16())
    assembly.put(LAST, ROWS[3:])
    found = dict(assembly.whole())
    assert torch.equal(found["padded"][:4], ROWS.bfloat16())


def test_a_lasting_box_that_is_the_whole_tensor_is_not_copied() -> None:
    for values, is_same in ((ROWS.bfloat16(), True), (ROWS, False)):
        assembly = Assembly(LAYOUT, 0)
        assembly.put(AGAIN, values, is_lasting=True)
        tensor = dict(assembly.whole())["again"]
        assert (tensor.data_ptr() == values.data_ptr()) is is_same
        assert torch.equal(tensor, ROWS.bfloat16())
