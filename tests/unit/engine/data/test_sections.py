"""Large data: the same rows in the same order as an eager load, and read only once."""

from __future__ import annotations

import datetime
import errno
import gc
import json
import math
import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from pydantic import TypeAdapter
from support.eager_rows import EagerRows
from support.tiny_models import tiny_tokenizer
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers.utils import chat_template_utils

from rolemesh.engine.data import row_store, sections
from rolemesh.engine.data.prompts import EmptyDataError, PromptSet, load_prompts
from rolemesh.engine.data.reading import parts
from rolemesh.engine.data.rendering.fixed_ends import FixedEnds
from rolemesh.engine.data.rendering.rendering import Renderer
from rolemesh.engine.data.rendering.token_bounds import most_tokens
from rolemesh.engine.data.rendering.tokenizers import load_light_tokenizer
from rolemesh.engine.data.row_store import RowStore
from rolemesh.engine.data.rows import (
    DataInvalidError,
    PromptRow,
    PromptTooLongError,
    RowReader,
)
from rolemesh.engine.data.trajectories import read_trajectories
from rolemesh.engine.specs import DataSpec

TOKENIZER = tiny_tokenizer()
SEED = 7
spec_of: TypeAdapter[Any] = TypeAdapter(DataSpec)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of prompts, preferences and texts; some prompts stand in several rows."""
    folder, draw = tmp_path_factory.mktemp("data"), random.Random(0)

    def prompt() -> Any:
        text = "".join(draw.choices("0123456789 +é€", k=draw.randint(1, 60)))
        turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": text}]
        return draw.choice([text, turns])

    def answered(text: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": text}]

    sums = [{"prompt": prompt(), "answer": at, "level": at % 5} for at in range(300)]
    sums += [{**record, "answer": [1, "one"]} for record in sums[:20]]
    apart = [{"prompt": f"apart {at}", "answer": True, "level": 1} for at in range(9)]
    pairs = [
        {
            "prompt": f"{at} + {at}",
            "chosen": draw.choice([str(2 * at) * draw.randint(1, 40), answered("é" * at)]),
            "rejected": "7" * draw.randint(1, 90),
        }
        for at in range(80)
    ]
    texts = [{"text": "bread " * draw.randint(1, 9)} for _ in range(40)]
    for name, rows in (("sums", sums), ("apart", apart), ("pairs", pairs), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    table = [{**row, "prompt": str(row["prompt"]), "answer": str(row["answer"])} for row in sums]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(table), folder / "sums.parquet", row_group_size=50
    )
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder in which the rows of any data are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sections, "LARGE_BYTES", 0)
    return tmp_path / "cache/rolemesh/rows"


def spec(folder: Path, kind: str) -> Any:
    sums = {"type": "jsonl", "path": folder / "sums.jsonl"}
    mixed = [
        {"data": {**sums, "held_out_size": 15, "max_prompt_tokens": 60}, "weight": 2},
        {"data": {**sums, "path": folder / "apart.jsonl"}},
        {"data": {**sums, "type": "parquet", "path": folder / "sums.parquet"}, "weight": 0.5},
    ]
    kinds: dict[str, dict[str, Any]] = {
        "plain": sums,
        "bounded": {**sums, "max_prompt_tokens": 45, "system_prompt": "Sum.", "held_out_size": 11},
        "held out": {**sums, "held_out_path": folder / "apart.jsonl", "max_prompt_tokens": 40},
        "sorted": {**sums, "curriculum": {"type": "sorted", "by": "level", "ascending": False}},
        "parquet": {**sums, "type": "parquet", "path": folder / "sums.parquet", "metadata": ()},
        "pairs": {**sums, "path": folder / "pairs.jsonl", "max_row_tokens": 90},
        "texts": {**sums, "path": folder / "texts.jsonl", "max_row_tokens": 12},
        "mixture": {"type": "mixture", "sources": mixed, "max_prompt_tokens": 70},
    }
    return spec_of.validate_python(kinds[kind])


def load(data: Any, **others: Any) -> PromptSet:
    return load_prompts(data, tokenizer=TOKENIZER, seed=SEED, **others)


def comparable(rows: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """Without the name of the source's field, which stands in front of each place."""
    return [(index, replace(row, where=row.where.rpartition("/")[2])) for index, row in rows]


