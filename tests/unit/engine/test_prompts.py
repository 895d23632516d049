"""Prompts by position: pure, disjoint, and loud about what is wrong."""

import datetime
import functools
import json
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rolemesh.engine.data.answers import answer_as_given
from rolemesh.engine.data.prompts import EmptyDataError, PromptRow, PromptSet, load_rows
from rolemesh.engine.specs import JsonlSpec, ParquetSpec, ReasoningGymSpec

SUMS = {
    "task": "basic_arithmetic",
    "config": {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 1,
        "operators": ["+"],
        "allow_parentheses": False,
        "allow_negation": False,
    },
}


class PlainTokenizer:
    """Renders turns as "role: content" lines; one token a character."""

    def apply_chat_template(self, conversation, **kwargs):
        assert kwargs == {"add_generation_prompt": True, "tokenize": False}
        turns = "".join(f"{turn['role']}: {turn['content']}\n" for turn in conversation)
        return turns + "assistant: "

    def __call__(self, text, **kwargs):
        assert kwargs == {"add_special_tokens": False}
        return {"input_ids": [ord(character) for character in text]}


def rows(count):
    return [
        PromptRow(messages=[{"role": "user", "content": f"q{index}"}], answer=str(index))
        for index in range(count)
    ]


def prompt_set(train=10, held_out=3, seed=0):
    return PromptSet(rows(train), rows(held_out), tokenizer=PlainTokenizer(), seed=seed)


def test_each_epoch_shows_every_training_prompt_once_in_an_order_of_its_own():
    prompts = prompt_set(train=10)
    epochs = [[p.prompt_id for p in prompts.slice("train", 10 * e, 10)] for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    # Equal orders by luck: 1 in 10! for each of the three pairs.
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_position_names_the_same_prompt_however_it_is_reached():
    whole = [p.prompt_id for p in prompt_set().slice("train", 0, 25)]
    pieces = prompt_set()
    backwards = [pieces.slice("train", at, 1)[0].prompt_id for at in reversed(range(25))]
    assert backwards[::-1] == whole


def test_another_seed_gives_another_order():
    first = [p.prompt_id for p in prompt_set(seed=1).slice("train", 0, 10)]
    second = [p.prompt_id for p in prompt_set(seed=2).slice("train", 0, 10)]
    assert first != second  # by luck equal: 1 in 10!


def test_the_assistant_prefix_is_the_end_of_the_prompt():
    row = PromptRow(messages=[{"role": "user", "content": "1 + 2"}], assistant_prefix="1 + 2 =")
    prompts = PromptSet([row], [], tokenizer=PlainTokenizer(), seed=0)
    (prompt,) = prompts.slice("train", 0, 1)
    assert prompt.text == "user: 1 + 2\nassistant: 1 + 2 ="
    assert "".join(map(chr, prompt.tokens)) == prompt.text


def test_held_out_prompts_have_ids_of_their_own():
    prompts = prompt_set(train=10, held_out=3)
    assert [p.prompt_id for p in prompts.slice("held_out", 0, 3)] == [10, 11, 12]


@pytest.mark.parametrize(("start", "count"), [(-1, 1), (0, 0)])
def test_a_senseless_range_is_refused(start, count):
    with pytest.raises(ValueError, match=f"start={start}, count={count}"):
        prompt_set().slice("train", start, count)


def test_asking_beyond_the_held_out_split_names_the_remedy():
    with pytest.raises(ValueError, match=r"there are 3.*num_prompts"):
        prompt_set(held_out=3).slice("held_out", 0, 4)


def test_an_empty_split_is_an_error_that_names_the_field():
    with pytest.raises(EmptyDataError, match=r"data\.held_out_size"):
        prompt_set(held_out=0).slice("held_out", 0, 1)


# --- reasoning-gym ------------------------------------------------------------------------


def test_reasoning_gym_held_out_prompts_are_distinct_and_never_trained_on():
    train, held_out = load_rows(ReasoningGymSpec(**SUMS, train_size=200, held_out_size=40))
    asked = [json.loads(row.metadata)["question"] for row in held_out]
    assert Counter(asked).most_common(1)[0][1] == 1
    assert len(asked) == 40
    assert not set(asked) & {json.loads(row.metadata)["question"] for row in train}
    assert len(train) == 200


def test_prompts_that_read_alike_are_alike_whatever_the_task_asked():
    # chain_sum words one sum in several ways; the template shows the sum alone.
    spec = ReasoningGymSpec(
        task="chain_sum",
        config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        train_size=300,
        held_out_size=60,
        question_template="{expression}",
    )
    train, held_out = load_rows(spec)
    asked = [row.messages[-1]["content"] for row in held_out]
    assert len(set(asked)) == 60
    assert not set(asked) & {row.messages[-1]["content"] for row in train}


def test_reasoning_gym_templates_are_filled_from_the_row():
    train, _ = load_rows(
        ReasoningGymSpec(
            **SUMS,
            train_size=1,
            held_out_size=0,
            system_prompt="Add.",
            question_template="{expression} = ?",
            assistant_prefix="{expression} =",
        )
    )
    expression = json.loads(train[0].metadata)["metadata"]["expression"]
    assert train[0].messages == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": f"{expression} = ?"},
    ]
    assert train[0].assistant_prefix == f"{expression} ="
    left, right = expression.split(" + ")
    assert int(train[0].answer) == int(left) + int(right)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "no_such_task"}, r"data\.task is 'no_such_task'"),
        ({"config": {"min_term": 2}}, r"data\.config does not fit.*min_term"),
        ({"question_template": "{expresion}"}, r"question_template.*expression"),
        ({"train_size": 0}, r"no training prompt"),
        ({"held_out_size": 200}, r"lower data\.held_out_size"),
    ],
    ids=["task", "config", "template", "empty", "too-few-distinct"],
)
def test_a_wrong_reasoning_gym_spec_names_the_field(changes, message):
    spec = ReasoningGymSpec(**{**SUMS, "train_size": 5, "held_out_size": 2, **changes})
    with pytest.raises(ValueError, match=message):
        load_rows(spec)


