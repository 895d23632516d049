"""What stands between a sampled answer and the next one, with what else templates are given."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from rolemesh.engine.data.rendering.rendering import Renderer
from rolemesh.engine.data.rows import DataInvalidError
from rolemesh.quickstart.tiny_model import END_ID, START_ID, tiny_tokenizer

TURNS = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
)
OPENING = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TOOLS_FIRST = "{% if tools %}{{ 'tools: ' + tools|string + '\n' }}{% endif %}" + TURNS + OPENING
TOOLS_LAST = TURNS + "{% if tools %}{{ 'tools: ' + tools[0]['name'] + '\n' }}{% endif %}" + OPENING
SAID = [{"role": "tool", "content": "5"}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


def between(
    tokenizer: PreTrainedTokenizerFast,
    template: str,
    end_token: int | None = END_ID,
    **arguments: object,
) -> str:
    renderer = Renderer(tokenizer, template=template)
    tokens = renderer.continuation(SAID, end_token=end_token, template_arguments=arguments)
    return str(tokenizer.decode(tokens))


def test_the_separator_behind_an_answer_is_kept_at_a_tools_turn(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """verl#6921: the line break behind the end token was dropped where a tool spoke next."""
    said = "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    assert between(tokenizer, TURNS + OPENING) == said
    assert between(tokenizer, TURNS + OPENING, None) == "<|im_end|>" + said


def test_what_stands_before_the_answer_is_not_said_again(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    given = between(tokenizer, TOOLS_FIRST, tools=[{"name": "add"}])
    assert given == between(tokenizer, TOOLS_FIRST)
    assert "tools" not in given


def test_the_template_is_given_the_arguments(tokenizer: PreTrainedTokenizerFast) -> None:
    given = between(tokenizer, TOOLS_LAST, tools=[{"name": "add"}])
    assert given == "\n<|im_start|>tool\n5<|im_end|>\ntools: add\n<|im_start|>assistant\n"


def test_an_argument_that_a_template_stops_at_is_told(tokenizer: PreTrainedTokenizerFast) -> None:
    refuses = "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}" + TURNS
    with pytest.raises(DataInvalidError, match="no tools here"):
        between(tokenizer, refuses, tools=[{"name": "add"}])
    assert between(tokenizer, refuses).startswith("\n<|im_start|>tool")


def test_a_template_that_counts_turns_has_no_fixed_text(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    counts = TURNS + "{% if counted %}{{ messages|length }}{% endif %}" + OPENING
    with pytest.raises(DataInvalidError, match="depends on how many turns"):
        between(tokenizer, counts, counted=True)
    assert between(tokenizer, counts) == between(tokenizer, TURNS + OPENING)


def test_the_template_that_is_given_stands_for_the_tokenizers_own(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    other = "{% for m in messages %}{{ m['content'] + '<|im_start|>' }}{% endfor %}"
    renderer = Renderer(tokenizer, template=other)
    assert renderer.end_tokens() == {START_ID, END_ID}
    assert Renderer(tokenizer).end_tokens() == {END_ID}
    assert tokenizer.decode(renderer.continuation(SAID, end_token=START_ID)) == "5<|im_start|>"