@pytest.mark.parametrize(
    "kind", ["plain", "bounded", "held out", "sorted", "parquet", "pairs", "texts", "mixture"]
)
def test_rows_from_memory_a_new_file_and_a_kept_one_are_those_of_an_eager_load(
    kind, folder, cache, monkeypatch
):
    data = spec(folder, kind)
    eager = EagerRows(data, TOKENIZER, SEED)
    count = 2 * len(eager.train) + 5
    # A bound on samples makes prompts measured that no other bound asks about.
    ways = [load(data, max_model_len=None if kind == "texts" else 500) for _ in range(2)]
    assert len(list(cache.glob("*.rows"))) == 1
    monkeypatch.setattr(sections, "LARGE_BYTES", 1 << 30)
    ways.append(load(data))
    for prompts in ways:
        assert comparable(prompts.rows("train", 0, count)) == comparable(eager.first(count))
        if eager.held_out:
            held_out = prompts.rows("held_out", 0, len(eager.held_out))
            places = range(len(eager.train), len(eager.train) + len(eager.held_out))
            expected = list(zip(places, eager.held_out, strict=True))
            assert comparable(held_out) == comparable(expected)
        assert prompts.size("held_out") == len(eager.held_out)
        assert prompts.facts() == ways[0].facts()
    if kind == "pairs":
        read = [read_trajectories(way, "train", 3, 8, "preference") for way in ways]
        assert len({str(one["tokens"].values) for one in read}) == 1


def test_a_second_start_reads_no_row_of_the_data(folder, cache, monkeypatch):
    data, texts = spec(folder, "sorted"), spec(folder, "texts")
    first = load(data, pretraining=texts).slice("train", 0, 9)
    monkeypatch.setattr(RowReader, "read", None)
    # Some are saved with this, and lose it when they are called.
    again = tiny_tokenizer()
    again.backend_tokenizer.enable_truncation(9)
    found = load_prompts(data, tokenizer=again, seed=SEED, pretraining=texts)
    assert found.slice("train", 0, 9) == first
    assert sorted(path.suffix for path in cache.iterdir()) == [".rows", ".rows"]


def test_other_data_another_template_or_another_section_is_read_anew(tmp_path, cache):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1"}\n')
    data = spec_of.validate_python({"type": "jsonl", "path": path})
    assert load(data).slice("train", 0, 1)[0].text.count("1") == 1
    path.write_text('{"prompt": "2"}\n')
    assert "2" in load(data).slice("train", 0, 1)[0].text
    other = tiny_tokenizer()
    other.chat_template = "{{ messages[0]['content'] * 9 }}"
    with pytest.raises(PromptTooLongError, match="the longest 9"):
        load_prompts(data, tokenizer=other, seed=0, max_model_len=9)
    assert (
        load(data.model_copy(update={"assistant_prefix": "="})).slice("train", 0, 1)[0].text[-1]
        == "="
    )


def test_a_kept_file_tells_prompts_that_are_too_long_for_another_sampler(folder, cache):
    data = spec(folder, "plain")
    lengths = [
        len(prompt.tokens) for prompt in load(data, max_model_len=500).slice("train", 0, 320)
    ]
    limit = sorted(lengths)[-4]
    too_long = sum(length >= limit for length in lengths)
    with pytest.raises(PromptTooLongError, match=f"{too_long} of 320 .* longest {max(lengths)}: "):
        load(data, max_model_len=limit)


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "foreign"])
def test_a_damaged_file_is_not_used_and_written_anew(damage, folder, cache, caplog):
    data = spec(folder, "bounded")
    first = load(data).slice("train", 0, 9)
    (kept,) = cache.iterdir()
    content = bytearray(kept.read_bytes())
    content[100] ^= 1
    kept.write_bytes({"flipped": content, "cut": content[:-50]}.get(damage, b""))
    if damage == "foreign":
        load(spec(folder, "pairs"))
        next(path for path in cache.iterdir() if path != kept).replace(kept)
    assert load(data).slice("train", 0, 9) == first
    assert f"{kept} is not used" in caplog.text
    caplog.clear()
    assert load(data).slice("train", 0, 9) == first
    assert not caplog.records


