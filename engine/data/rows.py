"""Rows of data, read from the records of a file and checked field by field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rolemesh.engine import nested
from rolemesh.engine.data.answers import ANSWER, json_text
from rolemesh.engine.data.json_values import MAX_ANSWER_DEPTH, json_value, nests_too_deep
from rolemesh.engine.images import turns as image_turns
from rolemesh.engine.images.prompt_images import ImageInvalidError
from rolemesh.engine.specs import StoredRowsSpec

MAX_METADATA_BYTES = 64 * 1024
"""Most bytes of a row's metadata, which is sent with each of its trajectories."""

# json.dumps would make one anew for each row.
_IDENTITY = msgspec.json.Encoder(order="deterministic")
_ANY_IDENTITY = json.JSONEncoder(sort_keys=True, default=str)
_METADATA = json.JSONEncoder(default=str)

Message = Mapping[str, Any]
"""A chat turn: role and content, and other keys that the template reads."""
Completion = str | Sequence[Message]
"""A given answer: its text, or turns that begin and end with the assistant's."""


class PromptTooLongError(ValueError):
    """A prompt leaves no room for a completion."""


class EmptyDataError(ValueError):
    """The requested split has no rows."""


class DataInvalidError(ValueError):
    """Data is invalid; the text names the row, the field and the remedy."""


class PromptRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the data set: a prompt with other given fields, or a bare text.

    Not a dataclass: data has millions of them, and making one would take fifteen times as long.
    """

    messages: Sequence[Message]
    """Chat turns of the prompt; empty in a row of bare text."""
    assistant_prefix: str = ""
    """Text that the assistant's turn already begins with; part of the prompt."""
    answer: str = ""
    """Expected answer, empty when the data set has none; JSON where it is no text."""
    metadata: str = "{}"
    """Other columns as JSON, for rewards and curricula, and an answer that is no text."""
    completion: Completion | None = None
    """Given completion."""
    chosen: Completion | None = None
    """The better of two completions; always together with `rejected`."""
    rejected: Completion | None = None
    """The worse of two completions."""
    is_wanted: bool | None = None
    """Judgement of `completion`."""
    text: str | None = None
    """Text of a row without a prompt."""
    max_text_tokens: int | None = None
    """Most tokens of `text`, which is cut there; None does not cut."""
    images: Sequence[str] = ()
    """Images that the prompt shows, in its order: each a path below `image_folder`, or a data URL.
    A turn that shows one has parts as its content, see `images.turns`."""
    image_folder: str = ""
    """Folder of those that are paths."""
    where: str = "a row"
    """Place of the row, for messages."""

    @property
    def identity(self) -> bytes:
        """Bytes that are equal for rows with equal prompts."""
        if self.text is not None:
            return self.text.encode("utf-8", "surrogatepass")
        prompt: tuple[Any, ...] = (self.messages, self.assistant_prefix)
        if self.images:
            prompt = (*prompt, self.images)
        try:
            return _IDENTITY.encode(prompt)
        except (TypeError, ValueError):
            # A turn may have more than JSON: half of a surrogate pair, a type of a table's own.
            return _ANY_IDENTITY.encode(prompt).encode()


