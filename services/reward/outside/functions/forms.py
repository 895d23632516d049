"""The ways in which reward functions are written, and how a batch is handed to each.

`trl`: a reward function of TRL's trainers, called by keyword alone.
`openrlhf`: the reward file of OpenRLHF, called as (queries, prompts, labels).
`verl`: a `compute_score` of verl, called by keyword: for each row, or for a batch of them.

A function with a parameter `images` gets those of each prompt. TRL hands columns of its data over,
and there images are Pillow's. The others define nothing: theirs are data URLs.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import io
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

from rolemesh.services.reward.outside.functions import answers
from rolemesh.services.reward.outside.functions.answers import FunctionFaultError

_TRL_NAMES = {"completions", "completion_ids"}
_OPENRLHF_NAMES = {"queries"}
_VERL_NAMES = {"solution_str", "solution_strs"}
_OPENRLHF_ARGUMENTS = 3
"""So many are passed by position."""
IMAGES = "images"
"""Name of the parameter for the images of prompts, in every form."""
_OWN_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns of a data set that TRL passes only under other names."""


class Batch:
    """Rows for a worker, the parts of their rewards, and the metrics that a function logs.

    Example: rows of two completions whose metadata is {"level": 3} and {} have the columns
    {"level": [3, None]}.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], step: int | None) -> None:
        """Takes rows with prompt, completion, query, completion_ids, answer and metadata."""
        self.num_rows = len(rows)
        self.step = step
        self.metrics: dict[str, list[float]] = {}
        self.parts: list[dict[str, float]] = []
        self._rows = rows
        self._metadata: list[dict[str, Any]] = [row["metadata"] for row in rows]

    def texts(self, name: str) -> list[str]:
        """Texts of one field: prompt, completion or query."""
        return [str(row[name]) for row in self._rows]

    def answers(self) -> list[Any]:
        """Expected answers: text, or another JSON value as the data has it; None for none."""
        return [None if row["answer"] == "" else row["answer"] for row in self._rows]

    def prompts(self) -> list[Any]:
        """Each prompt as in the data if its metadata has "prompt", else the rendered text."""
        pairs = zip(self._metadata, self._rows, strict=True)
        return [metadata.get("prompt", row["prompt"]) for metadata, row in pairs]

    def completions(self) -> list[Any]:
        """Each completion as text, or as a list of one message if the prompt is a list."""
        return [
            [{"role": "assistant", "content": row["completion"]}]
            if isinstance(metadata.get("prompt"), list)
            else row["completion"]
            for metadata, row in zip(self._metadata, self._rows, strict=True)
        ]

    def completion_ids(self) -> list[list[int]]:
        """Token ids as sampled."""
        return [list(row["completion_ids"]) for row in self._rows]

    @property
    def has_images(self) -> bool:
        """Whether the data has images. A single row may still have none."""
        return "images" in self._rows[0]

    def images(self) -> list[list[str]]:
        """Images of each prompt, as data URLs."""
        return [list(row["images"]) for row in self._rows]

    def column(self, name: str) -> list[Any]:
        """A column of the data; None for a row that lacks it."""
        return [metadata.get(name) for metadata in self._metadata]

    def columns(self) -> dict[str, list[Any]]:
        """All other columns of the data, and "answer"; None for a row that lacks one."""
        names = dict.fromkeys(name for metadata in self._metadata for name in metadata)
        columns = {name: self.column(name) for name in names if name not in _OWN_COLUMNS}
        given = self.answers()
        if any(answer is not None for answer in given):
            # The metadata has an answer that is no text, and maybe the data's own of every row.
            pairs = zip(self._metadata, given, strict=True)
            columns["answer"] = [metadata.get("answer", answer) for metadata, answer in pairs]
        return columns

    def log_metric(self, name: str, value: Any) -> None:
        """Notes a scalar; of several values with one name the mean counts."""
        shown = f"log_metric({name!r})"
        self.metrics.setdefault(str(name), []).append(answers.number(value, shown))

    def log_extra(self, column: str, values: Any) -> None:
        """Notes a column; if it holds numbers, its mean becomes a metric."""
        listed = values.tolist() if hasattr(values, "tolist") else list(values)
        present = [value for value in listed if value is not None]
        if present and all(isinstance(value, int | float) for value in present):
            shown = f"log_extra({column!r})"
            checked = answers.numbers(listed, self.num_rows, shown, may_be_none=True)
            self.log_metric(column, answers.mean(checked))
        else:
            print(f"log_extra: column {column!r} is no column of numbers: not kept", flush=True)


class Form(Protocol):
    """Passes a batch to a function and reads its answer."""

    name: str
    takes_images: bool
    """Whether the function has a parameter `images`."""

    def call(self, batch: Batch) -> Any:
        """Calls the function; returns its answer, which may be an awaitable."""

    def read(self, given: Any, batch: Batch) -> list[float | None]:
        """Reads the rewards. Their parts and metrics go to the batch.

        Raises:
            FunctionFaultError: There are none.
        """


class TrlForm:
    """f(prompts=, completions=, completion_ids=, <each column>=, trainer_state=, log_...=)."""

    name = "trl"

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._parameters = list(_signature(function).parameters.values())
        self.takes_images = any(p.name == IMAGES for p in self._parameters)

    def call(self, batch: Batch) -> Any:
        """Passes all by keyword; without **kwargs only the parameters that it names."""
        columns = batch.columns()
        if self.takes_images and batch.has_images:
            columns[IMAGES] = opened(batch.images())
        own = {
            "prompts": batch.prompts(),
            "completions": batch.completions(),
            "completion_ids": batch.completion_ids(),
            "trainer_state": SimpleNamespace(global_step=batch.step),
            "log_extra": batch.log_extra,
            "log_metric": batch.log_metric,
        }
        clashing = sorted(own.keys() & columns.keys())
        if clashing:
            raise FunctionFaultError(
                f"the data has columns {clashing}, names of arguments of every reward function",
                "rename them, or leave them out of data.metadata",
            )
        known = {**columns, **own}
        named = {p.name for p in self._parameters if p.kind is not p.VAR_KEYWORD}
        lacking = [
            p.name
            for p in self._parameters
            if p.name not in known
            and p.default is p.empty
            and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        if lacking:
            raise FunctionFaultError(
                f"the function needs {lacking}, but the data has the columns {sorted(columns)}",
                "name them in data.metadata, or give the arguments a default",
            )
        takes_all = any(p.kind is p.VAR_KEYWORD for p in self._parameters)
        return self._function(**(known if takes_all else {n: known[n] for n in named & {*known}}))

    def read(self, given: Any, batch: Batch) -> list[float | None]:
        """A list of numbers or objects, None where the reward does not apply."""
        found, batch.parts = answers.rewards(
            given, batch.num_rows, "the function's list", may_be_none=True
        )
        return found


class OpenRlhfForm:
    """f(queries, prompts, labels) -> {"rewards": ..., "scores": ..., "extra_logs": {...}}."""

    name = "openrlhf"

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        try:
            names = [*inspect.signature(function).parameters]
        except (TypeError, ValueError):
            # What is called by position need not say its parameters.
            names = []
        self.takes_images = IMAGES in names[_OPENRLHF_ARGUMENTS:]

    def call(self, batch: Batch) -> Any:
        """Passes by position: the names of the parameters are the file's own."""
        images = {IMAGES: batch.images()} if self.takes_images and batch.has_images else {}
        return self._function(
            batch.texts("query"), batch.texts("prompt"), batch.answers(), **images
        )

    def read(self, given: Any, batch: Batch) -> list[float | None]:
        """The rewards; scores and extra_logs become metrics."""
        rewards, batch.parts, metrics = answers.openrlhf(given, batch.num_rows)
        for name, value in metrics.items():
            batch.log_metric(name, value)
        return rewards


