"""Finds out what a data file is: python -m rolemesh.services.preview.guess < QUESTION.

QUESTION is a `Question` in JSON. Prints one JSON object: a `Guess`, or {"error": text}.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import tempfile
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
from pydantic import TypeAdapter

from rolemesh.engine import nested
from rolemesh.engine.data.files import jsonl
from rolemesh.engine.data.reading.filtering import long_prompts
from rolemesh.engine.data.rendering.rendering import Renderer
from rolemesh.engine.data.rendering.tokenizers import load_light_tokenizer
from rolemesh.engine.data.row_store import UNMEASURED, Rows, RowStore
from rolemesh.engine.data.rows import DataInvalidError, PromptRow
from rolemesh.engine.data.sections import LARGE_BYTES, check_not_empty
from rolemesh.engine.data.sources import Intake, draw_held_out, files_of, load_sources
from rolemesh.engine.specs import (
    HELD_OUT_SPLITS,
    DataSpec,
    HfDatasetSpec,
    Spec,
    StoredRowsSpec,
)

PROMPT_NAMES = ("prompt", "question", "problem", "instruction", "query", "input")
CONVERSATION_NAMES = ("messages", "conversation", "conversations")
ANSWER_NAMES = (
    *("answer", "solution", "expected_answer", "ground_truth", "reference_answer", "target"),
    *("expected", "label", "output", "response", "completion"),
)
"""Columns that are taken without asking, the likeliest first; in any case of letters."""

_VERL_ANSWER = "reward_model.ground_truth"
"""Where data for verl has the answer: what its rewards are given, whatever else a row has."""

_MOST_HELD_OUT = 128

_MEASURED = 5000
"""Of more than twice as many prompts, the tokens of the largest so many are counted, and of so many
from all over."""

_LOOKED_AT = 100
"""Records of which the columns are looked at. All are read later, and checked."""

_DATA: TypeAdapter[DataSpec] = TypeAdapter(DataSpec)


_Record = tuple[Mapping[str, Any], str]
"""Values by column, and their place for messages."""


class Question(Spec):
    """What to look at."""

    path: Path
    """File or folder of the data."""
    model: Path
    """Folder with the policy's tokenizer."""
    prompt: str | None = None
    """Column of the prompt; None: to be found."""
    answer: str | None = None
    """Column of the expected answer; None: to be found."""
    split: str | None = None
    """Split of the training rows, with none held out beside it; None: to be found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Guess:
    """What the data is."""

    data: Mapping[str, Any]
    """Section `data` of a recipe, without `held_out_size`."""
    prompt: str
    """Column of the prompt."""
    answer: str | None
    """Column of the expected answer; None: there is none."""
    others: Sequence[str]
    """Columns that become metadata."""
    num_rows: int
    """Training rows, with those that held_out_size takes."""
    num_distinct: int
    """Distinct prompts among them."""
    held_out_size: int
    """Prompts to hold out of them, so that some are left to compare with; 0 where a split is held
    out."""
    train_lengths: Sequence[int]
    """Tokens of rendered prompts that are left to train on, the longest first."""
    held_out_lengths: Sequence[int]
    """Tokens of rendered prompts that are held out, the longest first."""
    num_unmeasured: int
    """Prompts in neither list, where there are many; those with most characters are in them."""


def guess(question: Question) -> Guess:
    """Finds out format and columns, and reads all rows with them.

    Raises:
        ValueError: It is no data, or a column cannot be told; the text says what to give.
    """
    if question.split is None:
        source = _source(question.path)
    else:
        given = {"path": str(question.path), "split": question.split}
        source = {"type": "hf_dataset", **given}
    records = _some_records(source)
    if not records:
        raise DataInvalidError(f"--from {question.path} holds no row: give data with at least one")
    columns = _columns(records)
    prompt, meaning = _prompt_column(columns, records, question)
    answer = _answer_column(columns, records, question, prompt)
    named = {meaning: prompt} | ({} if answer is None else {"answer": answer})
    # A column that is called like its meaning is taken without being named.
    told = {meaning: column for meaning, column in named.items() if meaning != column}
    data = {**source, **({"columns": told} if told else {})}
    spec = _DATA.validate_python(data)
    assert isinstance(spec, StoredRowsSpec)
    is_large = sum(file.stat().st_size for file in files_of(spec)) >= LARGE_BYTES
    with tempfile.TemporaryFile() if is_large else contextlib.nullcontext() as file:
        rows, held_out, sizes = _all_rows(spec, RowStore(file))
        num_distinct = len(set(rows.identities()))
        is_given = spec.held_out_field() is not None
        held_out_size = 0 if is_given else min(_MOST_HELD_OUT, num_distinct // 10)
        train = rows
        if held_out_size:
            drawn = spec.model_copy(update={"held_out_size": held_out_size})
            train, held_out = draw_held_out(rows, drawn, "data")
        renderer = Renderer(load_light_tokenizer(question.model))
        some, some_held_out = _measured(train, sizes), _measured(held_out, sizes)
        return Guess(
            data=data,
            prompt=prompt,
            answer=answer,
            others=[name for name in columns if name not in (prompt, answer)],
            num_rows=len(rows),
            num_distinct=num_distinct,
            num_unmeasured=len(train) - len(some) + len(held_out) - len(some_held_out),
            held_out_size=held_out_size,
            train_lengths=[length for length, _ in long_prompts(some, renderer, 0)],
            held_out_lengths=[length for length, _ in long_prompts(some_held_out, renderer, 0)],
        )


def _all_rows(spec: DataSpec, store: RowStore) -> tuple[Rows, Rows, array[int]]:
    """Training and held-out rows, and for each row of the store the characters of its prompt."""
    sizes = array("q")

    def note_sizes(rows: Sequence[PromptRow]) -> list[tuple[int, int, bool]]:
        sizes.extend(sum(len(turn["content"]) for turn in row.messages) for row in rows)
        return [(UNMEASURED, UNMEASURED, True)] * len(rows)

    intake = Intake(store=store, measure=note_sizes)
    (source,) = load_sources(spec, "data", lambda _: intake)
    check_not_empty(source)
    return source.train, source.held_out, sizes


def _measured(rows: Rows, sizes: array[int]) -> Rows:
    """The rows of which the tokens are counted: all, or of many the largest and some others."""
    if len(rows) <= 2 * _MEASURED:
        return rows
    largest = numpy.argsort(numpy.array(sizes)[rows.numbers], kind="stable")[-_MEASURED:]
    others = numpy.linspace(0, len(rows) - 1, _MEASURED, dtype=numpy.int64)
    return rows.where(numpy.union1d(largest, others))


def _source(path: Path) -> dict[str, Any]:
    """The data section that reads a path, without columns."""
    if path.is_file():
        if path.suffix in (".parquet", ".pq"):
            return {"type": "parquet", "path": str(path)}
        if path.suffix in (".jsonl", ".ndjson", ".json"):
            return {"type": "jsonl", "path": str(path)}
        raise DataInvalidError(
            f"--from {path} ends in {path.suffix or 'nothing'}: give a .jsonl file (one JSON "
            "object a line), a .parquet file, or the folder of a Hugging Face data set"
        )
    if (path / "state.json").is_file():
        return {"type": "hf_dataset", "path": str(path)}
    splits = _splits(path)
    if not splits:
        files = sorted(path.rglob("*.parquet"))
        if files:
            return {"type": "parquet", "path": str(path)}
        raise DataInvalidError(
            f"--from {path} holds neither a saved Hugging Face data set nor .parquet files: give "
            "the folder that save_to_disk wrote, or a file"
        )
    if "train" not in splits:
        raise DataInvalidError(
            f"--from {path} has no split 'train'; it has {', '.join(splits)}: give a folder with "
            "one, or write the data section yourself (docs/data.md)"
        )
    held_out = next((name for name in HELD_OUT_SPLITS if name in splits), None)
    found = {"type": "hf_dataset", "path": str(path)}
    return found if held_out is None else {**found, "held_out_split": held_out}


def _splits(path: Path) -> list[str]:
    """Splits of a folder that the data sets library wrote, or of a copy of a repository."""
    if (path / "dataset_dict.json").is_file():
        try:
            return [
                str(name) for name in json.loads((path / "dataset_dict.json").read_text())["splits"]
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataInvalidError(
                f"--from {path}: dataset_dict.json cannot be read ({error!r}): save it again"
            ) from error
    splits = ("train", *HELD_OUT_SPLITS)
    files = list(path.rglob("*.parquet"))
    return [
        name
        for name in splits
        if any(
            file.stem == name or file.stem.startswith(f"{name}-") or file.parent.name == name
            for file in files
        )
    ]


def _some_records(source: Mapping[str, Any]) -> list[_Record]:
    """The first records, each with its place."""
    every: Callable[[Sequence[str]], list[str]] = list
    path = Path(source["path"])
    if source["type"] == "jsonl":
        found = jsonl.records(path, "--from")
    else:
        from rolemesh.engine.data.files import tables

        if source["type"] == "parquet":
            found = tables.parquet_records(path, "--from", every)
        else:
            split = source.get("split", "train")
            found = tables.hf_records(HfDatasetSpec(path=path), split, "--from", every)
    records = []
    for record, where in itertools.islice(found, _LOOKED_AT):
        if not isinstance(record, Mapping):
            raise DataInvalidError(
                f"{where}: is no object but a {type(record).__name__}: give one JSON object a line"
            )
        records.append((record, where))
    return records


def _columns(records: Sequence[_Record]) -> list[str]:
    return list(dict.fromkeys(name for record, _ in records for name in record))


def _prompt_column(
    columns: Sequence[str], records: Sequence[_Record], question: Question
) -> tuple[str, str]:
    """The column of the prompt, and whether it is a "prompt" or "messages", a conversation."""
    if question.prompt is not None:
        _check_there(question.prompt, columns, records, "--prompt")
        return question.prompt, _meaning(question.prompt, records)
    usable = [
        column for column in columns if all(_is_prompt(record.get(column)) for record, _ in records)
    ]
    for names, meaning in ((PROMPT_NAMES, "prompt"), (CONVERSATION_NAMES, "messages")):
        for column in _called(names, columns):
            if column in usable:
                return column, "messages" if meaning == "messages" else _meaning(column, records)
    for column in _called((*PROMPT_NAMES, *CONVERSATION_NAMES), columns):
        if any(_is_prompt(record.get(column)) for record, _ in records):
            _refuse_gap(column, records)
    # Only a column that is called like something else than a prompt can be meant now.
    usable = [column for column in usable if column not in _called(ANSWER_NAMES, columns)]
    if len(usable) == 1:
        return usable[0], _meaning(usable[0], records)
    raise DataInvalidError(
        f"--from {question.path}: which column is the prompt cannot be told from "
        f"{', '.join(columns)}: name it with --prompt COLUMN"
    )


def _refuse_gap(column: str, records: Sequence[_Record]) -> None:
    """Refuses the first record in which a column is no prompt, since it is one in others."""
    record, where = next(one for one in records if not _is_prompt(one[0].get(column)))
    found = (
        f"its {column!r} is neither text nor a list of turns"
        if record.get(column) is not None
        else f"has no {column!r}, the prompt of other rows; it has {', '.join(record) or 'nothing'}"
    )
    raise DataInvalidError(
        f"{where}: {found}: give all rows the same columns, or name the column of the prompt with "
        "--prompt COLUMN"
    )


def _meaning(column: str, records: Sequence[_Record]) -> str:
    """A list of turns that an assistant ends is a conversation; anything else is a prompt."""
    value = nested.value_of(records[0][0], column)
    if isinstance(value, list) and _are_turns(value) and value[-1]["role"] == "assistant":
        return "messages"
    return "prompt"


def _answer_column(
    columns: Sequence[str], records: Sequence[_Record], question: Question, prompt: str
) -> str | None:
    if question.answer is not None:
        _check_there(question.answer, columns, records, "--answer")
        return question.answer
    called = [column for column in _called(ANSWER_NAMES, columns) if column != prompt]
    if any(nested.value_of(record, _VERL_ANSWER) is not None for record, _ in records):
        called.insert(0, _VERL_ANSWER)
    for column in called:
        if not all(_is_answer(nested.value_of(record, column)) for record, _ in records):
            continue
        for record, where in records:
            other = next((name for name in called if not nested.lacking(record, name)), column)
            if nested.lacking(record, column) and other != column:
                raise DataInvalidError(
                    f"{where}: has no {column!r}, the expected answer of other rows, but "
                    f"{other!r}: give all rows the same columns, or name the column of the answer "
                    "with --answer COLUMN"
                )
        return column
    return None


def _called(names: Sequence[str], columns: Sequence[str]) -> list[str]:
    by_name = {column.lower(): column for column in reversed(columns)}
    return [by_name[name] for name in names if name in by_name]


def _check_there(
    column: str, columns: Sequence[str], records: Sequence[_Record], option: str
) -> None:
    if all(nested.lacking(record, column) for record, _ in records):
        raise DataInvalidError(
            f"{option} is {column!r}, which the data does not have; it has {', '.join(columns)}"
        )


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or _are_turns(value)


def _is_answer(value: Any) -> bool:
    # Turns are a given completion, which is compared with nothing.
    return not _are_turns(value)


def _are_turns(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(turn, Mapping)
            and isinstance(turn.get("role"), str)
            and isinstance(turn.get("content"), str)
            for turn in value
        )
    )


def main() -> int:
    """Reads the question, and prints the guess."""
    question = Question.model_validate_json(sys.stdin.read())
    try:
        answer: dict[str, Any] = asdict(guess(question))
    except ModuleNotFoundError as error:
        answer = {"missing": error.name}
    except ValueError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
