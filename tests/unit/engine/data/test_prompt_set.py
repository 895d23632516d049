"""A set of prompts: bounds on length, curricula, pretraining rows; all pure in the position."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from support.tiny_models import tiny_tokenizer

from rolemesh.engine.data.prompts import EmptyDataError, PromptSet, load_prompts
from rolemesh.engine.data.rows import DataInvalidError, PromptTooLongError
from rolemesh.engine.specs import DataSpec, JsonlSpec, MixtureSpec

TOKENIZER = tiny_tokenizer()
spec_of: TypeAdapter[Any] = TypeAdapter(DataSpec)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, count in (("one", 7), ("two", 4), ("three", 3)):
        write_lines(folder / f"{name}.jsonl", [{"prompt": f"{name} {at}"} for at in range(count)])
    return folder


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def load(spec: Any, *, seed: int = 0, **others: Any) -> PromptSet:
    return load_prompts(spec, tokenizer=TOKENIZER, seed=seed, **others)


def mixture(folder: Path, **fields: Any) -> MixtureSpec:
    sources = [
        {"data": {"type": "jsonl", "path": folder / "one.jsonl", "held_out_size": 2}, "weight": 3},
        {"data": {"type": "jsonl", "path": folder / "two.jsonl", "held_out_size": 1}},
        {"data": {"type": "jsonl", "path": folder / "three.jsonl"}, "weight": 0.5},
    ]
    spec: MixtureSpec = spec_of.validate_python({"type": "mixture", "sources": sources, **fields})
    return spec


def contents(prompts: PromptSet, split: Any, start: int, count: int) -> list[str]:
    return [row.messages[-1]["content"] for _, row in prompts.rows(split, start, count)]


# --- mixtures -----------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**53 - 1),
    start=st.integers(0, 10**9),
    cuts=st.lists(st.integers(1, 12), min_size=1, max_size=4),
)
def test_a_run_that_resumes_at_a_position_sees_what_it_would_have_seen(folder, seed, start, cuts):
    spec = mixture(folder)
    whole = [prompt.prompt_id for prompt in load(spec, seed=seed).slice("train", start, sum(cuts))]
    resumed, at = [], start
    for cut in cuts:
        resumed += [prompt.prompt_id for prompt in load(spec, seed=seed).slice("train", at, cut)]
        at += cut
    assert resumed == whole


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**53 - 1), start=st.integers(0, 10**9))
def test_no_held_out_prompt_is_ever_a_training_prompt(folder, seed, start):
    prompts = load(mixture(folder), seed=seed)
    held_out = {prompt.text for prompt in prompts.slice("held_out", 0, prompts.size("held_out"))}
    assert len(held_out) == 3
    assert not held_out & {prompt.text for prompt in prompts.slice("train", start, 64)}


def test_held_out_rows_of_a_mixture_stand_in_the_order_of_its_sources(folder):
    prompts = load(mixture(folder))
    assert prompts.size("train") == 5 + 3 + 3
    names = [text.split()[0] for text in contents(prompts, "held_out", 0, 3)]
    assert names == ["one", "one", "two"]
    assert [index for index, _ in prompts.rows("held_out", 0, 3)] == [11, 12, 13]


def test_each_source_of_a_mixture_runs_through_epochs_of_its_own(folder):
    prompts = load(mixture(folder))
    seen: dict[str, list[str]] = {"one": [], "two": [], "three": []}
    for text in contents(prompts, "train", 0, 450):
        seen[text.split()[0]].append(text)
    # 3 : 1 : 0.5 of 450; exact shares, at most one draw off at the end.
    assert [len(seen[name]) for name in seen] == pytest.approx([300, 100, 50], abs=2)
    for name, size in (("one", 5), ("two", 3), ("three", 3)):
        for epoch in range(len(seen[name]) // size):
            assert len(set(seen[name][size * epoch : size * epoch + size])) == size


# --- bounds on length ---------------------------------------------------------------------


def rows_of_lengths(path: Path, lengths: list[int]) -> Path:
    """Digits are one token each, so that a prompt has its length and the template's tokens."""
    return write_lines(path, [{"prompt": "7" * length} for length in lengths])


def template_tokens() -> int:
    rendered = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": ""}], add_generation_prompt=True, tokenize=False
    )
    return len(TOKENIZER(rendered, add_special_tokens=False)["input_ids"])


