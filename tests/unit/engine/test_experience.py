"""Ragged experience and its payload."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolemesh.engine.experience import (
    Column,
    ColumnKind,
    Experience,
    payload_layout,
    read_payload,
    selected_arrays,
    selected_layout,
    write_payload,
)
from rolemesh.engine.layout.payload import ALIGNMENT_BYTES, ColumnMissingError

DTYPES = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.bool]
)


@st.composite
def experiences(draw: st.DrawFn) -> Experience:
    num_rows = draw(st.integers(0, 6))
    prompts = draw(st.lists(st.integers(1, 5), min_size=num_rows, max_size=num_rows))
    completions = draw(st.lists(st.integers(0, 7), min_size=num_rows, max_size=num_rows))
    dtype = draw(DTYPES)
    texts = draw(st.lists(st.text(max_size=6), min_size=num_rows, max_size=num_rows))
    sequences = [list(range(p + c)) for p, c in zip(prompts, completions, strict=True)]
    return Experience(
        {
            "tokens": Column.ragged(ColumnKind.SEQUENCE, sequences, torch.int32),
            "prompt_lengths": Column(ColumnKind.ROW, torch.tensor(prompts, dtype=torch.int64)),
            "anything": Column.ragged(
                ColumnKind.COMPLETION, [[row % 3] * n for row, n in enumerate(completions)], dtype
            ),
            "text": Column.text(texts),
        }
    )


def _rows(batch: Experience) -> list[dict[str, object]]:
    """The batch as plain lists, one dict a row: what select, slice and concat must act on."""
    rows: list[dict[str, object]] = [{} for _ in range(batch.num_rows)]
    for name, column in batch.columns.items():
        for row, values in zip(rows, column.rows(), strict=True):
            row[name] = values.tolist()
    return rows


def _same(left: Experience, right: Experience) -> bool:
    return list(left.columns) == list(right.columns) and all(
        left[name].kind is right[name].kind
        and left[name].values.dtype == right[name].values.dtype
        and torch.equal(left[name].values, right[name].values)
        and left[name].lengths().tolist() == right[name].lengths().tolist()
        for name in left.columns
    )


@given(experiences())
def test_a_payload_reads_back_as_the_same_batch(batch: Experience) -> None:
    layout = payload_layout(batch)
    buffer = bytearray(layout.num_bytes)
    write_payload(batch, layout, memoryview(buffer))
    payload = torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0).byte()
    assert _same(read_payload(layout, payload), batch)


@given(experiences())
def test_arrays_of_a_payload_are_aligned_and_do_not_overlap(batch: Experience) -> None:
    layout = payload_layout(batch)
    spans = []
    for column in layout.columns:
        spans.append((column.values_at, column.num_values * getattr(torch, column.dtype).itemsize))
        if column.offsets_at is not None:
            spans.append((column.offsets_at, 8 * (layout.num_rows + 1)))
    end = 0
    for at, num_bytes in sorted(spans):
        assert at % ALIGNMENT_BYTES == 0
        assert at >= end
        end = at + num_bytes
    assert end <= layout.num_bytes


@given(experiences(), st.data())
def test_select_takes_rows_in_the_given_order(batch: Experience, data: st.DataObject) -> None:
    rows = data.draw(
        st.lists(st.integers(0, batch.num_rows - 1), max_size=8) if batch.num_rows else st.just([])
    )
    chosen = batch.select(torch.tensor(rows, dtype=torch.int64))
    assert _rows(chosen) == [_rows(batch)[row] for row in rows]


@given(experiences(), st.data())
def test_rows_are_laid_out_and_gathered_in_parts_as_if_they_had_been_selected(
    batch: Experience, data: st.DataObject
) -> None:
    at_most = max(0, batch.num_rows - 1)
    rows = data.draw(st.permutations(range(batch.num_rows)))[: data.draw(st.integers(0, at_most))]
    chosen = batch.select(torch.tensor(rows, dtype=torch.int64))
    layout = selected_layout(batch, rows)
    assert layout == payload_layout(chosen)
    expected = bytearray(layout.num_bytes)
    write_payload(chosen, layout, memoryview(expected))
    start = data.draw(st.integers(0, layout.num_bytes))
    stop = data.draw(st.integers(start, layout.num_bytes))
    window = data.draw(st.integers(1, 64))
    came, end = bytearray(layout.num_bytes), 0
    for at, values in selected_arrays(batch, rows, layout, start, stop, window):
        assert at >= end, "in ascending order"
        end = at + values.nbytes
        came[at:end] = values.contiguous().view(torch.uint8).numpy().tobytes()
    assert came[start:stop] == expected[start:stop]


def test_only_rows_that_reach_into_the_part_are_gathered() -> None:
    lengths = [10] * 100
    batch = Experience(
        {"logprobs": Column.ragged(ColumnKind.COMPLETION, [[0.0] * n for n in lengths],
                                   torch.float32)}
    )  # fmt: skip
    rows = list(range(99, -1, -1))
    layout = selected_layout(batch, rows)
    at = layout.columns[0].values_at
    arrays = [*selected_arrays(batch, rows, layout, at + 2000, at + 2100, 80)]
    # The offsets of all rows, and values of rows 50 to 52, two rows at a time.
    assert [(first - at, values.nbytes) for first, values in arrays[1:]] == [(2000, 80), (2080, 40)]


@given(experiences(), st.data())
def test_slice_is_a_run_of_rows(batch: Experience, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, batch.num_rows))
    stop = data.draw(st.integers(start, batch.num_rows))
    assert _rows(batch.slice(start, stop)) == _rows(batch)[start:stop]


@given(experiences(), st.data())
def test_concat_of_slices_is_the_batch(batch: Experience, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, batch.num_rows))
    parts = [batch.slice(0, cut), batch.slice(cut, batch.num_rows)]
    assert _same(Experience.concat(parts), batch)


@given(st.lists(st.text()))
def test_text_comes_back_as_it_was(texts: list[str]) -> None:
    assert Column.text(texts).strings() == texts


def _batch() -> Experience:
    return Experience(
        {
            "tokens": Column.ragged(ColumnKind.SEQUENCE, [[1, 2, 3], [4, 5]], torch.int64),
            "prompt_lengths": Column(ColumnKind.ROW, torch.tensor([1, 1])),
            "logprobs": Column.ragged(ColumnKind.COMPLETION, [[-1.0, -2.0], [-3.0]], torch.float32),
        }
    )


def test_columns_of_another_batch_are_joined_and_replaced() -> None:
    batch = _batch()
    other = Experience({"rewards": Column(ColumnKind.ROW, torch.tensor([0.5, 1.0]))})
    joined = batch | other
    assert list(joined.columns) == ["tokens", "prompt_lengths", "logprobs", "rewards"]
    replaced = joined | Experience({"rewards": Column(ColumnKind.ROW, torch.tensor([7.0, 8.0]))})
    assert replaced["rewards"].values.tolist() == [7.0, 8.0]
    with pytest.raises(ValueError, match="cannot join 2 rows with 1 rows"):
        batch | other.slice(0, 1)


def test_a_missing_column_is_named_with_those_that_exist() -> None:
    with pytest.raises(ColumnMissingError, match=r"'values' is missing.*logprobs.*tokens"):
        _batch()["values"]
    with pytest.raises(ColumnMissingError, match="'values'"):
        _batch().require(["tokens", "values"])


def test_completion_columns_that_disagree_with_tokens_are_refused() -> None:
    wrong = Column.ragged(ColumnKind.COMPLETION, [[1.0], [2.0, 3.0]], torch.float32)
    with pytest.raises(ValueError, match=r"'values' and 'tokens - prompt_lengths' disagree"):
        Experience({**_batch().columns, "values": wrong})


def test_columns_of_different_row_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="disagree on the number of rows"):
        Experience(
            {
                "a": Column(ColumnKind.ROW, torch.zeros(2)),
                "b": Column(ColumnKind.ROW, torch.zeros(3)),
            }
        )
    with pytest.raises(ValueError, match="at least one column"):
        Experience({})


@pytest.mark.parametrize(
    ("values", "offsets", "message"),
    [
        (torch.zeros(3), torch.tensor([0, 2]), "run from 0 to 2"),
        (torch.zeros(3), torch.tensor([1, 3]), "run from 1 to 3"),
        (torch.zeros(3), torch.tensor([0, 4, 2, 3]), "offsets decrease"),
        (torch.zeros(3), torch.tensor([0, 3], dtype=torch.int32), "must be int64"),
        (torch.zeros(3), None, "do not go together"),
        (torch.zeros(1, 3, 2), torch.tensor([0, 1]), "3 dimensions"),
    ],
)
def test_offsets_that_do_not_fit_their_values_are_refused(
    values: torch.Tensor, offsets: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Column(ColumnKind.COMPLETION, values, offsets)


def test_columns_of_different_types_are_not_stacked() -> None:
    left = Column(ColumnKind.ROW, torch.zeros(2))
    with pytest.raises(ValueError, match="different kinds"):
        Column.concat([left, Column(ColumnKind.ROW, torch.zeros(2, dtype=torch.int64))])


def test_a_column_that_is_not_text_has_no_strings() -> None:
    with pytest.raises(ValueError, match="a row column holds no text"):
        Column(ColumnKind.ROW, torch.zeros(2)).strings()


def test_a_payload_of_another_size_is_refused() -> None:
    layout = payload_layout(_batch())
    with pytest.raises(ValueError, match=f"{layout.num_bytes} bytes is described, but 16 came"):
        read_payload(layout, torch.zeros(16, dtype=torch.uint8))


def test_a_dtype_that_may_not_travel_has_no_layout() -> None:
    batch = Experience({"a": Column(ColumnKind.ROW, torch.zeros(2, dtype=torch.complex64))})
    with pytest.raises(ValueError, match="'a' has dtype complex64, which may not travel"):
        payload_layout(batch)
