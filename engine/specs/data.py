"""Specs of data: where prompts come from, and what is given beside them.

A source is a file, a folder or a task; a mixture draws from several. A service reads local files
alone, and no code of a data set is run.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import Counter
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rolemesh.engine.specs.base import Spec
from rolemesh.engine.specs.named import CODE_PATTERN, Names

HELD_OUT_SPLITS = ("test", "validation", "valid", "dev")
"""Splits that `rolemesh init` takes as held-out rows, the likeliest first."""


class ColumnsSpec(Spec):
    """Names of the columns that are read.

    None takes the column that is called like the field, where there is one and no other field
    names it. A column that is named here has to exist. A name that no column has leads into an
    object at its dots: "reward_model.ground_truth".
    """

    prompt: str | None = None
    """What is answered: text, or messages with role and content that end before the answer."""
    messages: str | None = None
    """A whole conversation: the prompt is what stands before the first assistant turn."""
    text: str | None = None
    """Text without a prompt, to keep what pretraining taught."""
    answer: str | None = None
    """Expected answer: any JSON value; of a list each item is right."""
    completion: str | None = None
    """Given completion: text, or messages that begin with an assistant turn."""
    chosen: str | None = None
    """The better of two completions."""
    rejected: str | None = None
    """The worse of two completions."""
    label: str | None = None
    """Whether the completion is wanted: a boolean, 0 or 1."""
    images: str | None = None
    """Images of the prompt, one or a list; read only where the source has `images`."""

    @model_validator(mode="after")
    def _check_distinct(self) -> Self:
        named = Counter(name for _, name in self if name is not None)
        for column, count in named.items():
            if count > 1:
                fields = ", ".join(field for field, name in self if name == column)
                raise ValueError(
                    f"columns {fields} all name the column {column!r}: a column has one meaning"
                )
        return self


class SortedCurriculumSpec(Spec):
    """Every epoch runs through the rows by a value of their metadata; ties are shuffled."""

    type: Literal["sorted"] = "sorted"
    by: str
    """Key of the metadata, a dot leads into an object ("metadata.difficulty"); the values are all
    numbers or all texts."""
    ascending: bool = True
    """Whether the lowest value comes first."""


class PythonCurriculumSpec(Spec):
    """A function of the user's decides the order of each epoch.

    It is called as `function(metadata, epoch, seed)`: a list with one dict a row, the number of
    the epoch from 0, the seed of the run. It returns every row number once, in the order of the
    epoch, and must be a pure function of its arguments: every rank calls it.
    """

    type: Literal["python"] = "python"
    function: Annotated[str, Names("code")] = Field(pattern=CODE_PATTERN)
    """"path/to/file.py:name", "module:name" or an entry point, as the actor's service finds it."""


CurriculumSpec = Annotated[SortedCurriculumSpec | PythonCurriculumSpec, Field(discriminator="type")]


class BoundedSpec(Spec):
    """Rows that are too long are left out before anything is shuffled, and counted."""

    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longest rendered prompt in tokens; None measures none."""
    max_row_tokens: int | None = Field(default=None, ge=2)
    """Longest prompt with the longest of its given completions, in tokens; None measures none.
    A text without a prompt is cut there instead of being left out."""


class ImagesSpec(Spec):
    """Images that rows have in the column `images`, and their bounds.

    One that is beyond a bound is an error that names its row; none is left out or made smaller.
    """

    folder: Path | None = None
    """Folder below which paths in the column lie; None: the column holds bytes or data URLs."""
    max_pixels: int = Field(default=1 << 24, ge=1, le=1 << 26)
    """Most pixels of an image, width times height; checked before it is decoded."""
    max_bytes: int = Field(default=8 << 20, ge=1, le=128 << 20)
    """Most bytes of an image's file."""
    max_per_prompt: int = Field(default=8, ge=1)
    """Most images of a row."""


class SourceSpec(BoundedSpec):
    """One source of rows."""

    curriculum: CurriculumSpec | None = None
    """Order of the training rows of an epoch; None shuffles each epoch anew."""


class ReasoningGymSpec(SourceSpec):
    """Prompts from a reasoning-gym task, made on the spot and verifiable."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    """Registered name of the task, e.g. "chain_sum"."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the task's config class."""
    train_size: int = Field(default=4096, ge=0)
    """Number of training prompts."""
    held_out_size: int = Field(default=128, ge=0)
    """Held-out prompts, never equal to a training prompt."""
    seed: int = Field(default=0, ge=0)
    """Seed of the task's generator."""
    question_template: str = "{question}"
    """Text of the user turn; `{question}` is replaced, and so are keys of the row's metadata."""
    system_prompt: str | None = None
    """Text of the system turn; None leaves the turn out."""
    assistant_prefix: str = ""
    """Text that the assistant's turn already begins with, filled like question_template."""


