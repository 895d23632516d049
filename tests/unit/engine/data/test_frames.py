"""Frames of chat templates: the same texts as rendering gives, and none where that is not sure."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.endpoints import TEMPLATE
from support.tiny_models import tiny_tokenizer

from rolemesh.engine.data.rendering import frames
from rolemesh.engine.data.rendering.frames import LOOKS, Frames
from rolemesh.engine.data.rendering.rendering import Renderer
from rolemesh.engine.data.rows import PromptRow

TINY = tiny_tokenizer().chat_template
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = """
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '[' + message.role + ']' + message.content + '100%s\\n' }}
    {%- elif message.role == 'system' and loop.first and message.content is string %}
        {{- bos_token }}{{ message.content }}{{ eos_token }}
    {%- else %}{{ message | tojson }}{% endif %}
{%- endfor %}
"""
TRIMMING = """{% set ns = namespace(system='') %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}
    {%- if loop.first and ns.system %}{{ '<<' + ns.system + '>>' }}{% endif %}
    {%- if m.content %}{{ m.role + ': ' + m['content'] | trim + '\\n\\n' }}{% endif %}
{%- endfor %}
"""
FRAMED = {
    "tiny": TINY,
    "SmolLM2": SMOLLM2,
    "endpoint": TEMPLATE,
    "tools": TOOLS,
    "trimming": TRIMMING,
}
LOOKING = {
    "compares": "{% if c == 'a' %}b{% endif %}{{ c }}",
    "finds": "{% if 'a' in c %}b{% endif %}{{ c }}",
    "is found": "{% if c in 'abc' %}b{% endif %}{{ c }}",
    "is found later": "{% if 'a' in ['a'] in [c] or c in 'abc' %}b{% endif %}{{ c }}",
    "is listed": "{% if c in ['a', 'b'] %}b{% endif %}{{ c }}",
    "searches a part": "{% if ('x' + c) in 'xa' %}b{% endif %}{{ c }}",
    "changes": "{{ c | upper }}",
    "trims a part": "{{ ('x' + c) | trim('x') }}",
    "trims by it": "{% if 'ab' | trim(c) == 'b' %}b{% endif %}{{ c }}",
    "trims a sum": "{{ (' ' + c + ' ') | trim }}",
    "measures": "{{ c }}{{ c | length }}",
    "cuts": "{{ c[:3] }}",
    "calls": "{{ c.split('a')[0] }}",
    "calls another": "{{ '{:5}'.format(c) }}",
    "tests": "{% if c is upper %}b{% endif %}{{ c }}",
    "repeats": "{{ c * 2 }}",
    "iterates": "{% for one in c %}{{ one }}{% endfor %}",
    "shows": "{{ messages }}",
    "shows a list": "{{ [c] }}",
    "keys": "{{ {'a': 1}[c] }}{{ c }}",
    "names a method": "{% if 'x'[c] is defined %}b{% endif %}{{ c }}",
    "formats": "{% if 'x%s' % (c,) == 'xa' %}b{% endif %}{{ c }}",
    "joins": "{% if (c ~ 'x') == 'ax' %}b{% endif %}{{ c }}",
    "captures": "{% set x %}{{ c }}{% endset %}{% if x == 'a' %}b{% endif %}{{ c }}",
    "by a macro": "{% macro x(y) %}{{ y }}{% endmacro %}{% if x(c) == 'a' %}b{% endif %}{{ c }}",
    "twice": "{{ c }}{{ c }}",
    "never": "{{ 'a' }}",
    "by the clock": "{{ strftime_now('%Y') }}{{ c }}",
}
"""What a template may do with the first content, c, so that nothing is sure of what it writes."""

CONTENTS = st.one_of(
    st.text(max_size=12),
    st.text("ab {}%s\n\t\u00a0\u2028<>|'\"\\", max_size=12),
    st.sampled_from(["", " ", "a", "upper", "%s", "%(a)s", "{{ a }}", "<content 0 5e1c>", "ab\n"]),
)
ROLES = st.sampled_from(
    [("user",), ("system", "user"), ("user", "assistant", "user"), ("a%s",), ("tool", "user")]
)
TURNS = ROLES.flatmap(
    lambda roles: st.tuples(*(st.tuples(st.just(role), CONTENTS) for role in roles))
)


def tokenizer_with(template: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


TOKENIZERS = {name: tokenizer_with(template) for name, template in FRAMED.items()} | {
    name: tokenizer_with("{% set c = messages[0].content %}" + template)
    for name, template in LOOKING.items()
}


def row_of(*turns: tuple[str, str], **others: Any) -> PromptRow:
    messages = [{"role": role, "content": content, **others} for role, content in turns]
    return PromptRow(messages=messages, assistant_prefix="So:")


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=15, deadline=None)
@given(given=st.lists(TURNS, min_size=1, max_size=6))
def test_many_prompts_are_what_the_template_makes_of_each(name, given):
    tokenizer = TOKENIZERS[name]
    rows, expected = [], []
    for turns in given:
        row = row_of(*turns)
        try:
            text = tokenizer.apply_chat_template(
                row.messages, add_generation_prompt=True, tokenize=False
            )
        except jinja2.TemplateError:
            continue
        rows.append(row)
        expected.append(f"{text}So:")
    assert Renderer(tokenizer).prompt_texts(rows) == expected


@pytest.mark.parametrize("name", FRAMED)
def test_templates_that_copy_contents_have_frames(name):
    tokenizer = TOKENIZERS[name]
    found = Frames(tokenizer)
    rows = [row_of(("user", content)) for content in ("1 + 1", "100%s {0}", "a\u2028\u00e9")]
    for row in [*rows, row_of(("system", "Add."), ("user", "2"))]:
        text = found.text(row)
        assert text is not None
        assert text == Renderer(tokenizer).prompt_text(row).removesuffix("So:")


@pytest.mark.parametrize("name", LOOKING)
def test_templates_that_look_at_contents_have_none(name):
    assert Frames(TOKENIZERS[name]).text(row_of(("user", "q"))) is None


@pytest.mark.parametrize(
    "row",
    [
        *(row_of(("user", text)) for text in ("", " a", "a\n", "\u2003a")),
        row_of(("user", "a"), name="b"),
        row_of(("assistant", "a"), ("user", "b")),
    ],
    ids=["empty", "space before", "space behind", "a wide space", "another key", "refused"],
)
def test_rows_of_which_nothing_is_proven_are_rendered(row):
    assert Frames(TOKENIZERS["trimming"]).text(row) is None


def test_a_tokenizer_that_renders_by_itself_has_none():
    class Own(type(TOKENIZERS["tiny"])):  # type: ignore[misc]
        def apply_chat_template(self, *given: Any, **others: Any) -> Any:
            return super().apply_chat_template(*given, **others)

    tokenizer = TOKENIZERS["tiny"]
    own = Own(tokenizer_object=tokenizer.backend_tokenizer, chat_template=tokenizer.chat_template)
    assert Frames(own).text(row_of(("user", "q"))) is None


def test_a_frame_that_rendering_contradicts_is_not_used(monkeypatch):
    tokenizer = tokenizer_with("{{ messages[0].content }}{{ documents is none }}")
    assert Frames(tokenizer).text(row_of(("user", "q"))) == "qTrue"
    row = row_of(("user", "q"))
    monkeypatch.setattr(Frames, "_rendered", lambda self, roles, contents: f"{contents[0]}?")
    assert Frames(tokenizer).text(row) is None


def test_frames_are_few_whatever_roles_data_has(monkeypatch):
    monkeypatch.setattr(frames, "_MOST_FRAMES", 2)
    found = Frames(TOKENIZERS["tiny"])
    given = [found.text(row_of((role, "q"))) for role in ("a", "b", "c", "a")]
    assert [text is not None for text in given] == [True, True, False, True]


def test_no_method_of_a_text_is_forgotten():
    """A version of Python with another one, by which a template may look, fails here."""
    copied = {"__add__", "__str__"}
    of_every_object = set(dir(object)) - set(LOOKS)
    # Pickle asks for it, and no template.
    harmless = {"__getnewargs__"}
    special = {name for name in dir(str) if name.startswith("__")}
    assert special - set(LOOKS) - copied - of_every_object == harmless