class VerlForm:
    """compute_score(data_source=, solution_str=, ground_truth=, extra_info=) of each row.

    Batch reward managers call it once: (data_sources=, solution_strs=, ground_truths=,
    extra_infos=), each a list. As with them, other parameters but `images` need a default.
    """

    name = "verl"

    def __init__(self, function: Callable[..., Any]) -> None:
        """Takes a function; raises FunctionFaultError if it needs more than verl gives."""
        self._function = function
        parameters = _signature(function).parameters.values()
        self._takes_batch = any(p.name == "solution_strs" for p in parameters)
        # By the name of the parameter for one row, that of this function.
        known = {
            name: f"{name}s" if self._takes_batch else name
            for name in ("data_source", "solution_str", "ground_truth", "extra_info")
        }
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        needed = [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]
        lacking = sorted({*needed} - {*known.values(), IMAGES})
        if lacking:
            raise FunctionFaultError(
                f"the function needs {lacking}, but verl's form has {[*known.values()]}",
                "give further parameters a default",
            )
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = {p.name for p in parameters}
        self.takes_images = IMAGES in named
        self._needs_images = IMAGES in needed
        self._passed = {
            name: parameter for name, parameter in known.items() if takes_all or parameter in named
        }
        self._needs_source = known["data_source"] in needed

    def call(self, batch: Batch) -> Any:
        """Passes by keyword what it names; all, where it takes further ones."""
        columns: dict[str, list[Any]] = {
            "data_source": batch.column("data_source"),
            "solution_str": batch.texts("completion"),
            "ground_truth": batch.answers(),
            # As verl has it for rows without.
            "extra_info": [{} if one is None else one for one in batch.column("extra_info")],
        }
        if self._needs_source and None in columns["data_source"]:
            raise FunctionFaultError(
                f"row {columns['data_source'].index(None)} has no data_source",
                "add that column to the data, name it in data.metadata if that is set, or give the "
                "parameter a default",
            )
        passed = {parameter: columns[name] for name, parameter in self._passed.items()}
        if self.takes_images and batch.has_images:
            passed[IMAGES] = batch.images()
        elif self._needs_images:
            raise FunctionFaultError(
                "the function needs 'images', but the data has none",
                "give the data images, or the parameter a default",
            )
        if self._takes_batch:
            return self._function(**passed)
        given = [
            self._function(**{name: column[row] for name, column in passed.items()})
            for row in range(batch.num_rows)
        ]
        return _all_of(given) if any(map(inspect.isawaitable, given)) else given

    def read(self, given: Any, batch: Batch) -> list[float | None]:
        """A number or an object a row."""
        found, batch.parts = answers.rewards(
            given, batch.num_rows, "the function's list", may_be_none=False
        )
        return found