# --- JSON lines ---------------------------------------------------------------------------


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_json_lines_take_text_and_turns(tmp_path):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write_lines(
        tmp_path / "train.jsonl",
        json.dumps({"prompt": "1 + 1?", "answer": 2, "source": "me"}),
        "",
        json.dumps({"prompt": turns}),
    )
    train, held_out = load_rows(JsonlSpec(path=path, system_prompt="Count."))
    assert [list(row.messages) for row in train] == [
        [{"role": "system", "content": "Count."}, {"role": "user", "content": "1 + 1?"}],
        turns,
    ]
    assert train[0].answer == "2"
    assert json.loads(train[0].metadata)["source"] == "me"
    assert held_out == []


def test_a_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "train.jsonl"
    # As Excel and PowerShell write it, with their line ends.
    path.write_text('{"prompt": "a"}\r\n{"prompt": "b"}\r\n', encoding="utf-8-sig", newline="")
    train, _ = load_rows(JsonlSpec(path=path))
    assert [row.messages[0]["content"] for row in train] == ["a", "b"]


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("utf-16", r"data\.path .*train\.jsonl is UTF-16: save it as UTF-8"),
        ("latin-1", r"is not UTF-8 \(invalid start byte at byte 12\): save it as UTF-8"),
    ],
)
def test_text_that_is_no_utf_8_is_refused(tmp_path, encoding, message):
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "\u00fcber"}', encoding=encoding)
    with pytest.raises(ValueError, match=message):
        load_rows(JsonlSpec(path=path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 1: not JSON"),
        ("[" * 100_000, r"line 1: nests too deep to be read: nest less"),
        ('{"question": "x"}', r"line 1: needs an object with the key 'prompt'"),
        ('{"prompt": 7}', r"line 1: 'prompt' must be text or a list"),
        (
            json.dumps(
                {"prompt": "a", "answer": functools.reduce(lambda x, _: [x], range(60), [])}
            ),
            r"line 1: 'answer' nests more than 60 levels",
        ),
        ('{"prompt": "a", "answer": ["\\ud800"]}', r"'answer' has a character .*half of a pair"),
        (
            json.dumps({"prompt": "a", "answer": [1234567] * 10_000}),
            r"its metadata takes \d+ bytes, .* column 'answer'",
        ),
        ('{"prompt": []}', r"line 1: 'prompt' must be text or a list"),
        ("", r"no training prompt"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    path = write_lines(tmp_path / "train.jsonl", line)
    with pytest.raises(ValueError, match=message):
        load_rows(JsonlSpec(path=path))


@pytest.mark.parametrize(
    "answer", [True, False, ["4", "vier", 4], [], {"a": [1.5, None]}, ["\u00e9"]]
)
def test_any_json_value_is_an_answer(tmp_path, answer):
    path = write_lines(
        tmp_path / "train.jsonl",
        json.dumps({"prompt": "2 + 2?", "right": answer, "level": 1}),
        json.dumps({"prompt": "2 + 3?", "right": "5", "level": 1}),
    )
    (row, plain), _ = load_rows(JsonlSpec(path=path, columns={"answer": "right"}))
    assert json.loads(row.answer) == answer
    assert json.loads(row.metadata) == {"level": 1, "answer": answer}
    assert answer_as_given(row.answer, json.loads(row.metadata)) == answer
    assert json.loads(plain.metadata) == {"level": 1}
    # It is a text that only looks like JSON where the metadata has no such value.
    assert answer_as_given(row.answer, {"answer": "other"}) == row.answer


def test_a_column_may_be_a_part_of_an_object(tmp_path):
    record = {"q": {"text": "2 + 2?"}, "a": {"b": {"c": 4}}, "a.b": "whole", "note": {"x": 1}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
    path = write_lines(tmp_path / "a.jsonl", json.dumps(record))
    for kind, place in ((JsonlSpec, path), (ParquetSpec, tmp_path / "a.parquet")):
        columns = {"prompt": "q.text", "answer": "a.b.c"}
        (row,), _ = load_rows(kind(path=place, columns=columns))
        assert (row.messages[0]["content"], row.answer) == ("2 + 2?", "4")
        # The object itself stays metadata.
        assert json.loads(row.metadata) == record
        # Of tables only what is named is read; a column with dots in its name comes first.
        columns = {"prompt": "q.text", "answer": "a.b"}
        (row,), _ = load_rows(kind(path=place, columns=columns, metadata=("note",)))
        assert (row.answer, json.loads(row.metadata)) == ("whole", {"note": {"x": 1}})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"style": "rule"}, r"'m.truth', which data.columns.answer names; its 'm' has style"),
        ("rule", r"its 'm' is no object but str"),
        (None, None),
    ],
)
def test_a_part_that_is_missing_is_named(tmp_path, model, message):
    path = write_lines(tmp_path / "train.jsonl", json.dumps({"prompt": "a", "m": model}))
    spec = JsonlSpec(path=path, columns={"answer": "m.truth"})
    if message is None:
        assert load_rows(spec)[0][0].answer == ""
        return
    with pytest.raises(ValueError, match=message):
        load_rows(spec)