def test_rows_are_read_from_a_file_that_was_removed_and_stay_as_they_were(tmp_path, folder, cache):
    data = spec(folder, "plain")
    prompts, again = load(data), load(data)
    for kept in cache.iterdir():
        kept.unlink()
    assert prompts.slice("train", 0, 9) == again.slice("train", 0, 9)


@pytest.mark.parametrize("fault", ["no folder", "full disk"])
def test_where_rows_cannot_be_kept_they_stay_in_memory(fault, folder, cache, caplog, monkeypatch):
    data = spec(folder, "bounded")
    if fault == "no folder":
        cache.parent.mkdir(parents=True)
        cache.write_text("a file in the way")
    else:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(RowStore, "facts", Mock(side_effect=full))
    expected = EagerRows(data, TOKENIZER, SEED).first(9)
    assert comparable(load(data).rows("train", 0, 9)) == comparable(expected)
    assert f"rows cannot be kept in {cache}" in caplog.text
    assert fault == "no folder" or not list(cache.iterdir())


def test_processes_that_start_together_read_the_data_once(folder, cache, monkeypatch):
    data, read, rows = spec(folder, "plain"), RowReader.read, []

    def noted(reader: RowReader, record: Any, where: str) -> Any:
        rows.append(where)
        return read(reader, record, where)

    monkeypatch.setattr(RowReader, "read", noted)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: load(data).slice("train", 0, 9), range(3)))
    assert found[0] == found[1] == found[2]
    assert len(rows) == 320


def test_what_no_start_used_for_long_is_removed(folder, cache):
    (cache / "draft-of a killed one").mkdir(parents=True)
    (cache / "old.rows").touch()
    (cache / "new.rows").touch()
    for old in ("draft-of a killed one", "old.rows"):
        os.utime(cache / old, (0, 0))
    load(spec(folder, "plain"))
    assert not (cache / "old.rows").exists()
    assert [path.name for path in cache.glob("[!0-9a-f]*")] == ["new.rows"]


def test_nothing_is_kept_of_data_with_a_fault(tmp_path, cache):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1"}\n{"prompt": 2}\n')
    with pytest.raises(DataInvalidError, match="line 2: 'prompt' must be text"):
        load(spec_of.validate_python({"type": "jsonl", "path": path}))
    assert not list(cache.iterdir())


def test_that_all_rows_are_too_long_is_told_with_their_tokens(folder, cache):
    # Their completions are so short that the bound on whole rows needs no count.
    data = spec(folder, "pairs").model_copy(
        update={"max_prompt_tokens": 3, "max_row_tokens": 100_000}
    )
    eager = EagerRows(data.model_copy(update={"max_prompt_tokens": None}), TOKENIZER, SEED)
    renderer = Renderer(TOKENIZER)
    lengths = [
        len(renderer.tokens(renderer.prompt_text(row)))
        + max(len(renderer.completion(row, one).tokens) for one in (row.chosen, row.rejected))
        for row in eager.train
    ]
    with pytest.raises(EmptyDataError, match=f"they have {min(lengths)} to {max(lengths)} tokens"):
        load(data)


# --- several processes ----------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """The tokenizer as it is loaded from a folder, where other processes find it too."""
    TOKENIZER.save_pretrained(tmp_path / "model")
    return load_light_tokenizer(tmp_path / "model")


