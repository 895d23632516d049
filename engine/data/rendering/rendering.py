"""Rendering of chat turns as tokens: prompts, given completions, turns between two answers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rolemesh.engine.data.rendering.fixed_ends import FixedEnds
from rolemesh.engine.data.rendering.token_bounds import most_tokens
from rolemesh.engine.data.rows import Completion, DataInvalidError, Message, PromptRow

if TYPE_CHECKING:
    # jinja2 comes with a tokenizer: what sends messages to an endpoint does without both.
    from rolemesh.engine.data.image_rows import DataImages
    from rolemesh.engine.data.rendering.frames import Frames
    from rolemesh.engine.images.prompt_images import PromptImage

_NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})
_PROBE: Sequence[Message] = ({"role": "user", "content": "a"},)
_PROBE_ANSWER = "the answer 9b7e"
"""A text that no template has by itself, and that none trims."""


class ChatTokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that are used here."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Renders chat turns."""

    def __call__(self, text: Any, **kwargs: Any) -> Any:
        """Encodes a text or a list of texts."""

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        """Text of tokens."""


class RenderedPrompt(NamedTuple):
    """A prompt as text and as tokens."""

    text: str
    """What the chat template makes of the turns."""
    tokens: Sequence[int]
    """Token ids; an image has all of its places."""
    images: tuple[PromptImage, ...]
    """The images, in the order of their places."""


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

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        template: str | None = None,
        images: DataImages | None = None,
    ) -> None:
        """Takes the tokenizer of the policy.

        Args:
            tokenizer: Of the policy.
            template: Stands for its own chat template.
            images: Finds the images of rows; None: a row with images is refused.
        """
        self._tokenizer = tokenizer
        self.images = images
        self._template = template
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        """The same for many texts at once, where it has threads of its own."""
        self._frames: Frames | None = None
        self._most_tokens = most_tokens(tokenizer)
        # What is proven of bounds holds because pieces of a text are encoded by themselves.
        self._ends = None if self._most_tokens is None else FixedEnds(tokenizer)
        self._closing: list[int] | None = None
        """Tokens with which the template ends an answer; none if it has no special token there."""

    def prompt_text(self, row: PromptRow) -> str:
        """The prompt up to the place where the assistant continues; raises DataInvalidError."""
        if row.text is not None:
            raise DataInvalidError(
                f"{row.where}: is text without a prompt: nothing can be sampled for it; name the "
                "prompt's column in data.columns.prompt"
            )
        return self._rendered(row.messages, row, answered=False) + row.assistant_prefix

    def prompt(self, row: PromptRow, text: str | None = None) -> RenderedPrompt:
        """The prompt with its tokens and images.

        Args:
            row: The row.
            text: What `prompt_text` makes of it, where that is known.

        Raises:
            DataInvalidError: It cannot be rendered, or an image cannot be read or has no place.
        """
        if text is None:
            text = self.prompt_text(row)
        tokens = self.tokens(text)
        if self.images is None:
            if row.images:
                raise DataInvalidError(
                    f"{row.where}: has images, which are not taken here: give rows without images"
                )
            return RenderedPrompt(text, tokens, ())
        images = self.images.of(row)
        # Of a row without images too: its text might hold the placeholder.
        return RenderedPrompt(text, self.images.expanded(tokens, images, row), images)

    def prompt_texts(self, rows: Sequence[PromptRow]) -> list[str]:
        """The same for each of several rows, of most templates in a seventh of the time."""
        if self._backend is None or any(row.text is not None for row in rows) or not rows:
            return [self.prompt_text(row) for row in rows]
        if self._frames is None:
            from rolemesh.engine.data.rendering.frames import Frames

            self._frames = Frames(self._tokenizer)
        texts = [self._frames.text(row) for row in rows]
        rest = [row for row, text in zip(rows, texts, strict=True) if text is None]
        rendered = iter(self._rendered_together(rest))
        return [
            (next(rendered) if text is None else text) + row.assistant_prefix
            for row, text in zip(rows, texts, strict=True)
        ]

    def _rendered_together(self, rows: Sequence[PromptRow]) -> list[str]:
        """The turns of several rows by the template, in two thirds of the time of one by one."""
        if not rows:
            return []
        import jinja2

        try:
            _quicken(self._tokenizer)
            texts: list[str] = self._tokenizer.apply_chat_template(
                [[dict(turn) for turn in row.messages] for row in rows],
                add_generation_prompt=True,
                tokenize=False,
            )
        except jinja2.TemplateError:
            # One at a time, to name the row.
            return [self._rendered(row.messages, row, answered=False) for row in rows]
        return texts

    def tokens(self, text: str) -> list[int]:
        """Token ids of a text, without added special tokens."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def batch_lengths(self, texts: Sequence[str]) -> list[int]:
        """Number of tokens of each text, without added special tokens."""
        if self._backend is None:
            return [len(self.tokens(text)) for text in texts]
        if not texts:
            return []
        # The first one sets up truncation, padding and special tokens as for every text.
        first = len(self.tokens(texts[0]))
        others = self._backend.encode_batch_fast(list(texts[1:]), add_special_tokens=False)
        return [first, *map(len, others)]

    def lengths_over(self, texts: Sequence[str], limit: int) -> list[int]:
        """Number of tokens of each text; of one that cannot have more than `limit`, minus a bound.

        A bound takes a hundredth of the time, where the tokenizer has one.

        Example: of "abc" with the limit 5 it is -3, and with the limit 2 its number of tokens.
        """
        head, tail = self._ends.of(texts) if self._ends is not None else ("", "")
        fixed = sum(len(self.tokens(text)) for text in (head, tail) if text)
        rest = [text[len(head) : len(text) - len(tail)] for text in texts]
        bounds = [fixed + self.most_tokens(text) for text in rest]
        long = [text for text, most in zip(rest, bounds, strict=True) if most > limit]
        measured = iter(self.batch_lengths(long))
        return [fixed + next(measured) if most > limit else -int(most) for most in bounds]

    def prompt_lengths(
        self, rows: Sequence[PromptRow], texts: Sequence[str], limit: int
    ) -> list[int]:
        """The same of rendered prompts; of a row with images always its number of tokens.

        Raises:
            DataInvalidError: An image cannot be read, or has no place.
        """
        lengths = self.lengths_over(texts, limit)
        for at, row in enumerate(rows):
            if row.images:
                lengths[at] = len(self.prompt(row, texts[at]).tokens)
        return lengths

    def most_tokens(self, text: str) -> float:
        """The most tokens that a text can have, without added special tokens."""
        return math.inf if self._most_tokens is None else self._most_tokens(text)

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

    def completion_bound(self, row: PromptRow, completion: Completion) -> float:
        """The most tokens that a given completion can have; raises as `completion` does."""
        if isinstance(completion, str):
            return self.most_tokens(completion) + len(self._turn_end(row))
        return len(self.completion(row, completion).tokens)

    def completion_lengths(self, given: Sequence[tuple[PromptRow, Completion]]) -> list[int]:
        """Number of tokens of each of several completions, as `completion` makes them."""
        texts = [completion for _, completion in given if isinstance(completion, str)]
        lengths = iter(self.batch_lengths(texts))
        return [
            next(lengths) + len(self._turn_end(row))
            if isinstance(completion, str)
            else len(self.completion(row, completion).tokens)
            for row, completion in given
        ]

    def continuation(
        self,
        messages: Sequence[Message],
        *,
        end_token: int | None,
        template_arguments: Mapping[str, Any] = _NO_ARGUMENTS,
    ) -> list[int]:
        r"""Tokens between a sampled answer and the next one, in which others say `messages`.

        The template renders a dummy conversation: a user's turn, an answer, `messages`, and the
        opening of the next answer. What stands behind the text of the dummy answer is what follows
        the sampled one. What was sampled thus stays as it is, also where the template would render
        an earlier answer otherwise (some leave out what was thought, or trim).

        Example: with ChatML and a user's message "no", after an answer that its end token closed,
        the tokens of "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n".

        Args:
            messages: What others say, at least one turn, with the keys that the template reads.
            end_token: Token id that closed the answer, which the template's own end is left out
                for; None if the answer is not closed, so that the template's end is written.
            template_arguments: What else the template is given, e.g. tools.

        Raises:
            DataInvalidError: The template refuses the turns, does not render answers as they are
                given, or renders these turns otherwise where more turns stand before them.
        """
        answer = {"role": "assistant", "content": _PROBE_ANSWER}
        earlier = [*_PROBE, {"role": "assistant", "content": "b"}]
        row = PromptRow(messages=(), where="what the environment says")
        text, longer = (
            self._behind_answer(turns, row, answered=False, arguments=template_arguments)
            for turns in (
                [*_PROBE, answer, *messages],
                [*earlier, *_PROBE, answer, *messages],
            )
        )
        if text is None or text != longer:
            what = (
                "does not contain the answer before it as it is given"
                if text is None
                else "depends on how many turns stand before it"
            )
            raise DataInvalidError(
                f"{row.where}: its turns ({', '.join(turn['role'] for turn in messages)}) have no "
                f"fixed text, since what the chat template makes of them {what}: let the "
                "environment return text with the markers of a turn, or use a template that only "
                "appends"
            )
        tokens, closing = self.tokens(text), self._template_end(row)
        if end_token is None:
            return tokens
        if closing and tokens[: len(closing)] == closing:
            return tokens[len(closing) :]
        # Some models end an answer with the token that opens the turn of the next speaker.
        return tokens[1:] if tokens[:1] == [end_token] else tokens

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

    def end_tokens(self) -> Collection[int]:
        """Token ids by which the template, or the tokenizer, closes an answer."""
        closing = self._template_end(PromptRow(messages=(), where="an answer"))
        end_token = getattr(self._tokenizer, "eos_token_id", None)
        return {*closing[-1:], *(() if end_token is None else (end_token,))}

    def _rendered(
        self,
        turns: Sequence[Message],
        row: PromptRow,
        *,
        answered: bool,
        arguments: Mapping[str, Any] = _NO_ARGUMENTS,
    ) -> str:
        import jinja2

        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(turn) for turn in turns],
                add_generation_prompt=not answered,
                tokenize=False,
                **({"chat_template": self._template} if self._template is not None else {}),
                **arguments,
            )
        except jinja2.TemplateError as error:
            raise DataInvalidError(
                f"{row.where}: the chat template refuses its turns "
                f"({', '.join(turn['role'] for turn in turns)}): {error}"
            ) from error
        return text

    def _behind_answer(
        self,
        turns: Sequence[Message],
        row: PromptRow,
        *,
        answered: bool,
        arguments: Mapping[str, Any] = _NO_ARGUMENTS,
    ) -> str | None:
        """What the template puts behind the text of the probe's answer; None if it changes that."""
        rendered = self._rendered(turns, row, answered=answered, arguments=arguments)
        _, found, behind = rendered.partition(_PROBE_ANSWER)
        return behind if found else None

    def _template_end(self, row: PromptRow) -> list[int]:
        """Tokens that the template puts after an answer, to the first special one; else none."""
        if self._closing is None:
            probe = [*_PROBE, {"role": "assistant", "content": _PROBE_ANSWER}]
            tail = self.tokens(self._behind_answer(probe, row, answered=True) or "")
            end_at = self._first_special(tail)
            self._closing = [] if end_at is None else tail[: end_at + 1]
        return self._closing

    def _turn_end(self, row: PromptRow) -> list[int]:
        """Tokens that end the assistant's turn: the first ones that the template puts after it.

        If the template puts no special token there, it is the end token of the tokenizer.
        """
        closing = self._template_end(row)
        if closing:
            return closing
        end_token = getattr(self._tokenizer, "eos_token_id", None)
        if end_token is None:
            raise DataInvalidError(
                f"{row.where}: neither the chat template nor the tokenizer (eos_token) has a "
                "token that ends an answer: set eos_token in the model's tokenizer_config.json"
            )
        return [end_token]

    def _first_special(self, tokens: Sequence[int]) -> int | None:
        special = set(getattr(self._tokenizer, "all_special_ids", ()))
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        special |= {number for number, token in added.items() if token.special}
        return next((at for at, token in enumerate(tokens) if token in special), None)


def _quicken(tokenizer: Any) -> None:
    """Has the chat template of a tokenizer rendered in two thirds of the time.

    Each rendering copies the globals of the compiled template. They are a chain of dictionaries,
    which is copied key by key; here they become one. Raises TemplateError if it cannot be compiled.
    """
    from transformers.utils import chat_template_utils

    # It keeps what it compiled. Of another version that keeps it elsewhere, rendering is slower.
    compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
    if compile_template is not None and isinstance(tokenizer.chat_template, str):
        compiled = compile_template(tokenizer.chat_template)
        compiled.globals = dict(compiled.globals)