class RowReader:
    """Makes rows from records, with the columns that a source names."""

    def __init__(self, spec: StoredRowsSpec, field: str) -> None:
        """Takes the source and the field of the recipe that holds it, e.g. "data"."""
        self._spec = spec
        self._field = field
        named = dict(spec.columns)
        self._images = spec.images
        if spec.images is None:
            # A column of that name is like any other then.
            del named["images"]
        folder = None if spec.images is None else spec.images.folder
        self._image_folder = "" if folder is None else str(folder)
        self._contents = str if spec.images is None else (str, list)
        """Types that a turn's content may have."""
        claimed = set(named.values()) - {None}
        self._columns: dict[str, str | None] = {
            meaning: name or (None if meaning in claimed else meaning)
            for meaning, name in named.items()
        }
        self._taken = set(self._columns.values())
        self._places = [
            # Only a name with dots may lead into an object.
            (meaning, column, "." in column)
            for meaning, column in self._columns.items()
            if column is not None
        ]
        required = [(f"columns.{meaning}", column) for meaning, column in named.items()]
        if spec.images is not None and named["images"] is None:
            # A name that is wrong must not make a run without images.
            required.append(("columns.images", "images"))
        required += [("metadata", column) for column in spec.metadata or ()]
        self._required = [(name, column) for name, column in required if column is not None]
        """Columns that the recipe names, each with its field."""

    def wanted(self, columns: Sequence[str]) -> list[str]:
        """Those columns of a table that are read."""
        if self._spec.metadata is None:
            return list(columns)
        named = [name for name in self._columns.values() if name is not None]
        used = {nested.column_of(name, columns) for name in named} | {*self._spec.metadata}
        return [column for column in columns if column in used]

    def read(self, record: Any, where: str) -> PromptRow:
        """Makes a row from a record.

        Args:
            record: Values by name, as JSON and Arrow give them; None is no value.
            where: File and row, for messages.

        Raises:
            DataInvalidError: The record is not a valid row.
        """
        # This runs for every row of a data set, so it calls little where a row has little.
        if type(record) is not dict and not isinstance(record, Mapping):
            raise DataInvalidError(f"{where}: needs an object with the key 'prompt'")
        if self._required:
            self._check_named(record, where)
        values = {
            meaning: value
            for meaning, column, is_dotted in self._places
            if (value := nested.value_of(record, column) if is_dotted else record.get(column))
            is not None
        }
        if self._images is None:
            return self._row(record, values, (), where)
        try:
            images = image_turns.references_of(
                values.get("images"), self._images, self._name("images")
            )
            row = self._row(record, values, images, where)
        except ImageInvalidError as error:
            raise DataInvalidError(f"{where}: {error}") from error
        return row

    def _row(
        self,
        record: Mapping[str, Any],
        values: Mapping[str, Any],
        images: Sequence[str],
        where: str,
    ) -> PromptRow:
        """A row of the values by their meanings; raises ImageInvalidError besides."""
        answer, other = self._answer(values.get("answer"), where)
        metadata = self._metadata(record, other, where)
        if "prompt" in values:
            messages, completion = self._prompt(values["prompt"], where), values.get("completion")
        elif "messages" in values:
            messages, completion = self._conversation(
                values["messages"], values.get("completion"), where
            )
        elif "text" in values and not images:
            text = self._text(values["text"], "text", where)
            return PromptRow(messages=(), text=text, metadata=metadata, where=where)
        else:
            raise DataInvalidError(
                f"{where}: needs an object with the key {self._columns['prompt']!r} (or "
                f"{self._columns['messages']!r}, or {self._columns['text']!r} alone); it has "
                f"{nested.listed(record)}: name the right one in {self._field}.columns"
            )
        chosen, rejected = values.get("chosen"), values.get("rejected")
        if (chosen is None) != (rejected is None):
            lacking = "chosen" if chosen is None else "rejected"
            raise DataInvalidError(
                f"{where}: {self._name(lacking)!r} is missing: a preference needs both completions"
            )
        shown = messages
        if self._images is not None:
            shown = image_turns.placed(messages, len(images), self._name("images"))
        return PromptRow(
            messages=self._with_system(shown),
            assistant_prefix=self._spec.assistant_prefix,
            answer=answer,
            metadata=metadata,
            completion=self._completion(completion, "completion", messages, where),
            chosen=self._completion(chosen, "chosen", messages, where),
            rejected=self._completion(rejected, "rejected", messages, where),
            is_wanted=self._label(values.get("label"), where),
            where=where,
            images=images,
            image_folder=self._image_folder if images else "",
        )

    def _check_named(self, record: Mapping[str, Any], where: str) -> None:
        """Checks that the columns that the recipe names are there; a value may be null."""
        for field, column in self._required:
            if column in record:
                continue
            # Metadata has whole columns only.
            found = f"it has {nested.listed(record)}"
            if field != "metadata":
                found = nested.lacking(record, column)
            if found:
                raise DataInvalidError(
                    f"{where}: has no column {column!r}, which {self._field}.{field} names; {found}"
                )

    def _name(self, meaning: str) -> str:
        return self._columns[meaning] or meaning

    def _text(self, value: Any, meaning: str, where: str) -> str:
        if not isinstance(value, str):
            raise DataInvalidError(
                f"{where}: {self._name(meaning)!r} must be text, not {type(value).__name__}"
            )
        try:
            value.encode()
        except UnicodeEncodeError as error:
            # JSON may have half of a surrogate pair, which neither tokenizer nor protobuf accepts.
            raise DataInvalidError(
                f"{where}: {self._name(meaning)!r} has a character at {error.start} that is no "
                "Unicode text (half of a pair): fix the file"
            ) from error
        return value

    def _prompt(self, prompt: Any, where: str) -> list[Message]:
        if isinstance(prompt, str):
            return [{"role": "user", "content": self._text(prompt, "prompt", where)}]
        turns = self._turns(prompt, "prompt", where)
        if turns[-1]["role"] == "assistant":
            raise DataInvalidError(
                f"{where}: {self._name('prompt')!r} ends with an assistant turn: end it with the "
                f"turn that is answered, and give what the answer begins with as "
                f"{self._field}.assistant_prefix"
            )
        return turns

    def _conversation(
        self, turns: Any, completion: Any, where: str
    ) -> tuple[list[Message], list[Message] | None]:
        name = self._name("messages")
        if completion is not None:
            raise DataInvalidError(
                f"{where}: has {name!r}, a whole conversation, and "
                f"{self._name('completion')!r}: take one out, or name the first in "
                f"{self._field}.columns.prompt"
            )
        checked = self._turns(turns, "messages", where)
        first = next(
            (at for at, turn in enumerate(checked) if turn["role"] == "assistant"), len(checked)
        )
        if first == 0:
            raise DataInvalidError(f"{where}: {name!r} begins with an assistant turn: no prompt")
        answered = checked[first:]
        # Turns after the last answer have no answer, so they are not allowed.
        while answered and answered[-1]["role"] != "assistant":
            answered.pop()
        if any(not isinstance(turn["content"], str) for turn in answered):
            raise DataInvalidError(
                f"{where}: {name!r} shows an image behind the first answer: images stand in the "
                "prompt alone"
            )
        return checked[:first], answered or None

    def _completion(
        self, value: Any, meaning: str, prompt: Sequence[Message], where: str
    ) -> Completion | None:
        if value is None:
            return None
        if isinstance(value, str):
            return self._text(value, meaning, where)
        turns = self._turns(value, meaning, where)
        # Preference data often repeats the prompt before each answer.
        if turns[: len(prompt)] == list(prompt):
            turns = turns[len(prompt) :]
        if not turns or turns[0]["role"] != "assistant" or turns[-1]["role"] != "assistant":
            raise DataInvalidError(
                f"{where}: {self._name(meaning)!r} must begin (after the prompt's turns) and end "
                "with an assistant turn"
            )
        if any(not isinstance(turn["content"], str) for turn in turns):
            raise DataInvalidError(
                f"{where}: {self._name(meaning)!r} shows an image behind the first answer: images "
                "stand in the prompt alone"
            )
        return turns

    def _turns(self, value: Any, meaning: str, where: str) -> list[Message]:
        if self._images is not None and isinstance(value, list):
            name = self._name(meaning)
            value = [
                image_turns.joined_parts(turn, name) if isinstance(turn, Mapping) else turn
                for turn in value
            ]
        if (
            not isinstance(value, list)
            or not value
            or not all(
                isinstance(turn, Mapping)
                and isinstance(turn.get("role"), str)
                and isinstance(turn.get("content"), self._contents)
                for turn in value
            )
        ):
            form = "a list of turns" if meaning == "messages" else "text or a list of turns"
            raise DataInvalidError(
                f"{where}: {self._name(meaning)!r} must be {form} with the keys role and content"
            )
        # Arrow fills the keys that a turn lacks with null.
        turns: list[Message] = [
            {key: part for key, part in turn.items() if part is not None} for turn in value
        ]
        for at, turn in enumerate(turns):
            role = turn["role"]
            for text in image_turns.texts_of(turn):
                self._text(text, meaning, where)
            if at and role == "system":
                raise DataInvalidError(
                    f"{where}: {self._name(meaning)!r}, turn {at} is a system turn: there is one "
                    "at most, and it comes first"
                )
            if at and role in ("user", "assistant") and turns[at - 1]["role"] == role:
                raise DataInvalidError(
                    f"{where}: {self._name(meaning)!r}, turns {at - 1} and {at} are both the "
                    f"{role}'s: make them one"
                )
        return turns

    def _with_system(self, messages: list[Message]) -> list[Message]:
        system = self._spec.system_prompt
        if system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": system}, *messages]

    def _answer(self, answer: Any, where: str) -> tuple[str, Any]:
        """The answer as text, and as it is where that is neither text nor a number, else None."""
        if answer is None:
            return "", None
        if isinstance(answer, str):
            return self._text(answer, "answer", where), None
        if isinstance(answer, float) and not math.isfinite(answer):
            raise DataInvalidError(
                f"{where}: {self._name('answer')!r} is {answer}: give null for no answer"
            )
        if isinstance(answer, (int, float)) and not isinstance(answer, bool):
            return str(answer), None
        if nests_too_deep(answer):
            raise DataInvalidError(
                f"{where}: {self._name('answer')!r} nests more than {MAX_ANSWER_DEPTH} levels: "
                "nest less"
            )
        try:
            # Tables have dates and decimal numbers too, which metadata has as text.
            value = json.loads(json.dumps(json_value(answer), default=str))
        except TypeError as error:
            raise DataInvalidError(
                f"{where}: {self._name('answer')!r}: {error}: give text, a number, or what JSON has"
            ) from error
        text = self._text(json_text(value), "answer", where)
        # A date in a table is text, like one in JSON.
        return (value, None) if isinstance(value, str) else (text, value)

    def _label(self, label: Any, where: str) -> bool | None:
        if label is None:
            return None
        if isinstance(label, bool | int | float) and label in (0, 1):
            return bool(label)
        raise DataInvalidError(
            f"{where}: {self._name('label')!r} is {label!r}: give true or false, 1 or 0"
        )

    def _metadata(self, record: Mapping[str, Any], answer: Any, where: str) -> str:
        """JSON of the columns that are metadata, with an answer that is no text; None: it is."""
        names: Sequence[str] | None = self._spec.metadata
        if names is None:
            names = [name for name in record if name not in self._taken]
        if not names and answer is None:
            return "{}"
        chosen = {name: record[name] for name in names}
        if answer is not None:
            column = self._name("answer")
            if ANSWER in chosen and column != ANSWER:
                raise DataInvalidError(
                    f"{where}: {column!r} is no text, so it travels as {ANSWER!r} in the metadata, "
                    f"where another column is called so: leave that out of {self._field}.metadata"
                )
            chosen[ANSWER] = answer
        try:
            encoded = _METADATA.encode(json_value(chosen))
        except TypeError as error:
            raise DataInvalidError(
                f"{where}: {error}: list the columns that are metadata in {self._field}.metadata"
            ) from error
        # It is ASCII.
        size = len(encoded)
        if size > MAX_METADATA_BYTES:
            largest = max(chosen, key=lambda name: len(json.dumps(chosen[name], default=str)))
            raise DataInvalidError(
                f"{where}: its metadata takes {size} bytes, more than {MAX_METADATA_BYTES} (most "
                f"of it column {largest!r}): list the columns that are needed in "
                f"{self._field}.metadata"
            )
        return encoded
