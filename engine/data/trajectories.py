"""Given trajectories, which are not sampled: demonstrations, preferences, judgements, texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rolemesh.engine.data.prompts import PromptSet, Split
from rolemesh.engine.data.rendering.rendering import CompletionTokens
from rolemesh.engine.data.rows import Completion, DataInvalidError, PromptRow, PromptTooLongError
from rolemesh.engine.experience import Experience
from rolemesh.engine.images.prompt_images import PromptImage, images_text
from rolemesh.engine.specs.columns import IMAGES

Kind = Literal["demonstration", "preference", "judgement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """A row of data at its position, with the prompt as tokens."""

    position: int
    index: int
    row: PromptRow
    text: str
    tokens: Sequence[int]
    images: Sequence[PromptImage] = ()


_Row = tuple[_Given, CompletionTokens, float]
"""A row of the experience that is being made: prompt, completion and preference."""


def read_trajectories(
    prompts: PromptSet,
    split: Split,
    start: int,
    count: int,
    kind: Kind,
    *,
    max_tokens: int | None = None,
) -> Experience:
    """Makes trajectories of the data rows at positions start..start+count-1.

    "demonstration": one row each, the given completion. A data row of bare text gives its first
    token as the prompt (the special token, if the tokenizer adds one) and the rest as the
    completion, cut to the source's max_row_tokens and to max_tokens.

    "preference": two neighbouring rows each, the chosen completion (preference 1), then the
    rejected one (-1).

    "judgement": two neighbouring rows each. The first is the given completion (preference 1 when
    it is wanted, -1 when not). The second has the same prompt and the completion of the next other
    data row of the call, cyclically (preference 0): an answer that has nothing to do with the
    prompt, from which KTO estimates the divergence from the reference (arXiv 2402.01306,
    section 4.2). That row is not trained on, so it is cut to max_tokens.

    A completion ends with the tokens that end the assistant's turn. Turns of others inside it have
    loss_mask 0.

    Args:
        prompts: The rows.
        split: Split of the rows.
        start: First position, >= 0.
        count: Number of data rows, >= 1.
        kind: Kind of trajectories to make.
        max_tokens: Longest prompt with completion; None for any.

    Returns:
        B = count rows for demonstrations, otherwise 2 * count: tokens int64 (sequence),
        prompt_lengths int64 (row), loss_mask bool (completion), prompt_ids int64 (row, index of
        the data row), prompt_text, completion_text, answer, metadata (text); where the data has
        images, images (text, see `images.prompt_images`); and for pairs
        pair_ids int64 (row, the position, which also distinguishes two passages of one data row)
        and preference float32 (row).

    Raises:
        DataInvalidError: A row lacks a field that the kind needs, or cannot be rendered.
        PromptTooLongError: A row has more than max_tokens tokens.
        EmptyDataError: The split has no rows.
        ValueError: The kind or the range is not valid.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"kind is {kind!r}: give one of {', '.join(get_args(Kind))}")
    read: Callable[..., Iterator[_Row]] = {
        "demonstration": _demonstrations,
        "preference": _preferences,
        "judgement": _judgements,
    }[kind]
    found = prompts.rows(split, start, count)
    data = [(at, index, row) for at, (index, row) in enumerate(found, start=start)]
    rows = list(read(prompts, data, max_tokens))
    return _experience(
        rows,
        prompts.tokenizer,
        with_pairs=kind != "demonstration",
        with_images=prompts.has_images,
    )


_Positioned = Sequence[tuple[int, int, PromptRow]]


def _given(prompts: PromptSet, position: int, index: int, row: PromptRow) -> _Given:
    text, tokens, images = prompts.renderer.prompt(row)
    return _Given(position=position, index=index, row=row, text=text, tokens=tokens, images=images)


def _demonstrations(
    prompts: PromptSet, data: _Positioned, max_tokens: int | None
) -> Iterator[_Row]:
    for position, index, row in data:
        if row.text is not None:
            tokens = prompts.renderer.bare_text(row)[: row.max_text_tokens][:max_tokens]
            text = prompts.tokenizer.decode(tokens[:1])
            given = _Given(position=position, index=index, row=row, text=text, tokens=tokens[:1])
            mask = [True] * (len(tokens) - 1)
            yield given, CompletionTokens(tokens=tokens[1:], loss_mask=mask), 0.0
            continue
        completion = _needed(row, row.completion, "completion", "demonstration")
        given = _given(prompts, position, index, row)
        yield given, _completion(prompts, given, completion, "completion", max_tokens), 0.0