class StoredRowsSpec(SourceSpec):
    """Rows that lie on a disk, one record each."""

    columns: ColumnsSpec = ColumnsSpec()
    metadata: tuple[str, ...] | None = None
    """Columns that become the row's metadata; None takes all that have no other meaning."""
    system_prompt: str | None = None
    """Text of the system turn of rows that bring none; None leaves the turn out."""
    assistant_prefix: str = ""
    """Text that the assistant's turn already begins with, e.g. "<think>"; a part of the prompt."""
    held_out_size: int = Field(default=0, ge=0)
    """Prompts that are drawn from the training rows and held out; each distinct."""
    seed: int = Field(default=0, ge=0)
    """Seed of the draw of held-out rows."""
    images: ImagesSpec | None = None
    """Images of the prompts; None: there are none, and a column `images` is metadata."""

    @abstractmethod
    def held_out_field(self) -> str | None:
        """The field that names given held-out rows, None when it is not set."""

    @model_validator(mode="after")
    def _check_held_out(self) -> Self:
        field = self.held_out_field()
        if field is not None and self.held_out_size:
            raise ValueError(
                f"{field} is set and held_out_size is {self.held_out_size}: held-out prompts are "
                "either given or drawn; take one out"
            )
        return self

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        if self.columns.images is not None and self.images is None:
            raise ValueError(
                f"columns.images is {self.columns.images!r}, but images is not given: give it, "
                "with {} for its defaults, or take the column out"
            )
        return self


class PathSpec(StoredRowsSpec):
    """Rows of files."""

    path: Path
    """File or folder of the training rows."""
    held_out_path: Path | None = None
    """File or folder of the held-out rows."""

    def held_out_field(self) -> str | None:
        """See StoredRowsSpec."""
        return None if self.held_out_path is None else "held_out_path"


class JsonlSpec(PathSpec):
    """JSON lines: one object a line."""

    type: Literal["jsonl"] = "jsonl"


class ParquetSpec(PathSpec):
    """Parquet: a file, or a folder whose files are read in the order of their names."""

    type: Literal["parquet"] = "parquet"


class HfDatasetSpec(StoredRowsSpec):
    """A Hugging Face data set that lies in a folder, or at the hub.

    A folder is either what `save_to_disk` wrote (one split or several), or a copy of a data set's
    repository with Parquet files that are named after their splits.
    """

    type: Literal["hf_dataset"] = "hf_dataset"
    path: Path
    """Folder of the data set. In a recipe also hf:ORG/NAME, hf:ORG/NAME:CONFIG or
    hf:ORG/NAME:CONFIG:SPLIT, each with @REVISION after the NAME if need be: the Parquet files of a
    data set of the Hugging Face hub, which the command line fetches."""
    name: str | None = Field(default=None, pattern=r"^[\w.-]*\w[\w.-]*$")
    """Folder of one configuration inside it, where a repository has several."""
    split: str = "train"
    """Split of the training rows; leave it out where the folder holds one split alone."""
    held_out_split: str | None = None
    """Split of the held-out rows."""

    @model_validator(mode="before")
    @classmethod
    def _take_split(cls, data: Any) -> Any:
        """A name at the hub may end with the split."""
        if isinstance(data, dict) and "split" not in data:
            parts = str(data.get("path", "")).split(":")
            if parts[0] == "hf" and len(parts) == 4:
                return {**data, "split": parts[3]}
        return data

    def held_out_field(self) -> str | None:
        """See StoredRowsSpec."""
        return None if self.held_out_split is None else "held_out_split"


def folder_of_split(file: PurePath, split: str) -> PurePath | None:
    """The folder that holds a split of which a Parquet file is named to be a part; None: it is not.

    Named so are train.parquet, train-00000-of-00002.parquet and train/*.parquet.
    """
    if file.stem == split or re.fullmatch(rf"{re.escape(split)}-\d+-of-\d+.*", file.stem):
        return file.parent
    return file.parent.parent if file.parent.name == split else None


AnySourceSpec = Annotated[
    ReasoningGymSpec | JsonlSpec | ParquetSpec | HfDatasetSpec, Field(discriminator="type")
]


class MixedSourceSpec(Spec):
    """One source of a mixture."""

    data: AnySourceSpec
    """The source of rows."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the training rows, relative to the other weights."""


class MixtureSpec(BoundedSpec):
    """Several sources, drawn from in fixed shares; each runs through epochs of its own."""

    type: Literal["mixture"] = "mixture"
    sources: tuple[MixedSourceSpec, ...] = Field(min_length=1)
    """The sources with their weights."""


DataSpec = Annotated[
    ReasoningGymSpec | JsonlSpec | ParquetSpec | HfDatasetSpec | MixtureSpec,
    Field(discriminator="type"),
]


def images_of_source(spec: SourceSpec) -> ImagesSpec | None:
    """The section `images` of a source; None where its rows have none."""
    return spec.images if isinstance(spec, StoredRowsSpec) else None


def images_of_data(data: DataSpec) -> list[ImagesSpec]:
    """The sections `images` of a data section; several where it is a mixture."""
    sources = [one.data for one in data.sources] if isinstance(data, MixtureSpec) else [data]
    return [found for source in sources if (found := images_of_source(source)) is not None]