def test_processes_that_read_a_part_each_find_what_one_finds(
    folder, cache, saved, monkeypatch, caplog
):
    monkeypatch.setattr(parts, "PART_BYTES", 1)
    monkeypatch.setattr(parts.os, "sched_getaffinity", lambda _: range(3))
    data = spec(folder, "bounded")
    eager = EagerRows(data, TOKENIZER, SEED)
    own, count = [], len(eager.train)
    read = RowReader.read

    def counted(reader: RowReader, record: Any, where: str) -> Any:
        own.append(where)
        return read(reader, record, where)

    monkeypatch.setattr(RowReader, "read", counted)
    for _ in ("read", "kept"):
        prompts = load_prompts(data, tokenizer=saved, seed=SEED)
        assert comparable(prompts.rows("train", 0, count)) == comparable(eager.first(count))
    # The first of three parts, and of this small file a third more.
    num_lines = data.path.read_text().count("\n")
    assert num_lines // 3 < len(own) < num_lines * 2 // 3
    assert not caplog.records
    assert [path.suffix for path in cache.iterdir()] == [".rows"]


def test_what_a_process_cannot_do_one_does_alone(folder, cache, saved, monkeypatch, caplog):
    monkeypatch.setattr(parts, "PART_BYTES", 1)
    monkeypatch.setattr(parts.os, "sched_getaffinity", lambda _: range(2))
    # They would render otherwise, with what they find in the folder.
    saved.chat_template = "{{ messages[-1]['content'] }}="
    data = spec(folder, "pairs")
    prompts = load_prompts(data, tokenizer=saved, seed=SEED)
    eager = EagerRows(data, saved, SEED)
    # What it had read when the other one failed is not read again.
    count = len(eager.train)
    assert comparable(prompts.rows("train", 0, count)) == comparable(eager.first(count))
    assert prompts.slice("train", 0, 1)[0].text.endswith("=")
    assert "a process that read a part of" in caplog.text


