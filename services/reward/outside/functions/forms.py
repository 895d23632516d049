"""The two ways in which reward functions are written, and how a batch is handed to each.

`trl`: a reward function of TRL's trainers, called by keyword alone.
`openrlhf`: the reward file of OpenRLHF, called as (queries, prompts, labels).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

from rolemesh.services.reward.outside.functions import answers
from rolemesh.services.reward.outside.functions.answers import FunctionFaultError

_TRL_NAMES = {"completions", "completion_ids"}
_OPENRLHF_NAMES = {"queries"}
_OWN_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns of a data set that TRL passes only under other names."""


class Batch:
    """Rows for a worker, and the metrics that a function logs about them.

    Example: rows of two completions whose metadata is {"level": 3} and {} have the columns
    {"level": [3, None]}.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], step: int | None) -> None:
        """Takes rows with prompt, completion, query, completion_ids, answer and metadata."""
        self.num_rows = len(rows)
        self.step = step
        self.metrics: dict[str, list[float]] = {}
        self._rows = rows
        self._metadata: list[dict[str, Any]] = [row["metadata"] for row in rows]

    def texts(self, name: str) -> list[str]:
        """Texts of one field: prompt or query."""
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

    def columns(self) -> dict[str, list[Any]]:
        """All other columns of the data, and "answer"; None for a row that lacks one."""
        names = dict.fromkeys(name for metadata in self._metadata for name in metadata)
        columns = {
            name: [metadata.get(name) for metadata in self._metadata]
            for name in names
            if name not in _OWN_COLUMNS
        }
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

    def call(self, batch: Batch) -> Any:
        """Calls the function; returns its answer, which may be an awaitable."""

    def read(self, given: Any, batch: Batch) -> list[float | None]:
        """Reads the rewards; metrics go to the batch. FunctionFaultError if there are none."""


class TrlForm:
    """f(prompts=, completions=, completion_ids=, <each column>=, trainer_state=, log_...=)."""

    name = "trl"

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._parameters = list(_signature(function).parameters.values())

    def call(self, batch: Batch) -> Any:
        """Passes all by keyword; without **kwargs only the parameters that it names."""
        columns = batch.columns()
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
        """A list of numbers, None where the reward does not apply."""
        return answers.numbers(given, batch.num_rows, "the function's list", may_be_none=True)


class OpenRlhfForm:
    """f(queries, prompts, labels) -> {"rewards": ..., "scores": ..., "extra_logs": {...}}."""

    name = "openrlhf"

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def call(self, batch: Batch) -> Any:
        """Passes by position: the names of the parameters are the file's own."""
        return self._function(batch.texts("query"), batch.texts("prompt"), batch.answers())

    def read(self, given: Any, batch: Batch) -> list[float | None]:
        """The rewards; scores and extra_logs become metrics."""
        rewards, metrics = answers.openrlhf(given, batch.num_rows)
        for name, value in metrics.items():
            batch.log_metric(name, value)
        return rewards


def form_of(function: Any, form: str) -> Form:
    """The form of a function: the given one, or for "auto" the one that its parameters show.

    Raises:
        FunctionFaultError: It cannot be called, or its parameters fit no form.
    """
    if not callable(function):
        raise FunctionFaultError(f"a {type(function).__name__}", "name a function")
    if form == "trl":
        return TrlForm(function)
    if form == "openrlhf":
        return OpenRlhfForm(function)
    names = set(_signature(function).parameters)
    is_trl, is_openrlhf = bool(names & _TRL_NAMES), bool(names & _OPENRLHF_NAMES)
    if is_trl == is_openrlhf:
        raise FunctionFaultError(
            f"the parameters {sorted(names)}, which do not tell how it is called",
            "TRL's have 'completions', OpenRLHF's have 'queries': set form to 'trl' or 'openrlhf'",
        )
    return TrlForm(function) if is_trl else OpenRlhfForm(function)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise FunctionFaultError(
            f"parameters that are not known ({error})", "set form to 'openrlhf', or wrap it"
        ) from error