def opened(images: Sequence[Sequence[str]]) -> list[list[Any]]:
    """Images as Pillow's, turned as EXIF says, as `datasets` decodes a column of them for TRL.

    Args:
        images: Data URLs. Equal ones, as of samples of one prompt, are decoded once.
    """
    # Here: most functions take no images, and their processes start without Pillow.
    from PIL import Image, ImageOps

    def one(url: str) -> Any:
        data = base64.b64decode(url.partition(",")[2])
        return ImageOps.exif_transpose(Image.open(io.BytesIO(data)))

    by_url = {url: one(url) for url in dict.fromkeys(url for row in images for url in row)}
    return [[by_url[url] for url in row] for row in images]


async def _all_of(given: Sequence[Awaitable[Any]]) -> list[Any]:
    """Waits for the scores of all rows at once. What is left after an error is ended."""
    tasks = [asyncio.ensure_future(one) for one in given]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def form_of(function: Any, form: str) -> Form:
    """The form of a function: the given one, or for "auto" the one that its parameters show.

    Raises:
        FunctionFaultError: It cannot be called, or its parameters fit no form.
    """
    if not callable(function):
        raise FunctionFaultError(f"a {type(function).__name__}", "name a function")
    made: dict[str, Callable[[Any], Form]] = {
        "trl": TrlForm,
        "openrlhf": OpenRlhfForm,
        "verl": VerlForm,
    }
    if form in made:
        return made[form](function)
    names = set(_signature(function).parameters)
    shown = {"trl": _TRL_NAMES, "openrlhf": _OPENRLHF_NAMES, "verl": _VERL_NAMES}
    fitting = [name for name, own in shown.items() if names & own]
    if len(fitting) != 1:
        raise FunctionFaultError(
            f"the parameters {sorted(names)}, which do not tell how it is called",
            "TRL's have 'completions', OpenRLHF's 'queries', verl's 'solution_str' or "
            "'solution_strs': set form to 'trl', 'openrlhf' or 'verl'",
        )
    return made[fitting[0]](function)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise FunctionFaultError(
            f"parameters that are not known ({error})", "set form to 'openrlhf', or wrap it"
        ) from error