def test_an_answer_does_not_hide_another_column_of_that_name(tmp_path):
    path = write_lines(
        tmp_path / "train.jsonl", json.dumps({"prompt": "a", "right": ["b"], "answer": "c"})
    )
    columns = {"answer": "right"}
    with pytest.raises(
        ValueError, match=r"'right' is no text, .* leave that out of data\.metadata"
    ):
        load_rows(JsonlSpec(path=path, columns=columns))
    (row,), _ = load_rows(JsonlSpec(path=path, columns=columns, metadata=[]))
    assert json.loads(row.metadata) == {"answer": ["b"]}


@pytest.mark.parametrize(
    ("answer", "text", "value"),
    [
        (["4", "vier"], '["4", "vier"]', ["4", "vier"]),
        ({"low": 3, "high": None}, '{"low": 3, "high": null}', {"low": 3, "high": None}),
        ([float("nan")], "[null]", [None]),
        (datetime.date(2020, 1, 2), "2020-01-02", None),
    ],
)
def test_values_of_tables_are_answers_too(tmp_path, answer, text, value):
    table = pyarrow.Table.from_pylist([{"prompt": "a", "answer": answer}])
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    (row,), _ = load_rows(ParquetSpec(path=tmp_path / "train.parquet"))
    assert row.answer == text
    assert json.loads(row.metadata).get("answer") == value


def test_raw_bytes_are_no_answer(tmp_path):
    table = pyarrow.Table.from_pylist([{"prompt": "a", "answer": [b"x"]}])
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    with pytest.raises(ValueError, match=r"'answer': .* raw bytes.*: give text, a number"):
        load_rows(ParquetSpec(path=tmp_path / "train.parquet"))


def test_a_null_answer_is_no_answer_and_separators_stay_inside_strings(tmp_path):
    path = write_lines(tmp_path / "train.jsonl", '{"prompt": "a\u2028b", "answer": null}')
    (row,), _ = load_rows(JsonlSpec(path=path))
    assert row.answer == ""
    assert row.messages[0]["content"] == "a\u2028b"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"data\.path .*absent\.jsonl cannot be read"):
        load_rows(JsonlSpec(path=tmp_path / "absent.jsonl"))


def test_a_held_out_prompt_that_is_trained_on_is_refused(tmp_path):
    path = write_lines(tmp_path / "train.jsonl", '{"prompt": "a"}', '{"prompt": "b"}')
    held_out = write_lines(tmp_path / "held_out.jsonl", '{"prompt": "c"}', '{"prompt": "b"}')
    with pytest.raises(ValueError, match=r"prompt 2 is also a training prompt"):
        load_rows(JsonlSpec(path=path, held_out_path=held_out))
