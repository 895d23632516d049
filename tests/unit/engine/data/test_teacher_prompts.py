"""Prompts of a teacher that is told more: by hand, and what rows lack is told by row and field."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from rolemesh.engine.data.rendering.rendering import Renderer
from rolemesh.engine.data.rows import DataInvalidError, PromptRow
from rolemesh.engine.data.teachers.prompts import TeacherPrompts
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.specs import TeacherPromptSpec
from rolemesh.quickstart.tiny_model import tiny_tokenizer

TURNS = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMING = TURNS.replace("message['content']", "message['content'] | trim")
SYSTEM_FIRST = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
    + TURNS
)
IN_BRACKETS = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '<s>[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'system' %}{{ raise_exception('no system turn') }}"
    "{% else %}{{ message['content'] + '</s>' }}{% endif %}{% endfor %}"
)
COMPLETIONS = ([9, 8, 7], [], [5])
ROWS = (
    PromptRow(messages=({"role": "user", "content": "2 + 3?"},), answer="5"),
    PromptRow(
        messages=(
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "and {one} more?"},
        ),
        answer="3",
        metadata='{"hint": "count", "extra": {"level": 2}}',
    ),
    PromptRow(
        messages=(
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Why?"},
        ),
        assistant_prefix="<think>",
        answer="because",
        metadata='{"hint": "ask"}',
    ),
)
"""A plain one, one with earlier turns, one with a system turn and the beginning of an answer."""


def _tokenizer(template: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def _experience(tokenizer: Any, rows: tuple[PromptRow, ...] = ROWS, **texts: Any) -> Experience:
    renderer = Renderer(tokenizer)
    prompts = [renderer.prompt_text(row) for row in rows]
    tokens = [renderer.tokens(text) for text in prompts]
    given = {
        "prompt_text": prompts,
        "answer": [row.answer for row in rows],
        "metadata": [row.metadata for row in rows],
        **texts,
    }
    return Experience(
        {
            "tokens": Column.ragged(
                ColumnKind.SEQUENCE,
                [[*prompt, *more] for prompt, more in zip(tokens, COMPLETIONS, strict=False)],
                torch.int64,
            ),
            "prompt_lengths": Column(ColumnKind.ROW, torch.tensor([len(one) for one in tokens])),
            **{name: Column.text(values) for name, values in given.items()},
        }
    )


def _told(tokenizer: Any, template: str, *args: Any, **fields: Any) -> Experience:
    spec = TeacherPromptSpec(template=template)
    prompts = TeacherPrompts(tokenizer, spec, fields.pop("max_tokens", None))
    return prompts.of(_experience(tokenizer, *args, **fields))


@pytest.mark.parametrize(
    "template", [TURNS, TRIMMING, SYSTEM_FIRST, IN_BRACKETS],
    ids=["chatml", "trimming", "system", "brackets"],
)  # fmt: skip
def test_a_teacher_reads_its_text_in_the_place_of_the_last_user_message(template: str) -> None:
    tokenizer = _tokenizer(template)
    rows = ROWS[:2] if template == IN_BRACKETS else ROWS
    told = _told(tokenizer, " {prompt} (It is {answer}.) {{}}\n", rows)
    renderer = Renderer(tokenizer)
    for row, tokens, length, completion in zip(
        rows, told["tokens"].rows(), told["prompt_lengths"].values, COMPLETIONS, strict=False
    ):
        *earlier, last = row.messages
        by_hand = PromptRow(
            messages=(
                *earlier,
                {**last, "content": f" {last['content']} (It is {row.answer}.) {{}}\n"},
            ),
            assistant_prefix=row.assistant_prefix,
        )
        prompt = renderer.tokens(renderer.prompt_text(by_hand))
        assert tokens.tolist() == [*prompt, *completion]
        assert int(length) == len(prompt)


@pytest.mark.parametrize("template", [TURNS, SYSTEM_FIRST])
def test_a_teacher_that_is_told_the_same_reads_the_same_tokens(template: str) -> None:
    tokenizer = _tokenizer(template)
    plain, told = _experience(tokenizer), _told(tokenizer, "{prompt}")
    for name in ("tokens", "prompt_lengths"):
        assert torch.equal(told[name].values, plain[name].values)


def test_metadata_is_told_as_text_or_json() -> None:
    tokenizer = _tokenizer(TURNS)
    told = _told(tokenizer, "{metadata.hint}/{metadata.extra}/{metadata.extra.level}", ROWS[1:2])
    assert 'user\ncount/{"level": 2}/2<|im_end|>' in tokenizer.decode(told["tokens"].values)


@pytest.mark.parametrize(
    ("template", "texts", "message"),
    [
        ("{answer}", {"answer": ["5", "3", ""]}, r"row 2 .* has no answer, which \{answer\} in"),
        ("{metadata.hint}", {}, r"row 0 .* no 'hint' \(it has nothing\), which \{metadata\.hint\}"),
        (
            "{metadata.extra.steps}",
            {"metadata": ['{"extra": {"steps": null}}'] * 3},
            r"row 0 .* no 'extra\.steps' \(it is null\)",
        ),
        ("{prompt}", {"prompt_text": ["plain"] * 3}, "row 0 .* has no user's message as the chat"),
    ],
)
def test_what_a_row_lacks_is_told(template: str, texts: dict[str, Any], message: str) -> None:
    with pytest.raises(DataInvalidError, match=message):
        _told(_tokenizer(TURNS), template, **texts)


def test_rows_that_grow_too_long_are_told_with_their_lengths() -> None:
    tokenizer = _tokenizer(TURNS)
    lengths = _told(tokenizer, "{prompt} {answer}")["tokens"].lengths().tolist()
    most = max(lengths)
    row = lengths.index(most)
    assert _told(tokenizer, "{prompt} {answer}", max_tokens=most).num_rows == 3
    message = (
        f"row {row} of the experience: .* {most - len(COMPLETIONS[row])} tokens and the completion "
        f"{len(COMPLETIONS[row])}, together {most}, but the model takes {most - 1}: shorten"
    )
    with pytest.raises(DataInvalidError, match=message):
        _told(tokenizer, "{prompt} {answer}", max_tokens=most - 1)
    prompts = TeacherPrompts(tokenizer, TeacherPromptSpec(template="{prompt} {answer}"), 4)
    with pytest.raises(DataInvalidError, match="row 40 of the experience"):
        prompts.of(_experience(tokenizer), places=[40, 41, 42])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[-1]['content'] }}", "nothing fixed before or behind a user's message"),
        (TURNS.replace("message['content']", "message['content'] | upper"), "does not render"),
    ],
)
def test_a_template_that_hides_the_message_is_refused(template: str, message: str) -> None:
    with pytest.raises(DataInvalidError, match=message):
        TeacherPrompts(_tokenizer(template), TeacherPromptSpec(template="{prompt}"), None)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{feedback}", r"the field \{feedback\} is none: fields are \{prompt\}, \{answer\}"),
        ("{metadata}", r"the field \{metadata\} is none"),
        ("{}", r"the field \{\} is none"),
        ("{answer!r}", r"the field \{answer!r\} is none"),
        ("{answer:>4}", r"the field \{answer:>4\} is none"),
        ("{answer", r"expected '}' before end of string: write"),
        ("", "at least 1 character"),
    ],
)
def test_unknown_fields_of_a_template_are_refused(template: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TeacherPromptSpec(template=template)


def test_a_template_names_the_columns_that_it_reads() -> None:
    assert TeacherPromptSpec(template="{prompt}").columns() == ("prompt_text",)
    both = TeacherPromptSpec(template="{metadata.a} {answer}")
    assert both.columns() == ("prompt_text", "answer", "metadata")
