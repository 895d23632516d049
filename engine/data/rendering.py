"""Rendering of chat turns as tokens: prompts to sample from, given completions to train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jinja2

from rolemesh.engine.data.rows import Completion, DataInvalidError, Message, PromptRow

_PROBE: Sequence[Message] = ({"role": "user", "content": "a"},)
_PROBE_ANSWER = "b"


class ChatTokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that are used here."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Renders chat turns."""

    def __call__(self, text: Any, **kwargs: Any) -> Any:
        """Encodes a text or a list of texts."""

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        """Text of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionTokens:
    """A given completion as tokens."""

    tokens: Sequence[int]
    """Token ids, with those that end the assistant's turn."""
    loss_mask: Sequence[bool]
    """One value for each token: 1 where the assistant speaks, 0 in the turns of others."""


class Renderer:
    """Renders the rows of one tokenizer.

    A completion is tokenised by itself, and its tokens follow those of the prompt, as in sampling.
    So trained and sampled sequences have the same border.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        """Takes the tokenizer of the policy, with its chat template."""
        self._tokenizer = tokenizer
        self._closing: list[int] | None = None

    def prompt_text(self, row: PromptRow) -> str:
        """The prompt up to the place where the assistant continues; raises DataInvalidError."""
        if row.text is not None:
            raise DataInvalidError(
                f"{row.where}: is text without a prompt: nothing can be sampled for it; name the "
                "prompt's column in data.columns.prompt"
            )
        return self._rendered(row.messages, row, answered=False) + row.assistant_prefix

    def tokens(self, text: str) -> list[int]:
        """Token ids of a text, without added special tokens."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def batch_lengths(self, texts: Sequence[str]) -> list[int]:
        """Number of tokens of each text, without added special tokens."""
        if not texts:
            return []
        encoded = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return [len(ids) for ids in encoded]

    def completion(self, row: PromptRow, completion: Completion) -> CompletionTokens:
        """Tokens of a given completion behind the prompt of the row.

        Turns of others inside it (user, tool) are the text that the template puts between two
        answers, with loss_mask 0. The template must only append: its text of the first turns must
        be the beginning of its text of more turns.

        Raises:
            DataInvalidError: The template rewrites earlier turns, or nothing ends a turn.
        """
        if isinstance(completion, str):
            tokens = [*self.tokens(completion), *self._turn_end(row)]
            return CompletionTokens(tokens=tokens, loss_mask=[True] * len(tokens))
        tokens, mask = [], []
        answers = [at for at, turn in enumerate(completion) if turn["role"] == "assistant"]
        text = self.prompt_text(row)
        for number, at in enumerate(answers):
            content = completion[at]["content"]
            spoken = self.tokens(content)
            tokens += spoken
            mask += [True] * len(spoken)
            text += content
            if number + 1 == len(answers):
                end = self._turn_end(row)
                tokens += end
                mask += [True] * len(end)
                break
            turns = [*row.messages, *completion[: answers[number + 1]]]
            if row.assistant_prefix:
                turns[len(row.messages)] = {
                    **completion[0],
                    "content": row.assistant_prefix + completion[0]["content"],
                }
            longer = self._rendered(turns, row, answered=False)
            if not longer.startswith(text):
                raise DataInvalidError(
                    f"{row.where}: the chat template does not render turn {at} of the completion "
                    "as it is given once more turns follow (it trims or leaves out a part of it): "
                    "the turns between answers cannot be told from answers; give a conversation "
                    "with one answer, or a template that only appends"
                )
            between = self.tokens(longer[len(text) :])
            end = self._turn_end(row)
            num_spoken = len(end) if between[: len(end)] == end else 0
            tokens += between
            mask += [True] * num_spoken + [False] * (len(between) - num_spoken)
            text = longer
        return CompletionTokens(tokens=tokens, loss_mask=mask)

    def bare_text(self, row: PromptRow) -> list[int]:
        """Tokens of a text without a prompt, with the special tokens that the tokenizer adds.

        Raises:
            DataInvalidError: There are fewer than 2 tokens, so there is none to predict.
        """
        ids: list[int] = self._tokenizer(row.text, add_special_tokens=True)["input_ids"]
        if len(ids) < 2:
            raise DataInvalidError(
                f"{row.where}: its text has {len(ids)} tokens: a text needs 2, one to predict"
            )
        return ids

    def _rendered(self, turns: Sequence[Message], row: PromptRow, *, answered: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(turn) for turn in turns], add_generation_prompt=not answered, tokenize=False
            )
        except jinja2.TemplateError as error:
            raise DataInvalidError(
                f"{row.where}: the chat template refuses its turns "
                f"({', '.join(turn['role'] for turn in turns)}): {error}"
            ) from error
        return text

    def _turn_end(self, row: PromptRow) -> list[int]:
        """Tokens that end the assistant's turn: the first ones that the template puts after it.

        If the template puts no special token there, it is the end token of the tokenizer.
        """
        if self._closing is None:
            probe = PromptRow(messages=_PROBE, where=row.where)
            before = self._rendered(_PROBE, probe, answered=False) + _PROBE_ANSWER
            answer = {"role": "assistant", "content": _PROBE_ANSWER}
            whole = self._rendered([*_PROBE, answer], probe, answered=True)
            tail = self.tokens(whole[len(before) :]) if whole.startswith(before) else []
            end_at = self._first_special(tail)
            end_token = getattr(self._tokenizer, "eos_token_id", None)
            if end_at is not None:
                self._closing = tail[: end_at + 1]
            elif end_token is not None:
                self._closing = [end_token]
            else:
                raise DataInvalidError(
                    f"{row.where}: neither the chat template nor the tokenizer (eos_token) has a "
                    "token that ends an answer: set eos_token in the model's tokenizer_config.json"
                )
        return self._closing

    def _first_special(self, tokens: Sequence[int]) -> int | None:
        special = set(getattr(self._tokenizer, "all_special_ids", ()))
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        special |= {number for number, token in added.items() if token.special}
        return next((at for at, token in enumerate(tokens) if token in special), None)