def _preferences(prompts: PromptSet, data: _Positioned, max_tokens: int | None) -> Iterator[_Row]:
    for position, index, row in data:
        chosen = _needed(row, row.chosen, "chosen", "preference")
        rejected = _needed(row, row.rejected, "rejected", "preference")
        given = _given(prompts, position, index, row)
        yield given, _completion(prompts, given, chosen, "chosen", max_tokens), 1.0
        yield given, _completion(prompts, given, rejected, "rejected", max_tokens), -1.0


def _judgements(prompts: PromptSet, data: _Positioned, max_tokens: int | None) -> Iterator[_Row]:
    judged: list[tuple[_Given, CompletionTokens, bool]] = []
    for position, index, row in data:
        completion = _needed(row, row.completion, "completion", "judgement")
        is_wanted = _needed(row, row.is_wanted, "label", "judgement")
        given = _given(prompts, position, index, row)
        tokens = _completion(prompts, given, completion, "completion", max_tokens)
        judged.append((given, tokens, is_wanted))
    for at, (given, tokens, is_wanted) in enumerate(judged):
        following = (judged[(at + step) % len(judged)] for step in range(1, len(judged)))
        other = next((own for other, own, _ in following if other.index != given.index), None)
        if other is None:
            raise DataInvalidError(
                f"{given.row.where}: stands alone in a call for judgements, but each needs the "
                "completion of another data row: ask for 2 different rows or more"
            )
        yield given, tokens, 1.0 if is_wanted else -1.0
        room = None if max_tokens is None else max_tokens - len(given.tokens)
        cut = CompletionTokens(tokens=other.tokens[:room], loss_mask=other.loss_mask[:room])
        yield given, cut, 0.0


def _needed(row: PromptRow, value: Any, meaning: str, kind: Kind) -> Any:
    if value is None:
        raise DataInvalidError(
            f"{row.where}: has no {meaning!r}, which a {kind} needs: give it, or name its column "
            f"in data.columns.{meaning}"
        )
    return value


def _completion(
    prompts: PromptSet,
    given: _Given,
    completion: Completion,
    meaning: str,
    max_tokens: int | None,
) -> CompletionTokens:
    made = prompts.renderer.completion(given.row, completion)
    if prompts.renderer.images is not None:
        prompts.renderer.images.check_answer(made.tokens, given.row)
    num_tokens = len(given.tokens) + len(made.tokens)
    if max_tokens is not None and num_tokens > max_tokens:
        raise PromptTooLongError(
            f"{given.row.where}: the prompt has {len(given.tokens)} tokens and {meaning!r} "
            f"{len(made.tokens)}, together more than {max_tokens}: set data.max_row_tokens to "
            f"{max_tokens}, which leaves such rows out and counts them"
        )
    return made


def _experience(
    rows: Sequence[_Row], tokenizer: Any, *, with_pairs: bool, with_images: bool
) -> Experience:
    columns: dict[str, Sequence[Any]] = {
        "tokens": [[*given.tokens, *completion.tokens] for given, completion, _ in rows],
        "prompt_lengths": [len(given.tokens) for given, _, _ in rows],
        "loss_mask": [completion.loss_mask for _, completion, _ in rows],
        "prompt_ids": [given.index for given, _, _ in rows],
        "prompt_text": [given.text for given, _, _ in rows],
        "completion_text": [
            tokenizer.decode(list(completion.tokens), skip_special_tokens=True)
            for _, completion, _ in rows
        ],
        "answer": [given.row.answer for given, _, _ in rows],
        "metadata": [given.row.metadata for given, _, _ in rows],
    }
    if with_images:
        columns[IMAGES] = [images_text(given.images) for given, _, _ in rows]
    if with_pairs:
        columns["pair_ids"] = [given.position for given, _, _ in rows]
        columns["preference"] = [preference for _, _, preference in rows]
    return Experience.of_rows(columns)
