"""Rows by position: training rows in endless epochs, held-out rows once, and bare texts.

A position always names the same row, so the coordinator sends positions and no text, and a
replayed step sees the same prompts. Held-out prompts are never training prompts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from rolemesh.engine.data.image_rows import DataImages
from rolemesh.engine.data.orders.by_seed import Epochs, Mixture, Order, shuffled
from rolemesh.engine.data.orders.curriculum import epoch_order
from rolemesh.engine.data.reading.filtering import long_prompts
from rolemesh.engine.data.rendering.rendering import ChatTokenizer, Renderer
from rolemesh.engine.data.row_store import Rows
from rolemesh.engine.data.rows import DataInvalidError, Message, PromptTooLongError
from rolemesh.engine.data.rows import EmptyDataError as EmptyDataError
from rolemesh.engine.data.rows import PromptRow as PromptRow
from rolemesh.engine.data.sections import (
    Progress,
    bounds_of,
    check_not_empty,
    load_section,
)
from rolemesh.engine.data.sources import Source, load_sources
from rolemesh.engine.images.prompt_images import PromptImage
from rolemesh.engine.specs import DataSpec, images_of_data

Split = Literal["train", "held_out", "pretraining"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt that is ready for sampling; an environment's `reset` gets it as its row.

    Example: of the row {"prompt": "2 + 3?", "answer": 5, "level": 1} the answer is "5" and the
    metadata '{"level": 1}'; the text is what the chat template makes of the prompt.
    """

    prompt_id: int
    """Index of the row: training rows, then held-out rows, then rows of pretraining."""
    text: str
    """The rendered prompt."""
    tokens: Sequence[int]
    """Token ids of the rendered prompt; an image has all of its places."""
    answer: str
    """Expected answer as text; empty when the data has none. A list, an object, true and false are
    JSON here, and as they are in the metadata: `json.loads(row.metadata)["answer"]`."""
    metadata: str
    """A JSON object of the row's other columns, as text: `json.loads(row.metadata)["level"]`."""
    messages: Sequence[Message] = ()
    """The turns that `text` renders, as the data has them; none for a prompt that is tokens."""
    images: tuple[PromptImage, ...] = ()
    """Images of the prompt, in the order of their places among `tokens`."""


