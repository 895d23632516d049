"""Sources: what is read is what was written, and whatever is wrong is named."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from pydantic import TypeAdapter, ValidationError
from support.saved_datasets import write_saved, write_saved_splits

from rolemesh.engine.data.prompts import load_rows
from rolemesh.engine.data.rows import MAX_METADATA_BYTES, DataInvalidError, PromptRow
from rolemesh.engine.data.sources import load_sources
from rolemesh.engine.specs import DataSpec, HfDatasetSpec, JsonlSpec, ParquetSpec

RECORDS = [{"prompt": f"q{at}", "answer": at, "level": at / 2} for at in range(7)]
USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}

spec_of: TypeAdapter[Any] = TypeAdapter(DataSpec)


def write_parquet(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=2)
    return path


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(record: dict[str, Any], tmp_path: Path, **fields: Any) -> Any:
    path = write_lines(tmp_path / "rows.jsonl", [record])
    (row,), _ = load_rows(JsonlSpec(path=path, **fields))
    return row


def questions(rows: Any) -> list[str]:
    return [row.messages[-1]["content"] for row in rows]


# --- round trips --------------------------------------------------------------------------


def layouts(tmp_path: Path) -> dict[str, Any]:
    many = tmp_path / "many"
    write_parquet(many / "b.parquet", RECORDS[4:])
    write_parquet(many / "a.parquet", RECORDS[:4])
    repository = tmp_path / "repository"
    write_parquet(repository / "data" / "train-00000-of-00002.parquet", RECORDS[:3])
    write_parquet(repository / "data" / "train-00001-of-00002.parquet", RECORDS[3:])
    write_parquet(repository / "data" / "test-00000-of-00001.parquet", [{"prompt": "t"}])
    splits = tmp_path / "splits"
    write_saved_splits(splits, train=RECORDS, test=[{"prompt": "t", "answer": 0, "level": 0.0}])
    return {
        "jsonl": JsonlSpec(path=write_lines(tmp_path / "rows.jsonl", RECORDS)),
        "parquet file": ParquetSpec(path=write_parquet(tmp_path / "rows.parquet", RECORDS)),
        "parquet folder": ParquetSpec(path=many),
        "saved": HfDatasetSpec(path=write_saved(tmp_path / "saved", RECORDS[:5], RECORDS[5:])),
        "saved splits": HfDatasetSpec(path=splits),
        "repository": HfDatasetSpec(path=repository),
        "repository config": HfDatasetSpec(path=tmp_path, name="repository"),
    }


@pytest.mark.parametrize(
    "name",
    [
        "jsonl",
        "parquet file",
        "parquet folder",
        "saved",
        "saved splits",
        "repository",
        "repository config",
    ],
)
def test_rows_are_read_as_they_were_written_and_in_their_order(name, tmp_path):
    train, held_out = load_rows(layouts(tmp_path)[name])
    assert questions(train) == [record["prompt"] for record in RECORDS]
    assert [row.answer for row in train] == [str(record["answer"]) for record in RECORDS]
    assert [json.loads(row.metadata) for row in train] == [
        {"level": record["level"]} for record in RECORDS
    ]
    assert held_out == []


@pytest.mark.parametrize("name", ["saved splits", "repository"])
def test_a_split_can_be_held_out(name, tmp_path):
    spec = layouts(tmp_path)[name].model_copy(update={"held_out_split": "test"})
    train, held_out = load_rows(spec)
    assert (len(train), questions(held_out)) == (7, ["t"])


def test_what_the_library_itself_saves_is_read(tmp_path):
    import datasets

    turns = [[SYSTEM, USER] for _ in RECORDS]
    whole = datasets.Dataset.from_list(RECORDS).remove_columns("prompt").add_column("prompt", turns)
    picked = whole.shuffle(seed=3).select([0, 2, 4])
    datasets.DatasetDict(train=picked, test=whole.select([6])).save_to_disk(tmp_path / "saved")
    train, _ = load_rows(HfDatasetSpec(path=tmp_path / "saved"))
    assert [row.answer for row in train] == [str(answer) for answer in picked["answer"]]
    assert [list(row.messages) for row in train] == [[SYSTEM, USER]] * 3


def test_nested_and_dated_columns_become_metadata_and_no_number_that_is_none(tmp_path):
    record = {
        "prompt": "q",
        "day": datetime.date(2026, 11, 21),
        "price": Decimal("1.5"),
        "tags": ["a", "b"],
        "origin": {"page": 3, "score": float("nan")},
    }
    (row,), _ = load_rows(ParquetSpec(path=write_parquet(tmp_path / "x.parquet", [record])))
    assert json.loads(row.metadata) == {
        "day": "2026-11-21",
        "price": "1.5",
        "tags": ["a", "b"],
        "origin": {"page": 3, "score": None},
    }


# --- meanings of columns ------------------------------------------------------------------


def test_columns_are_read_under_the_names_that_the_recipe_gives(tmp_path):
    row = read(
        {"question": "q", "solution": "s", "prompt": "no prompt", "text": "no text"},
        tmp_path,
        columns={"prompt": "question", "answer": "solution"},
    )
    assert (questions([row]), row.answer, row.text) == (["q"], "s", None)
    assert json.loads(row.metadata) == {"prompt": "no prompt"}


def test_a_column_that_is_named_loses_its_usual_meaning(tmp_path):
    row = read({"text": "q"}, tmp_path, columns={"prompt": "text"})
    assert (questions([row]), row.text) == (["q"], None)


def test_the_names_survive_being_written_and_read():
    spec = spec_of.validate_python(
        {
            "type": "jsonl",
            "path": "x",
            "columns": {"prompt": "text"},
            "curriculum": {"by": "d", "type": "sorted"},
        }
    )
    assert spec_of.validate_json(spec_of.dump_json(spec)) == spec


def test_only_the_chosen_columns_become_metadata(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", [{"prompt": "q", "a": 1, "image": b"\x00" * 99}])
    (row,), _ = load_rows(ParquetSpec(path=path, metadata=("a",)))
    assert json.loads(row.metadata) == {"a": 1}


def test_a_system_prompt_is_set_where_there_is_none(tmp_path):
    path = write_lines(
        tmp_path / "x.jsonl",
        [{"prompt": "q"}, {"prompt": [USER]}, {"prompt": [{**SYSTEM, "content": "own"}, USER]}],
    )
    train, _ = load_rows(JsonlSpec(path=path, system_prompt="Be brief."))
    assert [row.messages[0]["content"] for row in train] == ["Be brief.", "Be brief.", "own"]
    assert [len(row.messages) for row in train] == [2, 2, 2]


def test_a_conversation_is_cut_before_its_first_answer_and_after_its_last(tmp_path):
    turns = [SYSTEM, USER, ASSISTANT, USER, ASSISTANT, USER]
    row = read({"messages": turns}, tmp_path)
    assert list(row.messages) == [SYSTEM, USER]
    assert row.completion == [ASSISTANT, USER, ASSISTANT]


def test_a_conversation_without_an_answer_is_a_prompt(tmp_path):
    row = read({"messages": [USER]}, tmp_path)
    assert (list(row.messages), row.completion) == ([USER], None)


def test_preferences_may_repeat_the_prompt(tmp_path):
    row = read(
        {"prompt": "Hi", "chosen": [USER, ASSISTANT], "rejected": [{**ASSISTANT, "content": "No"}]},
        tmp_path,
        system_prompt="Be brief.",
    )
    assert row.chosen == [ASSISTANT]
    assert row.rejected == [{"role": "assistant", "content": "No"}]


@pytest.mark.parametrize(
    ("label", "meant"), [(True, True), (False, False), (1, True), (0.0, False), (None, None)]
)
def test_labels_are_read(label, meant, tmp_path):
    assert read({"prompt": "q", "completion": "a", "label": label}, tmp_path).is_wanted is meant


def test_keys_that_arrow_fills_with_null_are_no_keys(tmp_path):
    records = [{"prompt": [{**USER, "name": "Ann"}]}, {"prompt": [USER]}]
    train, _ = load_rows(ParquetSpec(path=write_parquet(tmp_path / "x.parquet", records)))
    assert [list(row.messages) for row in train] == [[{**USER, "name": "Ann"}], [USER]]


def test_bare_text_is_a_row_of_its_own_kind(tmp_path):
    row = read({"text": "Once upon a time"}, tmp_path)
    assert (row.text, list(row.messages)) == ("Once upon a time", [])


# --- held-out rows ------------------------------------------------------------------------


def test_drawn_held_out_prompts_are_distinct_and_leave_the_training_rows(tmp_path):
    records = [{"prompt": f"q{at % 10}", "n": at} for at in range(30)]
    spec = JsonlSpec(path=write_lines(tmp_path / "x.jsonl", records), held_out_size=4)
    train, held_out = load_rows(spec)
    assert len(set(questions(held_out))) == 4
    assert not set(questions(held_out)) & set(questions(train))
    # Each prompt stands three times; one row of each drawn one is held out, none stays.
    assert len(train) == 30 - 4 * 3
    assert load_rows(spec) == (train, held_out)
    assert load_rows(spec.model_copy(update={"seed": 1}))[1] != held_out


def test_prompts_are_equal_whatever_the_order_of_the_keys_of_a_turn():
    def row(**turn: Any) -> PromptRow:
        return PromptRow(messages=[turn])

    assert row(role="user", content="é").identity == row(content="é", role="user").identity
    assert row(role="user", content="e").identity != row(role="user", content="é").identity
    # Half of a surrogate pair, which only Python's own writer takes.
    assert row(role="\ud800", content="e").identity == row(content="e", role="\ud800").identity
    assert row(role="\ud800", content="e").identity != row(role="\ud801", content="e").identity


def test_a_mixture_holds_out_for_all_its_sources(tmp_path):
    one = write_lines(tmp_path / "one.jsonl", [{"prompt": name} for name in "abc"])
    two = write_lines(tmp_path / "two.jsonl", [{"prompt": name} for name in "cdef"])
    out = write_lines(tmp_path / "out.jsonl", [{"prompt": name} for name in "bx"])
    mixture = spec_of.validate_python(
        {
            "type": "mixture",
            "sources": [
                {"data": {"type": "jsonl", "path": one}},
                {"data": {"type": "jsonl", "path": two, "held_out_size": 1}},
                {"data": {"type": "jsonl", "path": two, "held_out_path": out}, "weight": 2},
            ],
        }
    )
    sources = load_sources(mixture, "data")
    held_out = {row.identity for source in sources for row in source.held_out}
    trained = [row for source in sources for row in source.train]
    assert not held_out & {row.identity for row in trained}
    assert sum(source.num_repeated for source in sources) == 11 - 1 - len(trained)
    assert sources[0].num_repeated >= 1  # "b" is held out by the third


# --- what is wrong is named ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "fields", "message"),
    [
        ({"x": 1}, {}, r"line 1.*key 'prompt'.*it has x.*data\.columns"),
        ({"prompt": "q"}, {"columns": {"answer": "sol"}}, r"no column 'sol'.*columns\.answer"),
        ({"prompt": "q"}, {"metadata": ["m"]}, r"no column 'm'.*data\.metadata"),
        ({"prompt": [1]}, {}, r"'prompt' must be text or a list of turns"),
        ({"prompt": [{"role": "user", "content": 3}]}, {}, r"'prompt' must be text or a list"),
        ({"prompt": [USER, ASSISTANT]}, {}, r"ends with an assistant turn.*assistant_prefix"),
        ({"prompt": [USER, USER]}, {}, r"turns 0 and 1 are both the user's"),
        ({"prompt": [USER, SYSTEM]}, {}, r"turn 1 is a system turn"),
        ({"messages": "Hi"}, {}, r"'messages' must be a list of turns"),
        ({"messages": [ASSISTANT]}, {}, r"begins with an assistant turn"),
        ({"messages": [USER, ASSISTANT], "completion": "x"}, {}, r"'messages'.*and 'completion'"),
        ({"prompt": "q", "chosen": "a"}, {}, r"'rejected' is missing"),
        ({"prompt": "q", "completion": [USER]}, {}, r"'completion' must begin"),
        ({"prompt": "q", "completion": 4}, {}, r"'completion' must be text or a list"),
        ({"prompt": "q", "label": 2}, {}, r"'label' is 2: give true or false"),
        ({"prompt": "q", "label": float("nan")}, {}, r"'label' is nan"),
        ({"text": 4}, {}, r"'text' must be text, not int"),
        ({"prompt": "a\ud800"}, {}, r"'prompt' has a character at 1 that is no Unicode text"),
        ({"messages": [{**USER, "content": "\ud800"}]}, {}, r"'messages' has a character at 0"),
        ({"prompt": "q", "answer": float("nan")}, {}, r"'answer' is nan: give null"),
        (
            {"prompt": "q", "note": "x" * MAX_METADATA_BYTES},
            {},
            r"takes 655\d\d bytes, more than 65536 .*column 'note'.*data\.metadata",
        ),
    ],
)
def test_a_wrong_row_is_named_with_its_field(record, fields, message, tmp_path):
    with pytest.raises(DataInvalidError, match=message):
        read(record, tmp_path, **fields)


def test_raw_bytes_are_no_metadata(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", [{"prompt": "q", "image": b"123"}])
    with pytest.raises(DataInvalidError, match=r"row 0.*3 raw bytes.*data\.metadata"):
        load_rows(ParquetSpec(path=path))


def test_a_wrong_row_of_a_table_is_named_by_its_number(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", [{"prompt": text} for text in ["a", "b", None]])
    with pytest.raises(DataInvalidError, match=r"x\.parquet, row 2 \(counted from 0\)"):
        load_rows(ParquetSpec(path=path))


def test_files_that_are_not_there_or_not_what_they_should_be_are_named(tmp_path):
    junk = tmp_path / "junk.parquet"
    junk.write_text("not parquet")
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    broken = write_saved(tmp_path / "broken", RECORDS)
    (broken / "data-00000-of-00001.arrow").write_bytes(b"\x00" * 64)
    stateless = write_saved(tmp_path / "stateless", RECORDS)
    (stateless / "state.json").write_text("{}")
    straying = write_saved(tmp_path / "straying", RECORDS)
    (straying / "state.json").write_text('{"_data_files": [{"filename": "../rows.arrow"}]}')
    ambiguous = tmp_path / "ambiguous"
    for config in ("one", "two"):
        write_parquet(ambiguous / config / "train.parquet", RECORDS)
    splits = write_saved_splits(tmp_path / "splits", train=RECORDS)
    cases = [
        (ParquetSpec(path=tmp_path / "no.parquet"), r"data\.path .*no\.parquet cannot be read"),
        (ParquetSpec(path=junk), r"junk\.parquet cannot be read as Parquet"),
        (ParquetSpec(path=tmp_path / "empty"), r"holds no \.parquet file"),
        (JsonlSpec(path=tmp_path / "latin.jsonl"), r"is not UTF-8"),
        (HfDatasetSpec(path=tmp_path / "no"), r"is no folder.*services fetch nothing"),
        (HfDatasetSpec(path=tmp_path / "empty"), r"neither a saved data set.*none"),
        (HfDatasetSpec(path=broken), r"cannot be read as Arrow"),
        (HfDatasetSpec(path=stateless), r"state\.json .*cannot be read.*save the data set again"),
        (HfDatasetSpec(path=straying), r"names no file of the folder"),
        (HfDatasetSpec(path=ambiguous), r"several folders \(one, two\).*data\.name"),
        (HfDatasetSpec(path=splits, split="test"), r"no split 'test'; it has train"),
        (HfDatasetSpec(path=splits / "train", split="test"), r"holds a single split, but 'test'"),
    ]
    for spec, message in cases:
        with pytest.raises(DataInvalidError, match=message):
            load_rows(spec)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_empty_file_holds_no_training_prompt(suffix, tmp_path):
    path = tmp_path / f"x.{suffix}"
    if suffix == "jsonl":
        path.write_text("\n")
    else:
        schema = pyarrow.schema([("prompt", pyarrow.string())])
        pyarrow.parquet.write_table(schema.empty_table(), path)
    with pytest.raises(ValueError, match="no training prompt"):
        load_rows(spec_of.validate_python({"type": suffix, "path": path}))


def test_a_held_out_split_that_is_too_large_says_how_many_prompts_there_are(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", [{"prompt": "a"}, {"prompt": "a"}, {"prompt": "b"}])
    for size in (2, 3):
        with pytest.raises(DataInvalidError, match=rf"held_out_size is {size}.*2 distinct"):
            load_rows(JsonlSpec(path=path, held_out_size=size))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"sources": [{"data": {"type": "jsonl", "path": "x"}, "weight": float("nan")}]}, "weight"),
        ({"sources": [{"data": {"type": "jsonl", "path": "x"}, "weight": 0}]}, "greater than 0"),
        ({"sources": [{"data": {"type": "jsonl", "path": "x"}, "weight": float("inf")}]}, "finite"),
        ({"sources": []}, "sources"),
        ({"sources": [{"data": {"type": "mixture", "sources": []}}]}, "mixture"),
    ],
)
def test_a_wrong_mixture_is_refused(section, message):
    with pytest.raises(ValidationError, match=message):
        spec_of.validate_python({"type": "mixture", **section})


def test_two_meanings_of_one_column_are_refused():
    with pytest.raises(ValidationError, match="columns prompt, answer all name the column 'text'"):
        JsonlSpec(path="x", columns={"prompt": "text", "answer": "text"})  # type: ignore[arg-type]


def test_held_out_rows_are_either_given_or_drawn():
    with pytest.raises(ValidationError, match="held_out_path is set and held_out_size is 3"):
        JsonlSpec(path=Path("x"), held_out_path=Path("y"), held_out_size=3)
