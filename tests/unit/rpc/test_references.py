"""Arithmetic on references: columns, rows, parts, lengths, and places."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from support.references import ref, shard

from rolemesh.engine.layout.payload import ColumnMissingError
from rolemesh.rpc.experience.references import (
    by_column,
    by_group,
    concat_references,
    cut_out,
    join_parts,
    join_references,
    merge_parts,
    names_of,
    order_of,
    place,
    row_tokens,
    rows_of,
    shards_of,
)
from rolemesh.v1 import experience_pb2

# --- lengths --------------------------------------------------------------------------------


def test_row_tokens_are_in_the_order_of_the_batch() -> None:
    batch = ref(5, shard([1, 4], tokens=[11, 14]), shard([0, 2, 3], tokens=[10, 12, 13]))
    assert row_tokens(batch) == [10, 11, 12, 13, 14]


def test_the_last_group_with_a_column_counts() -> None:
    batch = ref(1, shard([0], "old", tokens=[3]))
    batch.groups.extend(ref(1, shard([0], "new", tokens=[7])).groups)
    assert [*by_group(batch, ["tokens"])] == [1]
    assert row_tokens(batch) == [7]


def test_a_batch_without_tokens_names_what_it_has() -> None:
    with pytest.raises(ColumnMissingError, match=r"'tokens' is missing; .*\['values'\]"):
        row_tokens(ref(1, shard([0]), columns=["values"]))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (ref(2, shard([0, 1], tokens=[5])), r"shard one of 2 rows tells the tokens of 1: .*fill"),
        (ref(2, shard([0, 1])), "tells the tokens of 0"),
        (ref(2, shard([0, 2], tokens=[5, 6])), "shard one of 2 rows"),
        (ref(3, shard([0, 2], tokens=[5, 6])), "hold 2 of 3 rows: every row must"),
    ],
    ids=["too few", "none", "beyond the batch", "a row is missing"],
)
def test_lengths_that_are_not_whole_are_refused(
    batch: experience_pb2.ExperienceRef, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        row_tokens(batch)


@pytest.mark.parametrize(
    ("row_start", "num_rows", "rows"), [(1, 2, [1, 1]), (3, 2, [3, 2]), (0, 2, [1, 3]), (1, 3, [1])]
)
def test_named_rows_that_contradict_the_shard_are_refused(
    row_start: int, num_rows: int, rows: list[int]
) -> None:
    wrong = experience_pb2.Shard(
        experience_id="one", row_start=row_start, num_rows=num_rows, rows=rows
    )
    with pytest.raises(ValueError, match="shard one says that it holds"):
        rows_of(wrong)


# --- places ---------------------------------------------------------------------------------


def test_wanted_rows_are_found_in_any_order() -> None:
    generator = random.Random(3)
    for _ in range(50):
        rows = list(range(generator.randint(2, 20)))
        generator.shuffle(rows)
        cut = generator.randint(1, len(rows) - 1)
        parts = {"a": sorted(rows[:cut]), "b": sorted(rows[cut:])}
        wanted = generator.sample(rows, generator.randint(1, len(rows)))
        got: dict[int, int] = {}
        for found, positions, targets in place([shard(r, n) for n, r in parts.items()], wanted):
            for position, target in zip(positions, targets, strict=True):
                got[target] = parts[found.experience_id][position]
        assert [got[index] for index in range(len(wanted))] == wanted


def test_rows_that_shards_give_are_put_in_the_wanted_order() -> None:
    generator = random.Random(4)
    for _ in range(50):
        rows = list(range(generator.randint(2, 20)))
        held = {"a": rows[::3], "b": rows[1::3], "c": rows[2::3]}
        wanted = generator.sample(rows, generator.randint(1, len(rows)))
        found = place([shard(r, n) for n, r in held.items() if r], wanted)
        came = [held[one.experience_id][at] for one, positions, _ in found for at in positions]
        assert [came[at] for at in order_of(found)] == wanted


def test_neighbours_are_a_range_and_shards_without_wanted_rows_are_left_out() -> None:
    found = place([shard([0, 1, 2, 3], "a"), shard([4, 5], "b")], [1, 2])
    assert [(s.experience_id, positions, targets) for s, positions, targets in found] == [
        ("a", range(1, 3), [0, 1])
    ]


def test_a_row_in_two_shards_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1 lies in two shards, the second being b"):
        place([shard([0, 1], "a"), shard([1, 2], "b")], [0, 1])


def test_a_row_in_no_shard_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rows \[7\] \(1 of 2\) lie in no shard"):
        place([shard([0, 1], "a")], [1, 7])


# --- parts ----------------------------------------------------------------------------------


def test_parts_become_one_reference_ordered_by_first_row() -> None:
    parts = [
        ref(4, shard([1, 3], "a", rank=0)),
        experience_pb2.ExperienceRef(num_rows=4),
        ref(4, shard([0, 2], "b", rank=2)),
    ]
    joined = join_parts(parts)
    assert [s.experience_id for s in joined.groups[0].shards] == ["b", "a"]
    assert len(parts[0].groups[0].shards) == 1, "parts stay as they were"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([experience_pb2.ExperienceRef(num_rows=2)], "no rank has published a row"),
        ([ref(2, shard([0])), ref(3, shard([1]))], "parts of 2 and 3 rows"),
        (
            [ref(2, shard([0])), ref(2, shard([1]), columns=["values"])],
            r"columns \['tokens'\] and \['values'\]",
        ),
        ([ref(2, shard([0])), ref(2, shard([0]))], "published 2 rows of a batch of 2"),
        ([ref(3, shard([0])), ref(3, shard([2]))], "published 2 rows of a batch of 3"),
    ],
    ids=["nothing", "other batch", "other columns", "a row twice", "a row missing"],
)
def test_parts_that_do_not_make_up_the_batch_are_refused(
    parts: list[experience_pb2.ExperienceRef], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        join_parts(parts)


def test_parts_of_some_rows_merge_without_being_the_whole() -> None:
    nothing = experience_pb2.ExperienceRef(num_rows=6)
    merged = merge_parts([nothing, ref(6, shard([4, 5], "b")), ref(6, shard([1], "a"))])
    assert [s.experience_id for s in merged.groups[0].shards] == ["a", "b"]
    assert merge_parts([nothing, nothing]) == nothing


def test_a_cut_numbers_the_same_shards_anew() -> None:
    part = ref(9, shard([4, 6], "a", tokens=[7, 8]), shard([5], "b"))
    cut = cut_out(part, 4, 3)
    assert [rows_of(s) for s in cut.groups[0].shards] == [[0, 2], range(1, 2)]
    assert list(cut.groups[0].shards[0].row_tokens) == [7, 8]
    assert cut.num_rows == 3
    assert part.groups[0].shards[0].row_start == 4, "the part stays as it was"


@pytest.mark.parametrize("rows", [[3, 4], [6, 7]])
def test_a_shard_beyond_the_cut_is_refused(rows: list[int]) -> None:
    with pytest.raises(ValueError, match="outside the cut of 3 rows from 4"):
        cut_out(ref(9, shard(rows)), 4, 3)


# --- references made of references ----------------------------------------------------------


def columns_of(joined: experience_pb2.ExperienceRef) -> list[tuple[str, str]]:
    return [
        (column.name, group.shards[0].experience_id)
        for group in joined.groups
        for column in group.columns
    ]


def test_a_join_keeps_both_and_lets_the_later_column_win() -> None:
    parts = [
        ref(2, shard([0, 1], "a"), columns=["tokens", "logprobs"]),
        ref(2, shard([0, 1], "b"), columns=["values"]),
        ref(2, shard([0, 1], "c"), columns=["logprobs"]),
    ]
    parts[0].run_id = parts[1].run_id = parts[2].run_id = "run"
    parts[0].step = 1
    joined = join_references(parts)
    assert columns_of(joined) == [("tokens", "a"), ("values", "b"), ("logprobs", "c")]
    assert (joined.run_id, joined.step, joined.num_rows) == ("run", 1, 2)
    assert names_of(joined) == ["tokens", "values", "logprobs"]


def test_a_join_over_other_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 rows .* with 3 rows"):
        join_references([ref(2, shard([0, 1])), ref(3, shard([0, 1, 2]), columns=["values"])])


def test_blocks_one_after_another_number_their_rows_on() -> None:
    blocks = [ref(3, shard([0, 2], "a"), shard([1], "b")), ref(2, shard([0, 1], "c"))]
    whole = concat_references(blocks)
    assert whole.num_rows == 5
    assert [(s.experience_id, list(rows_of(s))) for s in shards_of(whole)] == [
        ("a", [0, 2]),
        ("b", [1]),
        ("c", [3, 4]),
    ]
    assert blocks[1].groups[0].shards[0].row_start == 0, "the block stays as it was"


def test_blocks_of_other_columns_or_no_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\['tokens'\].*\['values'\].*must have the same"):
        concat_references([ref(1, shard([0])), ref(1, shard([0]), columns=["values"])])
    with pytest.raises(ValueError, match="give at least one"):
        concat_references([])


def test_wanted_columns_stand_under_the_last_group_that_has_them() -> None:
    batch = ref(1, shard([0], "old"), columns=["tokens", "values"])
    batch.groups.extend(ref(1, shard([0], "new"), columns=["values", "rewards"]).groups)
    found = by_group(batch, ["rewards", "tokens", "values", "rewards"])
    assert {index: [one.name for one in group] for index, group in found.items()} == {
        1: ["rewards", "values"],
        0: ["tokens"],
    }
    with pytest.raises(ColumnMissingError, match="'logprobs' is missing") as missing:
        by_group(batch, ["logprobs"])
    assert missing.value.column == "logprobs"


NUM_MADE_UP = 1 << 17


def test_rows_that_a_reference_makes_up_take_a_byte_each() -> None:
    made_up = experience_pb2.Shard(experience_id="one", num_rows=NUM_MADE_UP)
    tracemalloc.start()
    try:
        found = place([made_up], range(NUM_MADE_UP))
        with pytest.raises(ValueError, match=r"rows \[0, 1, 2\] \(131072 of 131072\)"):
            place([], range(NUM_MADE_UP))
        with pytest.raises(ValueError, match="row 0 lies in two shards"):
            place([made_up] * 10, range(NUM_MADE_UP))
        with pytest.raises(ValueError, match=r"hold 1 of 131072 rows"):
            row_tokens(ref(NUM_MADE_UP, shard([0], tokens=[3])))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == [(made_up, range(NUM_MADE_UP), range(NUM_MADE_UP))]
    # The same by a dict took 40 MiB.
    assert peak < 4 << 20


def test_single_rows_are_found_in_shards_of_any_size() -> None:
    shards = [
        experience_pb2.Shard(experience_id=str(at), row_start=100 * at, num_rows=100)
        for at in range(3)
    ]
    found = place(shards, [250, 3, 101, 2])
    assert [(one.experience_id, list(at), list(to)) for one, at, to in found] == [
        ("0", [2, 3], [3, 1]),
        ("1", [1], [2]),
        ("2", [50], [0]),
    ]


def test_services_of_several_makes_group_and_order_columns_as_they_like() -> None:
    def part(rows: list[int], *groups: dict[str, int]) -> experience_pb2.ExperienceRef:
        made = ref(3)
        for number, widths in enumerate(groups):
            own = made.groups.add(shards=[shard(rows, f"{rows}-{number}")])
            for name, width in widths.items():
                own.columns.add(name=name, kind=experience_pb2.COLUMN_KIND_COMPLETION, width=width)
        return made

    parts = [
        part([0, 2], {"scores": 0, "scores_top": 4}),
        part([1], {"scores_top": 4}, {"scores": 1}),
        part([]),
    ]
    joined = join_parts([by_column(one) for one in parts])
    assert names_of(joined) == ["scores", "scores_top"]
    for group in joined.groups:
        assert [*rows_of(group.shards[0]), *rows_of(group.shards[1])] == [0, 2, 1]
    wrong = part([1], {"scores": 0, "scores_top": 5})
    with pytest.raises(RuntimeError, match="with the columns"):
        join_parts([by_column(one) for one in (parts[0], wrong)])
