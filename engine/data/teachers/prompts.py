"""Prompts of a teacher that is told more than its student: see `specs.TeacherPromptSpec`.

An experience has each prompt as the text that the student's chat template made of it. The last user
message is found in there by what the template puts before and behind one, so that all other turns,
and what the assistant's turn begins with, stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch

from rolemesh.engine.data.rendering.rendering import ChatTokenizer, Renderer
from rolemesh.engine.data.rows import DataInvalidError, Message, PromptRow
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.nested import lacking, value_of
from rolemesh.engine.specs import TeacherPromptSpec
from rolemesh.engine.specs.columns import INPUT_COLUMNS

_PROBE = "the question 5c1d"
"""A text that no template has by itself, and that none trims."""

_EARLIER: Sequence[Sequence[Message]] = (
    (),
    ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}),
    ({"role": "system", "content": "s"},),
)
"""Turns that may stand before a user's."""


class TeacherPrompts:
    """Puts completions behind the prompts that a teacher is told. Owned by the compute thread.

    Example: with ChatML and the template "{prompt} (It is {answer}.)" a row whose prompt is the
    text of the user's message "2 + 3?", with the answer "5", gets the tokens of the same text with
    "2 + 3? (It is 5.)" in its place, and behind them the tokens of its completion, unchanged.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, spec: TeacherPromptSpec, max_tokens: int | None
    ) -> None:
        """Looks at the chat template.

        Args:
            tokenizer: Of the teacher; its chat template must be the student's.
            spec: What the teacher is told.
            max_tokens: Longest sequence of its model; None: it has no longest.

        Raises:
            DataInvalidError: Nothing tells a user's message apart in what the template makes.
        """
        self._spec = spec
        self._max_tokens = max_tokens
        self._renderer = Renderer(tokenizer)
        self._turn = _user_turn(self._renderer)
        self.columns = (*INPUT_COLUMNS, *spec.columns())
        """Columns that `of` reads."""

    def of(self, batch: Experience, places: Sequence[int] | None = None) -> Experience:
        """The same completions behind the teacher's prompts: columns tokens and prompt_lengths.

        Args:
            batch: With `columns`.
            places: What messages call each row; None: its place in the batch.

        Raises:
            DataInvalidError: A row lacks a field of the template, has no user's message, or is
                longer than the model takes; names the row.
        """
        places = range(batch.num_rows) if places is None else places
        prompts = [
            self._renderer.tokens(text)
            for text in self._texts(batch, [f"row {one} of the experience" for one in places])
        ]
        completions = [
            tokens[length:]
            for tokens, length in zip(
                batch["tokens"].rows(), batch["prompt_lengths"].values.tolist(), strict=True
            )
        ]
        for place, prompt, completion in zip(places, prompts, completions, strict=True):
            length = len(prompt) + len(completion)
            if self._max_tokens is not None and length > self._max_tokens:
                raise DataInvalidError(
                    f"row {place} of the experience: the teacher's prompt has {len(prompt)} tokens "
                    f"and the completion {len(completion)}, together {length}, but the model takes "
                    f"{self._max_tokens}: shorten teacher.prompt.template, or what it quotes"
                )
        rows = [
            torch.cat([torch.tensor(prompt, dtype=torch.int64), completion])
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
        return Experience(
            {
                "tokens": Column.ragged(ColumnKind.SEQUENCE, rows, torch.int64),
                "prompt_lengths": Column(ColumnKind.ROW, lengths),
            }
        )

    def _texts(self, batch: Experience, rows: Sequence[str]) -> list[str]:
        texts = {name: batch[name].strings() for name in self._spec.columns()}
        found = []
        for number, where in enumerate(rows):
            prompt = texts["prompt_text"][number]
            start, end = self._turn.place_in(prompt, where)
            given = {"prompt": prompt[start:end]}
            if "answer" in texts:
                given["answer"] = texts["answer"][number]
            if "metadata" in texts:
                given["metadata"] = texts["metadata"][number]
            told = "".join(
                text + ("" if field is None else _value(field, given, where))
                for text, field in self._spec.parts()
            )
            row = PromptRow(messages=({"role": "user", "content": told},), where=where)
            rendered = self._turn.content_of(self._renderer.prompt_text(row), where)
            found.append(prompt[:start] + rendered + prompt[end:])
        return found


class _UserTurn(NamedTuple):
    """What a chat template puts around a user's message."""

    first: str
    """All that stands before one that is the first turn."""
    opening: str
    """What stands before one, whatever the turns before it are."""
    closing: str
    """What stands behind one that is the last turn."""

    def place_in(self, prompt: str, where: str) -> tuple[int, int]:
        """Where the last user's message begins and ends in a rendered prompt."""
        opens = prompt.rfind(self.opening)
        start = opens + len(self.opening)
        end = prompt.find(self.closing, start)
        if opens < 0 or end < 0:
            raise DataInvalidError(
                f"{where}: its prompt has no user's message as the chat template of the teacher's "
                "tokenizer writes one: give a teacher with the chat template that the policy was "
                "sampled with, or leave teacher.prompt out"
            )
        return start, end

    def content_of(self, rendered: str, where: str) -> str:
        """What the template makes of the text of a message that is the only turn."""
        if not (rendered.startswith(self.first) and rendered.endswith(self.closing)):
            raise DataInvalidError(
                f"{where}: the chat template writes other text around this user's message than "
                "around others: leave teacher.prompt out"
            )
        return rendered[len(self.first) : len(rendered) - len(self.closing)]


def _user_turn(renderer: Renderer) -> _UserTurn:
    befores, behinds = [], []
    for turns in _EARLIER:
        messages = (*turns, {"role": "user", "content": _PROBE})
        try:
            text = renderer.prompt_text(PromptRow(messages=messages, where="a user's message"))
        except DataInvalidError:
            if not turns:
                raise
            # Some templates take no system turn.
            continue
        before, probe, behind = text.partition(_PROBE)
        if not probe:
            raise DataInvalidError(
                "the chat template does not render a user's message as it is given: leave "
                "teacher.prompt out"
            )
        befores.append(before)
        behinds.append(behind)
    opening = befores[0]
    while not all(before.endswith(opening) for before in befores):
        opening = opening[1:]
    if not opening or not behinds[0] or len(set(behinds)) > 1:
        raise DataInvalidError(
            "the chat template puts nothing fixed before or behind a user's message, so that it "
            "cannot be found in a prompt: leave teacher.prompt out"
        )
    return _UserTurn(befores[0], opening, behinds[0])


def _value(field: str, given: dict[str, str], where: str) -> str:
    """The text of a field of the template; raises DataInvalidError where the row lacks it."""
    if field == "prompt":
        return given["prompt"]
    if field == "answer":
        if not given["answer"]:
            raise DataInvalidError(
                f"{where}: has no answer, which {{answer}} in teacher.prompt.template asks for: "
                "give the data an answer, or take the field out"
            )
        return given["answer"]
    name = field.partition(".")[2]
    record = json.loads(given["metadata"] or "{}")
    value = value_of(record, name)
    if value is None:
        why = lacking(record, name) or "it is null"
        raise DataInvalidError(
            f"{where}: its metadata has no {name!r} ({why}), which {{{field}}} in "
            "teacher.prompt.template asks for: give the data that column, or take the field out"
        )
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