def test_prompts_over_the_bound_are_left_out_of_both_splits_and_counted(tmp_path):
    bound = template_tokens() + 20
    spec = JsonlSpec(
        path=rows_of_lengths(tmp_path / "train.jsonl", [19, 20, 21, 50, 3]),
        held_out_path=rows_of_lengths(tmp_path / "held_out.jsonl", [18, 30]),
        max_prompt_tokens=bound,
    )
    prompts = load(spec)
    assert prompts.num_filtered == {"train": 2, "held_out": 1, "pretraining": 0}
    assert prompts.facts() == {
        "data.train_prompts": "3",
        "data.held_out_prompts": "1",
        "data.filtered_prompts": "3",
    }
    # Two epochs hold what fits and nothing else: rows left out take no position.
    lengths = [len(prompt.tokens) for prompt in prompts.slice("train", 0, 6)]
    assert sorted(lengths) == sorted(2 * [bound - 1, bound, bound - 17])


def test_the_tighter_of_a_mixture_and_its_source_bounds(tmp_path):
    fixed = template_tokens()
    paths = [rows_of_lengths(tmp_path / f"{at}.jsonl", [5, 10, 15]) for at in range(2)]
    prompts = load(
        spec_of.validate_python(
            {
                "type": "mixture",
                "max_prompt_tokens": fixed + 12,
                "sources": [
                    {"data": {"type": "jsonl", "path": paths[0], "max_prompt_tokens": fixed + 7}},
                    {"data": {"type": "jsonl", "path": paths[1], "system_prompt": None}},
                ],
            }
        )
    )
    assert prompts.num_filtered["train"] == 2 + 1


def test_the_bound_on_whole_rows_takes_the_longest_completion(tmp_path):
    pairs = [("1", "22"), ("1", "22222"), ("11111", "2")]
    records = [{"prompt": "7", "chosen": one, "rejected": other} for one, other in pairs]
    path = write_lines(tmp_path / "x.jsonl", records)
    fits = template_tokens() + 1 + 2 + 1  # prompt, two digits, the end of the turn
    prompts = load(JsonlSpec(path=path, max_row_tokens=fits))
    assert (prompts.size("train"), prompts.num_filtered["train"]) == (1, 2)
    assert load(JsonlSpec(path=path, max_row_tokens=fits - 1 + 4)).size("train") == 3


def test_when_nothing_fits_the_error_says_how_long_the_prompts_are(tmp_path):
    fixed = template_tokens()
    path = rows_of_lengths(tmp_path / "x.jsonl", [9, 30])
    message = rf"all?.*2 training rows.*max_prompt_tokens 5.* {fixed + 9} to {fixed + 30} tokens"
    with pytest.raises(EmptyDataError, match=message.removeprefix("all?.*")):
        load(JsonlSpec(path=path, max_prompt_tokens=5))


def test_more_rows_than_are_tokenised_at_once_are_all_measured(tmp_path):
    lengths = [at % 40 for at in range(2500)]
    path = rows_of_lengths(tmp_path / "x.jsonl", lengths)
    prompts = load(JsonlSpec(path=path, max_prompt_tokens=template_tokens() + 29))
    assert prompts.num_filtered["train"] == sum(length > 29 for length in lengths)


