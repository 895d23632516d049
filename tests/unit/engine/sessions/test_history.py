"""Which earlier answer a list of messages continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rolemesh.engine.sessions.history import (
    HistoryDigests,
    arguments_of,
    canonical,
    continued,
    text_of,
)
from rolemesh.engine.sessions.session import Session, SessionCall

Message = Mapping[str, Any]


def said(text: Any, role: str = "user", **more: Any) -> Message:
    return {"role": role, "content": text, **more}


def answer(text: Any, **more: Any) -> Message:
    return said(text, "assistant", **more)


def tool_call(arguments: Any, *, name: str = "add", call_id: str = "1") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class Talk:
    """A session whose calls are noted as the endpoint notes them."""

    def __init__(self) -> None:
        self.session = Session("s")

    def note(
        self, messages: Sequence[Message], given: Message, settings: Message | None = None
    ) -> SessionCall:
        number = len(self.session.calls)
        call = self.session.add([number], [1], [0.0], [(0, 0)], finish_reason="stop")
        digests = HistoryDigests(settings or {})
        for message in messages:
            digests.add(message)
        self.session.note_answer(digests.with_answer(given), call)
        return call

    def found(
        self, messages: Sequence[Message], settings: Message | None = None
    ) -> tuple[int, Sequence[Message]] | None:
        found = continued(self.session, settings or {}, messages)
        return None if found is None else (found[0].number, found[1])


ASKED = [said("be brief", "system"), said("2+3?")]
CALLED = tool_call('{"a": 2, "b": 3}')


@pytest.mark.parametrize(
    ("given", "back"),
    [
        (answer("5"), answer("5")),
        (answer("5"), answer(" 5\n")),
        (answer(" 5"), answer("5")),
        (answer("5", reasoning="two and three"), answer("5")),
        (answer("5"), answer("5", reasoning_content="I had thought")),
        (answer("5"), answer([{"type": "text", "text": "5"}])),
        (answer("five"), answer([{"type": "text", "text": t} for t in ("fi", "ve")])),
        (answer("5", refusal=None, audio=None), answer("5")),
        (answer(None, tool_calls=[CALLED]), answer("", tool_calls=[CALLED])),
        (answer("", tool_calls=[]), answer(None)),
        (answer("", tool_calls=[CALLED]), answer("", tool_calls=[{**CALLED, "id": "other"}])),
        # Once as text, once as an object; and other white space in it.
        (
            answer("", tool_calls=[CALLED]),
            answer("", tool_calls=[tool_call({"b": 3, "a": 2})]),
        ),
        (
            answer("", tool_calls=[CALLED]),
            answer("", tool_calls=[tool_call('{"a":2,"b":3}')]),
        ),
        # No JSON: then its text.
        (
            answer("", tool_calls=[tool_call("{2")]),
            answer("", tool_calls=[tool_call("{2")]),
        ),
    ],
)
def test_an_answer_that_came_back_as_it_was_is_continued(given: Message, back: Message) -> None:
    talk = Talk()
    talk.note(ASKED, given)
    assert talk.found([*ASKED, back, said("sure?")]) == (0, [said("sure?")])


@pytest.mark.parametrize(
    ("given", "back"),
    [
        (answer("5"), answer("6")),
        (answer("5 apples"), answer("5  apples")),
        (answer("5"), answer("5", tool_calls=[CALLED])),
        (answer("", tool_calls=[CALLED]), answer("")),
        (answer("", tool_calls=[CALLED]), answer("", tool_calls=[CALLED, CALLED])),
        (
            answer("", tool_calls=[CALLED]),
            answer("", tool_calls=[tool_call('{"a": 2, "b": 4}')]),
        ),
        (
            answer("", tool_calls=[CALLED]),
            answer("", tool_calls=[tool_call('{"a": 2, "b": 3}', name="sum")]),
        ),
        (answer("", tool_calls=[tool_call("{2")]), answer("", tool_calls=[tool_call("{3")])),
        (answer("5"), said("5")),
    ],
)
def test_an_answer_that_the_client_has_changed_is_not(given: Message, back: Message) -> None:
    talk = Talk()
    talk.note(ASKED, given)
    assert talk.found([*ASKED, back, said("sure?")]) is None


@pytest.mark.parametrize(
    "before",
    [
        [said("be brief", "system"), said("2+4?")],
        [said("be long", "system"), said("2+3?")],
        [said("2+3?")],
        [said("be brief", "system"), said("2+3? ")],
        [said("be brief", "system"), said("2+3?", name="Ann")],
        [said("be brief", "system"), said("2+3?"), said("now")],
        list(reversed(ASKED)),
    ],
)
def test_what_others_said_counts_to_the_letter(before: list[Message]) -> None:
    talk = Talk()
    talk.note(ASKED, answer("5"))
    assert talk.found([*before, answer("5"), said("sure?")]) is None


def test_a_field_of_others_that_is_null_is_none() -> None:
    talk = Talk()
    talk.note([said("2+3?", name=None)], answer("5"))
    assert talk.found([said("2+3?"), answer("5"), said("sure?")]) is not None


def test_text_of_others_may_come_in_parts() -> None:
    talk = Talk()
    talk.note([said([{"type": "text", "text": "2+3?"}])], answer("5"))
    assert talk.found([said("2+3?"), answer("5"), said("sure?")]) is not None
    picture = said([{"type": "image_url", "image_url": {"url": "x"}}])
    talk.note([picture], answer("5"))
    assert talk.found([said(""), answer("5"), said("sure?")]) is None
    assert talk.found([picture, answer("5"), said("sure?")]) == (1, [said("sure?")])


@pytest.mark.parametrize(
    ("settings", "others"),
    [
        ({"tools": [1]}, {"tools": [2]}),
        ({"tools": [1]}, {}),
        ({}, {"chat_template_kwargs": {"enable_thinking": True}}),
    ],
)
def test_what_else_a_prompt_is_rendered_from_counts(settings: Message, others: Message) -> None:
    talk = Talk()
    talk.note(ASKED, answer("5"), settings)
    assert talk.found([*ASKED, answer("5"), said("sure?")], settings) is not None
    assert talk.found([*ASKED, answer("5"), said("sure?")], others) is None


def test_the_last_answer_that_stands_is_continued_and_a_changed_one_forks() -> None:
    talk = Talk()
    first = [*ASKED, answer("5"), said("sure?")]
    talk.note(ASKED, answer("5"))
    talk.note(first, answer("yes"))
    end = said("thanks")
    assert talk.found([*first, answer("yes"), end]) == (1, [end])
    # The history forks behind the first answer; what the client says instead is rendered.
    assert talk.found([*first, answer("no"), end]) == (0, [said("sure?"), answer("no"), end])
    # A changed beginning leaves nothing to go on from, though the later answer is the same.
    assert talk.found([*ASKED, answer("6"), said("sure?"), answer("yes"), end]) is None


def test_of_two_calls_with_the_same_history_the_newest_counts() -> None:
    talk = Talk()
    talk.note(ASKED, answer("5"))
    talk.note(ASKED, answer("5 "))
    assert talk.found([*ASKED, answer("5"), said("sure?")]) == (1, [said("sure?")])


def test_an_answer_that_ends_the_messages_is_not_gone_on_from() -> None:
    talk = Talk()
    talk.note(ASKED, answer("5"))
    assert talk.found([*ASKED, answer("5")]) is None


def test_messages_do_not_run_into_each_other() -> None:
    talk = Talk()
    talk.note([said("ab"), said("c")], answer("5"))
    assert talk.found([said("a"), said("bc"), answer("5"), said("sure?")]) is None


def test_texts_with_lone_surrogates_are_histories_too() -> None:
    talk = Talk()
    talk.note([said("\ud800")], answer("\udfff"))
    assert talk.found([said("\ud800"), answer("\udfff"), said("so")]) == (0, [said("so")])


def test_text_of_joins_what_is_text_alone() -> None:
    assert text_of(None) == ""
    assert text_of([]) == ""
    assert text_of([{"type": "text", "text": "a"}, {"type": "output_text", "text": "b"}]) == "ab"
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}]
    assert text_of(parts) is parts


def test_arguments_are_json_where_they_can_be() -> None:
    assert arguments_of('{"a": 1}') == {"a": 1}
    assert arguments_of({"a": 1}) == {"a": 1}
    assert arguments_of("{a") == "{a"
    assert arguments_of(None) is None


def test_the_form_of_an_answer_has_its_text_and_its_calls_alone() -> None:
    assert canonical(answer(" x ", name="Ann", tool_calls=[CALLED])) == {
        "role": "assistant",
        "content": "x",
        "tool_calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}],
    }
