"""Rows of a batch in the form that outside rewards take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rolemesh.engine.experience import Experience
from rolemesh.engine.images.prompt_images import ImageInvalidError, data_url, images_of
from rolemesh.engine.model_folders.pretrained import load_tokenizer
from rolemesh.engine.rewards.sources import RewardInvalidError
from rolemesh.engine.specs.columns import IMAGES
from rolemesh.rpc.limits import check_json
from rolemesh.services.reward.outside.base import RewardRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RowReader:
    """Makes rows of a batch, on the compute thread.

    Example: prompt "2+2=", completion "4" of the tokens 5 and 2, the last one "</s>": query is
    "2+2=4</s>" with a tokenizer, else "2+2=4".
    """

    def __init__(self, tokenizer: str | None) -> None:
        """Loads the policy's tokenizer from a folder; None: queries have no special tokens.

        Raises:
            NoTokenizerError: There is no tokenizer in the folder.
        """
        self._tokenizer: PreTrainedTokenizerBase | None = None
        if tokenizer is not None:
            self._tokenizer = load_tokenizer(Path(tokenizer), field="source.tokenizer")

    def read(self, batch: Experience) -> list[RewardRow]:
        """The rows of a batch with the columns TRAJECTORY_COLUMNS, and IMAGES where it has them.

        Raises:
            RewardInvalidError: The metadata of a row is no JSON object, or its images cannot be
                read; the text names the row.
        """
        tokens = [row.tolist() for row in batch["tokens"].rows()]
        lengths = batch["prompt_lengths"].values.tolist()
        texts = zip(
            batch["prompt_text"].strings(),
            batch["completion_text"].strings(),
            batch["answer"].strings(),
            batch["metadata"].strings(),
            tokens,
            lengths,
            _images(batch),
            strict=True,
        )
        rows = []
        for index, (prompt, completion, answer, metadata, ids, length, shown) in enumerate(texts):
            completion_ids = ids[length:]
            rows.append(
                RewardRow(
                    prompt=prompt,
                    completion=completion,
                    query=prompt + self._with_special_tokens(completion, completion_ids),
                    prompt_tokens=tuple(ids[:length]),
                    completion_tokens=tuple(completion_ids),
                    answer=answer,
                    metadata=_metadata(metadata, index),
                    images=shown,
                )
            )
        return rows

    def _with_special_tokens(self, completion: str, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return completion
        # The text of the prompt has its special tokens; the text of the completion has none.
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def _images(batch: Experience) -> Sequence[tuple[str, ...] | None]:
    """The images of each row as data URLs; None where the batch has no such column."""
    if IMAGES not in batch:
        return [None] * len(batch)
    # Samples of one prompt have one text.
    urls: dict[str, tuple[str, ...]] = {}
    found = []
    for row, text in enumerate(batch[IMAGES].strings()):
        if text not in urls:
            try:
                urls[text] = tuple(data_url(one.data) for one in images_of(text))
            except ImageInvalidError as error:
                raise RewardInvalidError(f"the images of row {row}: {error}") from error
        found.append(urls[text])
    return found


def _metadata(text: str, row: int) -> dict[str, object]:
    try:
        check_json(text, f"the metadata of row {row}")
        value = json.loads(text or "{}")
    except ValueError as error:
        raise RewardInvalidError(f"the metadata of row {row} is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise RewardInvalidError(
            f"the metadata of row {row} is {type(value).__name__}: give a JSON object"
        )
    return value