def test_turns_that_the_template_refuses_are_named_with_their_row(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system turns here') }}"
    path = write_lines(tmp_path / "x.jsonl", [{"prompt": "a"}])
    with pytest.raises(DataInvalidError, match=r"line 1: the chat template refuses.*no system"):
        load_prompts(JsonlSpec(path=path, max_prompt_tokens=9), tokenizer=tokenizer, seed=0)


# --- room for a completion -------------------------------------------------------------------


def test_prompts_without_room_for_a_completion_are_refused_at_the_start(tmp_path):
    fixed = template_tokens()
    path = rows_of_lengths(tmp_path / "x.jsonl", [9, 30, 20])
    longest = fixed + 30
    load(JsonlSpec(path=path), max_model_len=longest + 1)
    message = (
        rf"^2 of 3 prompts have {fixed + 20} tokens or more \(the longest {longest}: .*line 2\), "
        rf"but rollout.max_model_len is {fixed + 20} .*data.max_prompt_tokens"
    )
    with pytest.raises(PromptTooLongError, match=message):
        load(JsonlSpec(path=path), max_model_len=fixed + 20)


def test_held_out_prompts_need_room_too(tmp_path):
    path = rows_of_lengths(tmp_path / "x.jsonl", [1])
    long = rows_of_lengths(tmp_path / "long.jsonl", [300])
    with pytest.raises(PromptTooLongError, match=r"1 of 2 prompts"):
        load(JsonlSpec(path=path, held_out_path=long), max_model_len=template_tokens() + 20)


def test_a_bound_leaves_them_out_instead(tmp_path):
    limit = template_tokens() + 20
    path = rows_of_lengths(tmp_path / "x.jsonl", [9, 30, 20])
    prompts = load(JsonlSpec(path=path, max_prompt_tokens=limit - 1), max_model_len=limit)
    assert prompts.facts()["data.filtered_prompts"] == "2"
    # A bound that leaves too little room does not hide them.
    with pytest.raises(PromptTooLongError):
        load(JsonlSpec(path=path, max_prompt_tokens=limit), max_model_len=limit)


def test_data_that_are_not_sampled_have_no_such_bound(tmp_path):
    path = rows_of_lengths(tmp_path / "x.jsonl", [5000])
    assert load(JsonlSpec(path=path)).size("train") == 1


@pytest.mark.parametrize("held_out_size", [0, 8])
def test_an_empty_file_is_named_as_such(held_out_size, tmp_path):
    path = write_lines(tmp_path / "empty.jsonl", [])
    with pytest.raises(
        EmptyDataError, match=r"data.path is '.*empty.jsonl', which holds no training prompt"
    ):
        load(JsonlSpec(path=path, held_out_size=held_out_size))


# --- curricula ----------------------------------------------------------------------------


def graded(tmp_path: Path, grades: list[Any]) -> Path:
    records = [{"prompt": f"q{at}", "grade": {"level": g}} for at, g in enumerate(grades)]
    return write_lines(tmp_path / "graded.jsonl", records)


def by_level(path: Path, **fields: Any) -> JsonlSpec:
    curriculum = {"type": "sorted", "by": "grade.level", **fields}
    spec: JsonlSpec = spec_of.validate_python(
        {"type": "jsonl", "path": path, "curriculum": curriculum}
    )
    return spec


@pytest.mark.parametrize("ascending", [True, False])
def test_a_sorted_curriculum_goes_by_the_metadata_and_shuffles_ties(ascending, tmp_path):
    grades = [2, 1, 3, 1, 2, 3] * 4
    prompts = load(by_level(graded(tmp_path, grades), ascending=ascending))
    epochs = []
    for epoch in range(3):
        rows = [index for index, _ in prompts.rows("train", epoch * 24, 24)]
        assert [grades[row] for row in rows] == sorted(grades, reverse=not ascending)
        assert sorted(rows) == list(range(24))
        epochs.append(tuple(rows))
    # Equal by luck: (8!) ** -3 for each of three pairs.
    assert len(set(epochs)) == 3


@pytest.mark.parametrize(
    ("grades", "message"),
    [
        ([1, "hard"], r"curriculum\.by is 'grade\.level', which is a number in some rows and text"),
        ([1, None], r"is None in .*line 2: only numbers and texts have an order"),
        ([1, True], r"is True in .*line 2"),
    ],
)
def test_values_without_a_common_order_are_refused(grades, message, tmp_path):
    with pytest.raises(DataInvalidError, match=message):
        load(by_level(graded(tmp_path, grades)))


def test_a_key_that_no_metadata_has_is_named(tmp_path):
    path = graded(tmp_path, [1])
    with pytest.raises(DataInvalidError, match=r"line 1 has no 'depth'; it has level"):
        load(by_level(path, by="grade.depth"))


HOOK = """
    def backwards(metadata, epoch, seed):
        order = sorted(range(len(metadata)), key=lambda row: -metadata[row]["grade"]["level"])
        return order if epoch % 2 == 0 else order[::-1]

    def seeded(metadata, epoch, seed):
        return [(row + seed + epoch) % len(metadata) for row in range(len(metadata))]

    def twice(metadata, epoch, seed):
        return [0] * len(metadata)

    def failing(metadata, epoch, seed):
        return metadata[0]["absent"]

    number = 3
"""


def hooked(tmp_path: Path, name: str, grades: list[int], module: str | None = None) -> JsonlSpec:
    hook = tmp_path / "hook_of_mine.py"
    hook.write_text(textwrap.dedent(HOOK))
    spec: JsonlSpec = spec_of.validate_python(
        {
            "type": "jsonl",
            "path": graded(tmp_path, grades),
            "curriculum": {"type": "python", "function": f"{module or hook}:{name}"},
        }
    )
    return spec


def test_a_function_of_the_user_orders_each_epoch(tmp_path):
    prompts = load(hooked(tmp_path, "backwards", [1, 3, 2]))
    assert [index for index, _ in prompts.rows("train", 0, 6)] == [1, 2, 0, 0, 2, 1]
    assert [index for index, _ in prompts.rows("train", 4, 1)] == [2]


def test_a_function_knows_the_seed_of_the_run(tmp_path):
    prompts = load(hooked(tmp_path, "seeded", [0, 0, 0]), seed=2)
    assert [index for index, _ in prompts.rows("train", 0, 6)] == [2, 0, 1, 0, 1, 2]


def test_a_function_may_stand_in_a_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    prompts = load(hooked(tmp_path, "backwards", [1, 3, 2], module="hook_of_mine"))
    assert [index for index, _ in prompts.rows("train", 0, 3)] == [1, 2, 0]


@pytest.mark.parametrize(
    ("name", "module", "message"),
    [
        ("twice", None, r"curriculum\.function .*epoch 0.*return a permutation"),
        ("failing", None, r"failed for epoch 0: KeyError: 'absent'"),
        ("number", None, r"'.*:number', which is no function"),
        ("absent", None, r"has no 'absent'"),
        ("backwards", "no_such_module_here", r"cannot be loaded \(ModuleNotFoundError"),
        ("backwards", "/no/such/file.py", r"cannot be loaded \(FileNotFoundError"),
    ],
)
def test_a_function_that_gives_no_order_fails_at_the_start(name, module, message, tmp_path):
    with pytest.raises(DataInvalidError, match=message):
        load(hooked(tmp_path, name, [1, 2], module=module))


def test_a_function_without_a_place_is_refused():
    with pytest.raises(ValidationError, match="pattern"):
        spec_of.validate_python(
            {"type": "jsonl", "path": "x", "curriculum": {"type": "python", "function": "mine.py"}}
        )


# --- pretraining rows ---------------------------------------------------------------------


def test_pretraining_rows_run_in_epochs_of_their_own_and_are_no_prompts(folder, tmp_path):
    texts = write_lines(tmp_path / "texts.jsonl", [{"text": f"t{at}"} for at in range(5)])
    data = JsonlSpec(path=folder / "one.jsonl")
    prompts = load(data, pretraining=JsonlSpec(path=texts))
    epoch = prompts.rows("pretraining", 5, 5)
    assert sorted(row.text for _, row in epoch) == [f"t{at}" for at in range(5)]
    assert sorted(index for index, _ in epoch) == [7, 8, 9, 10, 11]
    assert prompts.rows("pretraining", 5, 5) == epoch
    assert prompts.facts()["data.pretraining_rows"] == "5"
    assert load(data).rows("train", 0, 20) == prompts.rows("train", 0, 20)
    with pytest.raises(DataInvalidError, match=r"is text without a prompt.*columns\.prompt"):
        prompts.slice("pretraining", 0, 1)


def test_a_role_without_pretraining_data_says_so(folder):
    with pytest.raises(EmptyDataError, match="give the role pretraining_data"):
        load(JsonlSpec(path=folder / "one.jsonl")).rows("pretraining", 0, 1)


def test_pretraining_never_shows_a_held_out_prompt_and_holds_nothing_out(tmp_path):
    records = [{"prompt": name, "completion": "x"} for name in "abc"]
    both = write_lines(tmp_path / "both.jsonl", records)
    data = JsonlSpec(
        path=write_lines(tmp_path / "train.jsonl", [{"prompt": "z"}]),
        held_out_path=write_lines(tmp_path / "out.jsonl", [{"prompt": "b"}]),
    )
    with pytest.raises(DataInvalidError, match=r"both\.jsonl, line 2: is a held-out prompt"):
        load(data, pretraining=JsonlSpec(path=both))
    with pytest.raises(DataInvalidError, match=r"pretraining_data holds out 1 rows"):
        load(data, pretraining=JsonlSpec(path=both, held_out_size=1))
