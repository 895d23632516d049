"""Rows of an evaluated task, each with a key by which two evaluations find the same prompt."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolemesh.engine.data import reasoning_gym
from rolemesh.engine.data.prompts import Prompt, load_prompts, load_rows
from rolemesh.engine.data.rendering.rendering import ChatTokenizer
from rolemesh.engine.data.rows import DataInvalidError, PromptRow
from rolemesh.engine.images.decoding import ImageReader
from rolemesh.engine.images.openai_parts import with_urls
from rolemesh.engine.images.prompt_images import ImageInvalidError, data_url
from rolemesh.engine.images.references import data_of, shown
from rolemesh.engine.specs import ReasoningGymSpec, images_of_data
from rolemesh.engine.specs.evaluation import EvaluatedTaskSpec

_KEY_BYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedRow:
    """A prompt that is asked."""

    key: str
    """Equal for equal prompts with equal answers, whatever tokenizer renders them."""
    row: PromptRow
    prompt_id: int
    """That of the row in a run of the task's data."""
    max_image_bytes: int | None = None
    """Most bytes of an image of the row; None: the task's data has no images."""

    def image_urls(self) -> tuple[str, ...] | None:
        """The images as data URLs, whose files are read now; None: the task's data has none.

        Raises:
            ImageInvalidError: One cannot be read any more.
        """
        if self.max_image_bytes is None:
            return None
        return tuple(data_url(data) for data in _image_files(self.row, self.max_image_bytes))

    def messages(self) -> list[dict[str, Any]]:
        """The turns in the form of OpenAI's protocol, with the images in them.

        Raises:
            ImageInvalidError: One cannot be read any more.
        """
        return with_urls(self.row.messages, self.image_urls() or ())

    def prompt(self, text: str, tokens: Sequence[int] = ()) -> Prompt:
        """The row as an environment or an agent is told of it, as in a run.

        Args:
            text: The rendered prompt.
            tokens: Its token ids; an agent gets none.
        """
        return Prompt(
            prompt_id=self.prompt_id,
            text=text,
            tokens=tokens,
            answer=self.row.answer,
            metadata=self.row.metadata,
            messages=tuple(self.messages()),
        )


def rows_of(
    task: EvaluatedTaskSpec, tokenizer: ChatTokenizer | None, model: Path | None = None
) -> list[EvaluatedRow]:
    """The held-out rows of a task, in the order of a run's own evaluation.

    Args:
        task: Which.
        tokenizer: Measures rows that the data bounds; None: a bound is refused.
        model: Folder of that tokenizer, whose processor measures images, where the data has any.

    Raises:
        ValueError: They cannot be read, there are none, or fewer than wanted; or an image is beyond
            a bound.
    """
    num_train, rows = _held_out(task, tokenizer, model)
    wanted = len(rows) if task.num_prompts is None else task.num_prompts
    if not rows:
        raise DataInvalidError(
            f"task {task.name}: its data holds out no rows: give held_out_size, held_out_path or "
            "held_out_split"
        )
    if wanted > len(rows):
        raise DataInvalidError(
            f"task {task.name}: {wanted} prompts are wanted, but its data holds out {len(rows)}: "
            "ask for fewer"
        )
    texts = [row for row in rows[:wanted] if row.text is not None]
    if texts:
        raise DataInvalidError(f"task {task.name}: {texts[0].where} is text without a prompt")
    max_image_bytes = _checked_images(task, rows[:wanted])
    return _with_keys(rows[:wanted], num_train, max_image_bytes)


def _held_out(
    task: EvaluatedTaskSpec, tokenizer: ChatTokenizer | None, model: Path | None
) -> tuple[int, Sequence[PromptRow]]:
    """How many training rows there are, which are numbered first, and the held-out rows."""
    data = task.data
    if isinstance(data, ReasoningGymSpec) and data.max_prompt_tokens is None:
        return _counted(*reasoning_gym.load(data))
    if tokenizer is not None:
        # The order of epochs has a seed, held-out rows have none.
        prompts = load_prompts(data, tokenizer=tokenizer, seed=0, model=model)
        return prompts.size("train"), list(prompts.every("held_out"))
    if getattr(data, "max_prompt_tokens", None) or getattr(data, "max_row_tokens", None):
        raise DataInvalidError(
            f"task {task.name}: its data leaves out rows by their tokens (max_prompt_tokens, "
            "max_row_tokens), and there is no tokenizer to count them: give --tokenizer"
        )
    return _counted(*load_rows(data))


def _counted(
    train: Sequence[PromptRow], held_out: Sequence[PromptRow]
) -> tuple[int, Sequence[PromptRow]]:
    return len(train), held_out


def _checked_images(task: EvaluatedTaskSpec, rows: Sequence[PromptRow]) -> int | None:
    """Reads the header of each image; returns the most bytes that one may have.

    Of a mixture the widest bounds count.

    Raises:
        DataInvalidError: An image cannot be read, or is beyond a bound.
    """
    found = images_of_data(task.data)
    if not found:
        return None
    max_bytes = max(one.max_bytes for one in found)
    with ImageReader(max_pixels=max(one.max_pixels for one in found)) as reader:
        for row in rows:
            try:
                for number, data in enumerate(_image_files(row, max_bytes)):
                    reader.size(data, f"images[{number}] {shown(row.images[number])}")
            except ImageInvalidError as error:
                raise DataInvalidError(f"task {task.name}: {row.where}: {error}") from error
    return max_bytes


def _image_files(row: PromptRow, max_bytes: int) -> Iterator[bytes]:
    folder = Path(row.image_folder) if row.image_folder else None
    return (data_of(reference, folder, max_bytes) for reference in row.images)


def _with_keys(
    rows: Sequence[PromptRow], num_train: int, max_image_bytes: int | None
) -> list[EvaluatedRow]:
    seen: Counter[str] = Counter()
    keyed = []
    for prompt_id, row in enumerate(rows, start=num_train):
        content = row.identity + b"\0" + row.answer.encode("utf-8", "surrogatepass")
        key = hashlib.sha256(content).hexdigest()[: 2 * _KEY_BYTES]
        seen[key] += 1
        # A prompt that is there twice is two rows.
        own = key if seen[key] == 1 else f"{key}#{seen[key]}"
        keyed.append(
            EvaluatedRow(key=own, row=row, prompt_id=prompt_id, max_image_bytes=max_image_bytes)
        )
    return keyed
