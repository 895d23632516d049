"""Given trajectories: the tokens, masks and pairs that data.proto promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny_models import END_ID, tiny_tokenizer

from rolemesh.engine.data.prompts import PromptRow, PromptSet
from rolemesh.engine.data.rows import DataInvalidError, PromptTooLongError
from rolemesh.engine.data.trajectories import read_trajectories
from rolemesh.engine.experience import Experience

PLAIN = (
    "tokens",
    "prompt_lengths",
    "loss_mask",
    "prompt_ids",
    "prompt_text",
    "completion_text",
    "answer",
    "metadata",
)
TOKENIZER = tiny_tokenizer()


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def prompt_row(question: str, **fields: Any) -> PromptRow:
    return PromptRow(messages=[user(question)], where=f"row {question}", **fields)


def prompt_set(rows: list[PromptRow], **fields: Any) -> PromptSet:
    """Held-out positions are row numbers: tests then say what stands where."""
    train = [prompt_row("trained")]
    return PromptSet(train, rows, **{"tokenizer": TOKENIZER, "seed": 0, **fields})


def read(rows: list[PromptRow], kind: Any, start: int = 0, **fields: Any) -> Experience:
    tokenizer = fields.pop("tokenizer", TOKENIZER)
    prompts = prompt_set(rows, tokenizer=tokenizer)
    return read_trajectories(prompts, "held_out", start, len(rows) - start, kind, **fields)


def encoded(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return ids


def rows_of(batch: Experience, name: str) -> list[Any]:
    return [row.tolist() for row in batch[name].rows()]


def completions(batch: Experience) -> list[list[int]]:
    lengths = batch["prompt_lengths"].values.tolist()
    return [row[length:] for row, length in zip(rows_of(batch, "tokens"), lengths, strict=True)]


# --- demonstrations -----------------------------------------------------------------------


def test_a_demonstration_stands_behind_its_prompt_as_a_sampled_completion_would():
    row = prompt_row("Hi", completion="Hello", answer="7", metadata='{"a": 1}')
    batch = read([row], "demonstration")
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert rows_of(batch, "tokens") == [[*encoded(prompt), *encoded("Hello"), END_ID]]
    assert batch["prompt_lengths"].values.tolist() == [len(encoded(prompt))]
    assert rows_of(batch, "loss_mask") == [[True] * (len(encoded("Hello")) + 1)]
    assert batch["prompt_text"].strings() == [prompt]
    assert batch["completion_text"].strings() == ["Hello"]
    assert (batch["answer"].strings(), batch["metadata"].strings()) == (["7"], ['{"a": 1}'])
    assert set(batch.columns) == set(PLAIN)


def test_columns_have_the_promised_types():
    batch = read([prompt_row("a", chosen="b", rejected="c")], "preference")
    dtypes = {name: column.values.dtype for name, column in batch.columns.items()}
    assert {name: dtypes[name] for name in (*PLAIN[:4], "pair_ids", "preference")} == {
        "tokens": torch.int64,
        "prompt_lengths": torch.int64,
        "loss_mask": torch.bool,
        "prompt_ids": torch.int64,
        "pair_ids": torch.int64,
        "preference": torch.float32,
    }


def test_an_assistant_prefix_belongs_to_the_prompt():
    row = prompt_row("1 + 2", completion=" 3", assistant_prefix="1 + 2 =")
    batch = read([row], "demonstration")
    assert completions(batch) == [[*encoded(" 3"), END_ID]]
    assert batch["prompt_text"].strings()[0].endswith("assistant\n1 + 2 =")


def test_text_and_a_single_turn_are_the_same_completion():
    rows = [prompt_row("a", completion="b"), prompt_row("a", completion=[assistant("b")])]
    one, other = completions(read(rows, "demonstration"))
    assert one == other


@pytest.mark.parametrize("prefix", ["", "So: "])
def test_turns_of_others_inside_a_completion_are_masked_and_nothing_else(prefix):
    turns = [assistant("one"), user("and?"), assistant("two"), user("more"), assistant("three")]
    row = prompt_row("count", completion=turns, assistant_prefix=prefix)
    batch = read([row], "demonstration")
    (tokens,), (mask,) = completions(batch), rows_of(batch, "loss_mask")
    whole = batch["prompt_text"].strings()[0] + TOKENIZER.decode(tokens)
    first = {**turns[0], "content": prefix + "one"}
    rendered = TOKENIZER.apply_chat_template([user("count"), first, *turns[1:]], tokenize=False)
    # The sampler stops at the end of the turn: the template's line break is not sampled.
    assert whole == rendered.removesuffix("\n")
    spoken = [token for token, own in zip(tokens, mask, strict=True) if own]
    assert TOKENIZER.decode(spoken) == "one<|im_end|>two<|im_end|>three<|im_end|>"


def test_a_template_that_rewrites_earlier_turns_is_refused_for_several_answers():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' }}"
        "{{ m['content'].split('</think>')[-1] if not loop.last else m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    turns = [assistant("x</think>one"), user("and?"), assistant("two")]
    row = prompt_row("count", completion=turns)
    with pytest.raises(DataInvalidError, match=r"row count: the chat template does not render"):
        read([row], "demonstration", tokenizer=tokenizer)
    single = read([prompt_row("a", completion=turns[:1])], "demonstration", tokenizer=tokenizer)
    assert completions(single) == [[*encoded("x</think>one"), END_ID]]


def test_without_an_end_in_the_template_the_tokenizers_own_ends_an_answer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    batch = read([prompt_row("a", completion="b")], "demonstration", tokenizer=tokenizer)
    assert completions(batch) == [[*encoded("b"), END_ID]]
    tokenizer.eos_token = None
    with pytest.raises(DataInvalidError, match=r"row a: .*\(eos_token\) has a token that ends"):
        read([prompt_row("a", completion="b")], "demonstration", tokenizer=tokenizer)


def test_a_special_token_in_a_prompt_of_the_data_is_tokenised_as_in_sampling():
    row = prompt_row("Hi", completion="Hello")
    prompts = prompt_set([row])
    (sampled_from,) = prompts.slice("held_out", 0, 1)
    batch = read_trajectories(prompts, "held_out", 0, 1, "demonstration")
    assert rows_of(batch, "tokens")[0][: len(sampled_from.tokens)] == list(sampled_from.tokens)
    assert batch["prompt_ids"].values.tolist() == [sampled_from.prompt_id]


# --- bare texts ---------------------------------------------------------------------------


def test_a_text_is_its_first_token_and_the_rest_cut_to_the_bound():
    text = PromptRow(messages=(), text="once upon a time")
    prompts = PromptSet([prompt_row("x")], [], tokenizer=TOKENIZER, seed=0, pretraining=[text])
    ids = encoded("once upon a time")
    for bound in (None, 2, 5):
        batch = read_trajectories(prompts, "pretraining", 3, 1, "demonstration", max_tokens=bound)
        assert rows_of(batch, "tokens") == [ids[:bound]]
        assert batch["prompt_lengths"].values.tolist() == [1]
        assert rows_of(batch, "loss_mask") == [[True] * (len(ids[:bound]) - 1)]
        assert batch["prompt_ids"].values.tolist() == [1]


def test_a_text_of_one_token_is_named():
    row = PromptRow(messages=(), text="a", where="row 9")
    with pytest.raises(DataInvalidError, match=r"row 9: its text has 1 tokens"):
        read([row], "demonstration")


# --- preferences --------------------------------------------------------------------------


def test_a_preference_is_two_neighbours_chosen_first():
    rows = [prompt_row(f"q{at}", chosen=f"c{at}", rejected=[assistant(f"r{at}")]) for at in (0, 1)]
    batch = read(rows, "preference")
    assert batch["completion_text"].strings() == ["c0", "r0", "c1", "r1"]
    assert batch["preference"].values.tolist() == [1.0, -1.0, 1.0, -1.0]
    assert batch["pair_ids"].values.tolist() == [0, 0, 1, 1]
    assert batch["prompt_ids"].values.tolist() == [1, 1, 2, 2]
    prompts = batch["prompt_text"].strings()
    assert prompts[0] == prompts[1] != prompts[2]


def test_a_row_that_comes_twice_makes_two_pairs():
    row = prompt_row("q", chosen="c", rejected="r")
    prompts = PromptSet([row], [], tokenizer=TOKENIZER, seed=0)
    batch = read_trajectories(prompts, "train", 5, 2, "preference")
    assert batch["prompt_ids"].values.tolist() == [0, 0, 0, 0]
    assert batch["pair_ids"].values.tolist() == [5, 5, 6, 6]


# --- judgements ---------------------------------------------------------------------------


def judged(number: int, is_wanted: bool | None = True) -> PromptRow:
    return prompt_row(f"q{number}", completion=f"a{number}", is_wanted=is_wanted)


def test_a_judgement_is_followed_by_the_next_rows_completion_behind_its_own_prompt():
    batch = read([judged(0), judged(1, is_wanted=False), judged(2)], "judgement")
    assert batch["completion_text"].strings() == ["a0", "a1", "a1", "a2", "a2", "a0"]
    asked = [
        text.split("\n")[1].removesuffix("<|im_end|>") for text in batch["prompt_text"].strings()
    ]
    assert asked == ["q0", "q0", "q1", "q1", "q2", "q2"]
    assert batch["preference"].values.tolist() == [1, 0, -1, 0, 1, 0]
    assert batch["pair_ids"].values.tolist() == [0, 0, 1, 1, 2, 2]


def test_the_other_completion_is_never_the_rows_own():
    prompts = PromptSet([judged(0), judged(1)], [], tokenizer=TOKENIZER, seed=1)
    # Epochs of two rows: some slice of three shows one row twice in a row.
    for start in range(12):
        batch = read_trajectories(prompts, "train", start, 3, "judgement")
        texts = batch["completion_text"].strings()
        assert all(own != other for own, other in zip(texts[::2], texts[1::2], strict=True))


def test_one_judgement_alone_is_an_error():
    with pytest.raises(DataInvalidError, match=r"row q0: stands alone.*2 different rows"):
        read([judged(0)], "judgement")


def test_the_row_for_the_divergence_is_cut_where_it_does_not_fit():
    rows = [prompt_row("77777777", completion="1", is_wanted=True)]
    rows.append(prompt_row("7", completion="12345678", is_wanted=False))
    longest = max(len(row) for row in rows_of(read(rows, "judgement"), "tokens")[::2])
    batch = read(rows, "judgement", max_tokens=longest)
    assert [len(row) for row in rows_of(batch, "tokens")] == [
        longest,
        longest,
        longest,
        longest - 7,
    ]


# --- what is wrong is named ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "kind", "message"),
    [
        (prompt_row("q"), "demonstration", r"row q: has no 'completion', which a demonstration"),
        (prompt_row("q"), "preference", r"row q: has no 'chosen'.*data\.columns\.chosen"),
        (judged(0, is_wanted=None), "judgement", r"row q0: has no 'label', which a judgement"),
        (PromptRow(messages=(), text="t", where="row t"), "preference", r"row t: has no 'chosen'"),
    ],
)
def test_a_row_that_lacks_what_the_kind_needs_is_named(row, kind, message):
    with pytest.raises(DataInvalidError, match=message):
        read([row], kind)


def test_a_row_that_does_not_fit_is_named_with_the_remedy():
    row = prompt_row("q", chosen="a", rejected="123456789")
    length = len(rows_of(read([row], "preference"), "tokens")[1])
    assert len(read([row], "preference", max_tokens=length)) == 2
    message = rf"row q: .*'rejected' 10, together more than {length - 1}: set data\.max_row_tokens"
    with pytest.raises(PromptTooLongError, match=message):
        read([row], "preference", max_tokens=length - 1)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind is 'opinion'"):
        read([judged(0)], "opinion")