class PromptSet:
    """The rows of a run.

    Invariant: `slice` and `rows` are pure functions of their arguments and of (rows, seed). A
    resumed run therefore needs only the position.

    Example: with 10 training rows, `slice("train", 20, 10)` is always the third epoch.
    """

    def __init__(
        self,
        train: Sequence[PromptRow],
        held_out: Sequence[PromptRow],
        *,
        tokenizer: ChatTokenizer,
        seed: int,
        pretraining: Sequence[PromptRow] = (),
        orders: Mapping[Split, Order] | None = None,
        num_filtered: Mapping[Split, int] | None = None,
        num_repeated: int = 0,
        images: DataImages | None = None,
    ) -> None:
        """Takes the rows of each split.

        Args:
            train: Rows to train on.
            held_out: Rows that are never trained on.
            tokenizer: Tokenizer of the policy, with its chat template.
            seed: Seed of the order of epochs.
            pretraining: Rows of bare text, which keep the knowledge from pretraining.
            orders: Orders of the endless splits; a split without one is shuffled in each epoch.
            num_filtered: Rows of each split that were left out because of their length.
            num_repeated: Training rows left out because a source of the mixture holds them out.
            images: Finds the images of rows; None: the data has none.
        """
        self._rows: dict[Split, Rows] = {
            "train": Rows.of(train),
            "held_out": Rows.of(held_out),
            "pretraining": Rows.of(pretraining),
        }
        self._orders: dict[Split, Order] = {
            "train": Epochs(len(train), shuffled(len(train), str(seed))),
            "pretraining": Epochs(
                len(pretraining), shuffled(len(pretraining), f"{seed}/pretraining")
            ),
            **(orders or {}),
        }
        self.tokenizer = tokenizer
        self.renderer = Renderer(tokenizer, images=images)
        self.num_filtered: Mapping[Split, int] = MappingProxyType(
            dict.fromkeys(self._rows, 0) | dict(num_filtered or {})
        )
        self.num_repeated = num_repeated

    @property
    def has_images(self) -> bool:
        """Whether rows may have images: so says the data's section, not its rows."""
        return self.renderer.images is not None

    def without_images(self, tokens: Sequence[int]) -> list[int]:
        """Tokens of a prompt without the places of its images."""
        images = self.renderer.images
        placeholder = None if images is None else images.processor.tokens.placeholder
        return [token for token in tokens if token != placeholder]

    def size(self, split: Split) -> int:
        """Rows in the split."""
        return len(self._rows[split])

    def every(self, split: Split) -> Rows:
        """The rows of the split, each once, in no order of training."""
        return self._rows[split]

    def facts(self) -> dict[str, str]:
        """Facts about the data, for the answer to Initialize."""
        facts = {
            "data.train_prompts": str(self.size("train")),
            "data.held_out_prompts": str(self.size("held_out")),
            "data.filtered_prompts": str(sum(self.num_filtered.values())),
        }
        if self.num_repeated:
            facts["data.repeated_prompts"] = str(self.num_repeated)
        if self.renderer.images is not None:
            facts["data.image_processor"] = self.renderer.images.processor.fingerprint
        if self.size("pretraining"):
            facts["data.pretraining_rows"] = str(self.size("pretraining"))
        return facts

    def rows(self, split: Split, start: int, count: int) -> list[tuple[int, PromptRow]]:
        """(index of the row, row) at positions start..start+count-1.

        Raises:
            EmptyDataError: The split has no rows.
            ValueError: The range is not valid, or reaches beyond the held-out split.
        """
        rows = self._rows[split]
        if start < 0 or count < 1:
            raise ValueError(
                f"prompts start={start}, count={count}: start must be >= 0 and count >= 1"
            )
        if not rows:
            remedy = (
                "give the role pretraining_data"
                if split == "pretraining"
                else f"raise data.{split}_size, or give a file with at least one prompt"
            )
            raise EmptyDataError(f"the {split} split of the data is empty: {remedy}")
        offset = self._offset(split)
        if split != "held_out":
            indexes = self._orders[split].rows(start, count)
            return [(offset + index, rows[index]) for index in indexes]
        if start + count > len(rows):
            raise ValueError(
                f"held-out prompts {start} to {start + count - 1} were asked for, but there "
                f"are {len(rows)}: lower run.evaluation.num_prompts or raise the held-out split"
            )
        return [(offset + index, rows[index]) for index in range(start, start + count)]

    def slice(self, split: Split, start: int, count: int) -> list[Prompt]:
        """The prompts at positions start..start+count-1, rendered.

        Raises:
            EmptyDataError: The split has no prompts.
            DataInvalidError: A row is bare text, the chat template refuses its turns, or an image
                cannot be read.
            ValueError: The range is not valid, or reaches beyond the held-out split.
        """
        return [self.render(index, row) for index, row in self.rows(split, start, count)]

    def _offset(self, split: Split) -> int:
        if split == "train":
            return 0
        return self.size("train") + (0 if split == "held_out" else self.size("held_out"))

    def render(self, index: int, row: PromptRow) -> Prompt:
        """A row as a prompt, under the given id.

        Raises:
            DataInvalidError: The row is bare text, the chat template refuses its turns, or an image
                cannot be read.
        """
        rendered = self.renderer.prompt(row)
        return Prompt(
            prompt_id=index,
            text=rendered.text,
            tokens=rendered.tokens,
            answer=row.answer,
            metadata=row.metadata,
            messages=tuple(dict(message) for message in row.messages),
            images=rendered.images,
        )