def test_a_fault_that_another_process_finds_is_told_as_ever(tmp_path, cache, saved, monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", 1)
    monkeypatch.setattr(parts.os, "sched_getaffinity", lambda _: range(2))
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1"}\n' * 9 + '{"prompt": 2}\n' * 3)
    with pytest.raises(DataInvalidError, match="line 10: 'prompt' must be text"):
        load_prompts(
            spec_of.validate_python({"type": "jsonl", "path": path}), tokenizer=saved, seed=SEED
        )
    assert not list(cache.iterdir())


def test_templates_of_many_rows_are_rendered_without_their_chain_of_globals(saved):
    row = PromptRow(messages=[{"role": "user", "content": "1+1"}])
    # One that looks at contents, of which each row is rendered.
    saved.chat_template = "{{ messages[0]['content'] | upper }}"
    texts = Renderer(saved).prompt_texts([row, row])
    # If this fails, the transformers library keeps what it compiled elsewhere: see _quicken.
    compiled = chat_template_utils._compile_jinja_template(saved.chat_template)
    assert type(compiled.globals) is dict
    assert texts == [Renderer(saved).prompt_text(row)] * 2


@settings(deadline=None)
@given(text=st.text(), at=st.integers(0, 7))
def test_rows_are_kept_as_the_same_bytes_whatever_writes_them(text, at):
    odd = [text, "\ud800", 2.5e20, math.inf, 2**70, None, [text, {"a": 1.0}], datetime.date.min]
    turn = {"role": "user", "content": text, "other": odd[at]}
    answer = [{"role": "assistant", "content": text, "other": odd[-at]}]
    row = PromptRow(messages=[turn], answer=text, completion=answer, chosen=text, is_wanted=True)
    names = ("messages", "assistant_prefix", "answer", "metadata", "completion", "chosen")
    names += ("rejected", "is_wanted", "text", "max_text_tokens", "where")
    values = [getattr(row, name) for name in names]
    expected = json.dumps(values, ensure_ascii=False, separators=(",", ":"), default=str)
    assert row_store._encoded(row) == expected.encode("utf-8", "surrogatepass")


def test_a_fault_leaves_pythons_collector_as_it_was(tmp_path):
    before = gc.get_threshold()
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": 2}\n')
    with pytest.raises(DataInvalidError):
        load(spec_of.validate_python({"type": "jsonl", "path": path}))
    assert gc.get_threshold() == before


@pytest.mark.parametrize("text", ["a\n\nbb\nccc\n", "a", "\n" * 7, "long" * 9 + "\na\nb"])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_parts_of_a_file_are_whole_lines_with_their_numbers(text, count, tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text(text)
    found = parts._split(path, len(text), count)
    assert found[0].start == 0
    assert [one.end for one in found] == [*(one.start for one in found[1:]), len(text)]
    for one in found:
        assert one.first == 1 + text[: one.start].count("\n")
        assert one.start == 0 or text[one.start - 1] == "\n"


# --- bounds from bytes ----------------------------------------------------------------------


class Fast:
    """A tokenizer in the place where the transformers library has it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.backend_tokenizer = tokenizer

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        ids = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return {"input_ids": ids}


def bpe(normalizer: Any = None, pre_tokenizer: Any = None, added: Sequence[Any] = ()) -> Fast:
    """A small BPE tokenizer, to which the special token <s> and others were added."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    tokenizer.train_from_iterator(["the cat and the hat"], trainer)
    tokenizer.add_special_tokens(list(added))
    return Fast(tokenizer)


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["none", "nfc"])
def test_no_text_has_more_tokens_than_its_bytes_tell(normalizer):
    fast = bpe(normalizer)
    bound = most_tokens(fast)
    assert bound is not None

    @settings(max_examples=200, deadline=None)
    # The last three grow threefold in NFC.
    @given(
        st.text(
            st.one_of(st.characters(codec="utf-8"), st.sampled_from("<s> \u0958\ufb2c\U0001d160"))
        )
    )
    def check(text: str) -> None:
        tokens = fast.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert len(tokens) <= bound(text)

    check()


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["none", "nfc"])
@pytest.mark.parametrize(
    "others",
    [[], ["<s><s>"], ["x<s"], ["<a"], [AddedToken("<m>", lstrip=True)]],
    ids=["alone", "containing", "reaching in", "beginning", "with space"],
)
def test_what_prompts_have_in_common_is_encoded_once_and_counts_the_same(normalizer, others):
    fast = bpe(normalizer, added=["<a>", *others])
    parts = st.sampled_from(["<s>", "<a>", "<a", "x", "<", "s>", "the cat", " ", "é", "\u0958"])
    text = st.lists(parts, max_size=5).map("".join)

    @settings(max_examples=150, deadline=None)
    @given(text, st.lists(text, min_size=1, max_size=4), text)
    def check(head: str, middles: list[str], tail: str) -> None:
        texts = [head + middle + tail for middle in middles]
        lengths = [len(fast.backend_tokenizer.encode(one).ids) for one in texts]
        assert Renderer(fast).lengths_over(texts, 0) == lengths
        # A bound is one, from above.
        found = Renderer(fast).lengths_over(texts, 12)
        assert all(
            one == length or (one <= 0 and length <= -one <= 12)
            for one, length in zip(found, lengths, strict=True)
        )

    check()


def test_the_common_ends_are_those_of_turns():
    fast = bpe(added=["<e>"])
    texts = ["<s>the<s>cat 1<e><s>", "<s>the<s>hat<e><s>"]
    assert FixedEnds(fast).of(texts) == ("<s>the<s>", "<e><s>")
    # It cuts at <s> no longer where <s>t is.
    assert FixedEnds(bpe(added=["<e>", "<s>t"])).of(texts) == ("<s>t", "<e><s>")


@pytest.mark.parametrize(
    "fast",
    [
        object(),
        bpe(normalizers.NFKC()),
        bpe(normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("_")])),
        bpe(None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
        bpe(None, pre_tokenizers.Metaspace()),
    ],
    ids=["no backend", "nfkc", "prepended", "prefix space", "metaspace"],
)
def test_nothing_is_told_of_tokenizers_that_may_make_more_tokens_than_bytes(fast):
    assert most_tokens(fast) is None
