"""Where the rows of a run stay until their turn: in memory, or in a file where they are many.

Of each row only facts are always at hand: which columns it has, its length, and where it lies.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, BinaryIO, overload

import msgspec
import numpy
from numpy.typing import NDArray

from rolemesh.engine.data.rows import DataInvalidError, PromptRow

ROWS_AT_ONCE = 1024
"""Rows that are read, measured and written together."""

ROWS_WITH_IMAGES_AT_ONCE = 32
"""The same of rows that may hold images: each of these may have megabytes."""

UNMEASURED = -(2**31)
"""Tokens of a row of which nobody asked the length."""

Measure = Callable[[Sequence[PromptRow]], list[tuple[int, int, bool]]]
"""Of each row: the tokens of its prompt, those of the whole row, and whether it is short enough. A
number below 0 is a bound: there are at most so many."""

_IDENTITY_BYTES = 16
_BITS = {"answer": 1, "completion": 2, "chosen": 4, "rejected": 8, "is_wanted": 16, "text": 32}
"""Bit of each field that a row may lack."""
_IS_SHORT = 64
FACTS = {"bits": "B", "prompt_tokens": "i", "row_tokens": "i", "identities": "B", "ends": "q"}
"""Type of each array of facts, as `array` names it."""
_ENCODER = json.JSONEncoder(
    ensure_ascii=False,
    separators=(",", ":"),
    # A table may hold a date in a turn: a template writes it as this text too.
    default=str,
)
_QUICK = msgspec.json.Encoder()
"""Writes the same bytes for texts, whole numbers, true, false and null, in a tenth of the time."""


class RowStore:
    """Rows by their number, in the order in which they were added.

    Invariant: a row that was added never changes, and neither do the facts of it. A file is read by
    its descriptor: it may be renamed and removed meanwhile, but not be written into.

    Example: after `add([a, b], ...)` on an empty store, `store[1]` equals b.
    """

    def __init__(self, file: BinaryIO | None = None) -> None:
        """Takes an empty file, open for both reading and writing; None keeps rows in memory."""
        self._file = file
        self._rows: list[PromptRow] = []
        self._facts = {name: array(code) for name, code in FACTS.items()}

    @classmethod
    def opened(cls, file: BinaryIO, facts: Mapping[str, NDArray[Any]]) -> RowStore:
        """The store of which `facts` is all that `facts` gave, and `file` the file."""
        store = cls(file)
        for name, code in FACTS.items():
            store._facts[name] = array(code, facts[name].tobytes())
        return store

    def facts(self) -> dict[str, NDArray[Any]]:
        """All facts of all rows, as arrays that `opened` takes."""
        return {name: numpy.array(values) for name, values in self._facts.items()}

    def fact(self, name: str) -> NDArray[Any]:
        """One of them, with a value for each row."""
        return numpy.array(self._facts[name])

    def __len__(self) -> int:
        return len(self._facts["bits"])

    def __getitem__(self, number: int) -> PromptRow:
        if self._file is None:
            return self._rows[number]
        ends = self._facts["ends"]
        start = ends[number - 1] if number else 0
        text = os.pread(self._file.fileno(), ends[number] - start, start)
        try:
            return _decoded(text)
        except ValueError as error:
            raise DataInvalidError(
                f"row {number} cannot be read again from {self._file.name} ({error}): something "
                "wrote into that file; remove it and start again"
            ) from error

    def add(
        self, rows: Sequence[PromptRow], measure: Measure | None, *, with_identities: bool = False
    ) -> None:
        """Keeps rows behind those that are there, and what `measure` finds of them.

        Args:
            rows: The rows.
            measure: Finds their lengths; None: all are short enough.
            with_identities: Whether rows are compared by their prompts later; the same for all.
        """
        found = measure(rows) if measure else [(UNMEASURED, UNMEASURED, True)] * len(rows)
        facts = self._facts
        for row, (prompt_tokens, row_tokens, is_short) in zip(rows, found, strict=True):
            facts["prompt_tokens"].append(prompt_tokens)
            facts["row_tokens"].append(row_tokens)
            facts["bits"].append(_bits(row) | (_IS_SHORT if is_short else 0))
            if with_identities:
                facts["identities"].frombytes(_identity(row))
        if self._file is None:
            self._rows += rows
            return
        texts = [_encoded(row) for row in rows]
        start = facts["ends"][-1] if facts["ends"] else 0
        facts["ends"].extend(list(accumulate(map(len, texts), initial=start))[1:])
        self._file.write(b"".join(texts))
        self._file.flush()

    def join(self, file: BinaryIO, facts: Mapping[str, bytes]) -> None:
        """Adds the rows of another store: its file, and its facts as bytes."""
        assert self._file is not None
        start = self._facts["ends"][-1] if self._facts["ends"] else 0
        shutil.copyfileobj(file, self._file)
        self._file.flush()
        for name, values in facts.items():
            if name == "ends":
                values = (numpy.frombuffer(values, dtype=numpy.int64) + start).tobytes()
            self._facts[name].frombytes(values)


class Rows(Sequence[PromptRow]):
    """Some rows of a store, in an order of their own."""

    def __init__(self, store: RowStore, numbers: NDArray[numpy.int32]) -> None:
        """Takes the store, and the number of each row in it."""
        self.store = store
        self.numbers = numbers

    @classmethod
    def of(cls, rows: Sequence[PromptRow]) -> Rows:
        """The same rows in memory, of which nothing is measured."""
        if isinstance(rows, Rows):
            return rows
        store = RowStore()
        store.add(rows, None)
        return cls(store, numpy.arange(len(rows), dtype=numpy.int32))

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """All rows of one or more parts, which lie in one store."""
        return cls(parts[0].store, numpy.concatenate([part.numbers for part in parts]))

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, at: int) -> PromptRow: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[PromptRow]: ...
    def __getitem__(self, at: int | slice) -> PromptRow | Sequence[PromptRow]:
        if isinstance(at, slice):
            return self.where(at)
        return self.store[int(self.numbers[at])]

    def __iter__(self) -> Iterator[PromptRow]:
        return (self.store[number] for number in self.numbers.tolist())

    def where(self, chosen: Any) -> Rows:
        """Those rows that a slice, an array of truth values, or a list of places chooses."""
        if isinstance(chosen, list):
            chosen = numpy.array(chosen, dtype=numpy.int64)
        return Rows(self.store, self.numbers[chosen])

    def has(self, field: str) -> NDArray[numpy.bool_]:
        """Whether each row has a field that it may lack: answer, completion, ..., text."""
        return self._bit(_BITS[field])

    def are_short(self) -> NDArray[numpy.bool_]:
        """Whether each row is short enough."""
        return self._bit(_IS_SHORT)

    def tokens(self, of: str) -> NDArray[numpy.int64]:
        """Tokens of each "prompt" or whole "row"; a number below 0 is a bound, see Measure."""
        return self.store.fact(f"{of}_tokens")[self.numbers].astype(numpy.int64)

    def _bit(self, bit: int) -> NDArray[numpy.bool_]:
        return numpy.asarray(self.store.fact("bits")[self.numbers] & bit, dtype=numpy.bool_)

    def identities(self) -> list[bytes]:
        """For each row a value that is equal for rows with equal prompts."""
        found = self.store.fact("identities").view(f"V{_IDENTITY_BYTES}")
        identities: list[bytes] = found[self.numbers].tolist()
        return identities


def _bits(row: PromptRow) -> int:
    # Not a loop over _BITS: this runs for every row of a data set.
    return (
        (1 if row.answer else 0)
        | (2 if row.completion is not None else 0)
        | (4 if row.chosen is not None else 0)
        | (8 if row.rejected is not None else 0)
        | (16 if row.is_wanted is not None else 0)
        | (32 if row.text is not None else 0)
    )


def _identity(row: PromptRow) -> bytes:
    return hashlib.blake2b(row.identity, digest_size=_IDENTITY_BYTES).digest()


def _encoded(row: PromptRow) -> bytes:
    values: tuple[Any, ...] = (
        row.messages,
        row.assistant_prefix,
        row.answer,
        row.metadata,
        row.completion,
        row.chosen,
        row.rejected,
        row.is_wanted,
        row.text,
        row.max_text_tokens,
        row.where,
    )
    if row.images:
        values = (*values, row.images, row.image_folder)
    if _has_texts_alone(row):
        try:
            return _QUICK.encode(values)
        except UnicodeEncodeError:
            pass
    # A role may hold half of a surrogate pair.
    return _ENCODER.encode(values).encode("utf-8", "surrogatepass")


def _has_texts_alone(row: PromptRow) -> bool:
    """Whether all that its turns hold is text: one of a table may hold a date."""
    for turns in (row.messages, row.completion, row.chosen, row.rejected):
        if turns is None or isinstance(turns, str):
            continue
        for turn in turns:
            for value in turn.values():
                if type(value) is not str:
                    return False
    return True


def _decoded(text: bytes) -> PromptRow:
    (
        messages,
        assistant_prefix,
        answer,
        metadata,
        completion,
        chosen,
        rejected,
        is_wanted,
        bare_text,
        max_text_tokens,
        where,
        *shown,
    ) = json.loads(text.decode("utf-8", "surrogatepass"))
    images, image_folder = shown or ((), "")
    return PromptRow(
        messages=messages or (),
        assistant_prefix=assistant_prefix,
        answer=answer,
        metadata=metadata,
        completion=completion,
        chosen=chosen,
        rejected=rejected,
        is_wanted=is_wanted,
        text=bare_text,
        max_text_tokens=max_text_tokens,
        where=where,
        images=tuple(images),
        image_folder=image_folder,
    )