def load_prompts(
    data: DataSpec,
    *,
    tokenizer: ChatTokenizer,
    seed: int,
    pretraining: DataSpec | None = None,
    max_model_len: int | None = None,
    measured_from: int | None = None,
    progress: Progress | None = None,
    model: Path | None = None,
) -> PromptSet:
    """Reads all rows of a role at once, so that faults show at the start.

    Args:
        data: Training and held-out rows.
        tokenizer: Tokenizer of the policy, with its chat template.
        seed: Seed of the run, which decides the order of epochs.
        pretraining: Rows of bare text, which keep the knowledge from pretraining.
        max_model_len: Longest sequence of the sampler, in tokens; None: prompts are not sampled.
        measured_from: Prompts of more tokens than this will be counted; None: none will be.
        progress: Called from time to time while rows are read.
        model: Folder of the policy, whose processor cuts images; None: the data has none.

    Raises:
        EmptyDataError: A source has no training row, or all of them are too long.
        DataInvalidError: A file cannot be read, or a row is invalid.
        ModelFolderError: The data has images, and the model takes none.
        PromptTooLongError: A prompt leaves the sampler no room for one token.
    """
    if max_model_len is not None:
        measured_from = max_model_len - 1
    images = DataImages.of_data(data, model)
    section = load_section(
        data,
        "data",
        tokenizer,
        measured_from=measured_from,
        progress=progress,
        images=images,
    )
    sources = section.sources
    if max_model_len is not None:
        renderer = Renderer(tokenizer, images=images)
        for source in sources:
            _check_room(source, data, renderer, max_model_len)
    num_filtered: dict[Split, int] = {
        "train": section.left_out["train"],
        "held_out": section.left_out["held_out"],
    }
    extra: Sequence[Source] = ()
    orders: dict[Split, Order] = {"train": _order(sources, seed, str(seed))}
    held_out = Rows.joined([source.held_out for source in sources])
    if pretraining is not None:
        if images_of_data(pretraining):
            raise DataInvalidError(
                "pretraining_data has images, which texts without a prompt do not show: take its "
                "images out"
            )
        read = load_section(
            pretraining, "pretraining_data", tokenizer, with_identities=len(held_out) > 0
        )
        extra = read.sources
        num_filtered["pretraining"] = read.left_out["train"]
        orders["pretraining"] = _order(extra, seed, f"{seed}/pretraining")
        _check_pretraining(extra, held_out)
    return PromptSet(
        Rows.joined([source.train for source in sources]),
        held_out,
        tokenizer=tokenizer,
        seed=seed,
        pretraining=Rows.joined([source.train for source in extra]) if extra else (),
        orders=orders,
        num_filtered=num_filtered,
        num_repeated=sum(source.num_repeated for source in sources),
        images=images,
    )


def _check_room(source: Source, data: DataSpec, renderer: Renderer, max_model_len: int) -> None:
    """Raises PromptTooLongError if the sampler would have to refuse a prompt later."""
    bounds = [bound for bound in bounds_of(source.spec, data).values() if bound is not None]
    if bounds and min(bounds) < max_model_len:
        return
    rows = Rows.joined([source.train, source.held_out])
    found = long_prompts(rows, renderer, max_model_len - 1)
    if found:
        longest, at = found[0]
        raise PromptTooLongError(
            f"{len(found)} of {len(rows)} prompts have {max_model_len} tokens or more (the "
            f"longest {longest}: {rows[at].where}), but rollout.max_model_len is "
            f"{max_model_len} and a completion needs room: raise rollout.max_model_len, or set "
            f"{source.field}.max_prompt_tokens, which leaves longer prompts out and counts them"
        )


def load_rows(data: DataSpec) -> tuple[list[PromptRow], list[PromptRow]]:
    """Training and held-out rows of every source, of any length; raises as load_prompts does."""
    sources = load_sources(data, "data")
    for source in sources:
        check_not_empty(source)
    return (
        [row for source in sources for row in source.train],
        [row for source in sources for row in source.held_out],
    )


def _order(sources: Sequence[Source], seed: int, shuffle_seed: str) -> Order:
    """The order of the training rows of one source, or of several in their shares."""
    orders = []
    for number, source in enumerate(sources):
        own = shuffle_seed if len(sources) == 1 else f"{shuffle_seed}/source {number}"
        order = epoch_order(
            source.spec.curriculum,
            source.train,
            source.sorting_values,
            seed=seed,
            shuffle_seed=own,
            field=source.field,
        )
        # A faulty curriculum then fails at the start.
        order(0)
        orders.append(Epochs(len(source.train), order))
    if len(orders) == 1:
        return orders[0]
    return Mixture(
        orders,
        [len(source.train) for source in sources],
        [source.weight for source in sources],
        seed,
    )


def _check_pretraining(sources: Sequence[Source], held_out: Rows) -> None:
    for source in sources:
        if source.held_out:
            raise DataInvalidError(
                f"{source.field} holds out {len(source.held_out)} rows, which nothing evaluates: "
                "take held_out_size (or the held-out file or split) out"
            )
        if not held_out:
            continue
        kept_apart = set(held_out.identities())
        for at, identity in enumerate(source.train.identities()):
            if identity in kept_apart:
                raise DataInvalidError(
                    f"{source.train[at].where}: is a held-out prompt of data: take it out of one "
                    "of both"
                )
