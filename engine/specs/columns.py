"""Columns of experience: the kind and dtype of each, and which of them are read or made together.

The comments of the protos promise the same to services of any make. Columns with the rewards of one
source begin with `SOURCE_PREFIX`. Any other column, e.g. of a client, may have any kind and dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from rolemesh.engine.layout.payload import MAX_WIDTH as MAX_WIDTH


class ColumnType(NamedTuple):
    """How the values of a column relate to rows, and what they are."""

    kind: Literal["row", "sequence", "completion", "text"]
    """One value a row, one for each token of prompt and completion, one for each completion token,
    or the bytes of a text a row."""
    dtype: Literal["int64", "int32", "float32", "bool", "uint8"]


_TEXT = ColumnType("text", "uint8")

COLUMNS: Final[Mapping[str, ColumnType]] = {
    "tokens": ColumnType("sequence", "int64"),
    "prompt_lengths": ColumnType("row", "int64"),
    "logprobs": ColumnType("completion", "float32"),
    "loss_mask": ColumnType("completion", "bool"),
    "policy_versions": ColumnType("completion", "int64"),
    "prompt_ids": ColumnType("row", "int64"),
    "sample_indexes": ColumnType("row", "int64"),
    "finished": ColumnType("row", "bool"),
    "prompt_text": _TEXT,
    "completion_text": _TEXT,
    "answer": _TEXT,
    "metadata": _TEXT,
    "environment_rewards": ColumnType("row", "float32"),
    "session": _TEXT,
    "pair_ids": ColumnType("row", "int64"),
    "preference": ColumnType("row", "float32"),
    "values": ColumnType("completion", "float32"),
    "reference_logprobs": ColumnType("completion", "float32"),
    "proximal_logprobs": ColumnType("completion", "float32"),
    "teacher_logprobs": ColumnType("completion", "float32"),
    # These two have K elements a token.
    "teacher_logprobs_top_ids": ColumnType("completion", "int32"),
    "teacher_logprobs_top": ColumnType("completion", "float32"),
    "rewards": ColumnType("row", "float32"),
    "costs": ColumnType("row", "float32"),
    "is_judged": ColumnType("row", "bool"),
    "advantages": ColumnType("completion", "float32"),
    "returns": ColumnType("completion", "float32"),
    "token_rewards": ColumnType("completion", "float32"),
    "kl_reference_point": ColumnType("row", "float32"),
    # The first two have K elements a token.
    "target_ids": ColumnType("completion", "int32"),
    "token_weights": ColumnType("completion", "float32"),
    # It has a number for each layer with experts and each expert of a token.
    "routes": ColumnType("sequence", "uint8"),
    "sequence_ratio_mask": ColumnType("completion", "float32"),
    # Of the prompt; see `engine/images/prompt_images.py`.
    "images": _TEXT,
}

INPUT_COLUMNS: Final = ("tokens", "prompt_lengths")
"""What every model reads: tokens of prompt and completion, and where the completion begins."""

TEXT_COLUMNS: Final = ("prompt_text", "completion_text", "answer", "metadata")

TRAJECTORY_COLUMNS: Final = (*INPUT_COLUMNS, *TEXT_COLUMNS)
"""What a reward may read of a trajectory."""

ROLLOUT_COLUMNS: Final = (
    *INPUT_COLUMNS,
    "logprobs",
    "loss_mask",
    "policy_versions",
    "prompt_ids",
    "sample_indexes",
    "finished",
    *TEXT_COLUMNS,
)
"""What sampling makes."""

ENVIRONMENT_REWARDS: Final = "environment_rewards"
"""What sampling makes besides where the data has an environment."""

SESSION: Final = "session"
"""What sampling makes besides where agents play: what people are told of each row's session."""

DATA_COLUMNS: Final = (*INPUT_COLUMNS, "loss_mask", "prompt_ids", *TEXT_COLUMNS)
"""What a row of data that is read and not sampled comes to."""

PAIR_COLUMNS: Final = ("pair_ids", "preference")
"""Rows with equal pair_ids belong together (-1: to no pair); preference is 1 for the chosen or
wanted, -1 for the rejected or unwanted, and 0 for a row that is neither."""

PROXIMAL_LOGPROBS: Final = "proximal_logprobs"
"""Log-probs under the weights that a step begins with."""

TEACHER_LOGPROBS: Final = "teacher_logprobs"
"""The teacher's log-probs of the tokens that the policy sampled."""


def top_ids_column(logprobs: str) -> str:
    """The tokens that a model finds likeliest at each place, by the column of its log-probs."""
    return f"{logprobs}_top_ids"


def top_column(logprobs: str) -> str:
    """The log-probs of these."""
    return f"{logprobs}_top"


def weights_column(logprobs: str) -> str:
    """What one of several teachers counts for in each row (row, float32)."""
    return f"{logprobs}_weights"


def teacher_voices(number: int, column: str = TEACHER_LOGPROBS) -> tuple[str, ...]:
    """Columns with the log-probs of each of so many teachers of a row.

    Example: of 2 teachers teacher_logprobs and teacher_logprobs_2.
    """
    return (column, *(f"{column}_{voice}" for voice in range(2, number + 1)))


TARGET_IDS: Final = "target_ids"
"""Token ids of a caller to score at each place, int32 of width K, beside the row's next token."""

TOKEN_WEIGHTS: Final = "token_weights"
"""What each scored token counts for, float32, of the same width."""

RATIO_MASK: Final = "sequence_ratio_mask"
"""What a token counts for in the ratio of its row, float32, >= 0."""

ROUTES: Final = "routes"
"""The experts that each token went through when it was sampled, by layer."""

NO_ROUTE: Final = 255
"""Stands there for each expert of a token whose route is not known: it goes its own way."""

IMAGES: Final = "images"
"""The images of each row's prompt, where the data has any: their bytes and grids."""

IS_JUDGED: Final = "is_judged"
"""False in the rows that no reward could be had for, which the step leaves out. A batch without the
column is judged in full."""

SOURCE_PREFIX: Final = "reward/"
"""Beginning of the names of the columns (row, float32) with the rewards of one source, before its
weight: NaN where it does not apply, or failed."""


def source_column(name: str) -> str:
    """Column of the rewards of the source of that name, before its weight."""
    return f"{SOURCE_PREFIX}{name}"
