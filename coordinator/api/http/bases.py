"""What the JSON models of REST share: their bases, and their types of numbers and times."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

NAME_PATTERN = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$"
"""Pattern of a run's id and of a log's name."""


MAX_INT64 = 2**63 - 1


Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
"""RFC 3339, UTC, microseconds."""


Int32 = Annotated[int, Field(json_schema_extra={"format": "int32"})]


Int64 = Annotated[int, Field(json_schema_extra={"format": "int64"})]


def _to_whole(value: object) -> object:
    # JSON has one type of number: 2.0 is a whole one, as the schema says.
    return int(value) if isinstance(value, float) and value.is_integer() else value


GivenInt64 = Annotated[Int64, BeforeValidator(_to_whole)]


Number = float | None
"""A double; null stands for NaN and the infinities."""


class Answer(BaseModel):
    """Base of all answers: exactly the declared fields."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Wish(BaseModel):
    """Base of all request bodies: no further field, and no value of another type."""

    model_config = ConfigDict(
        extra="forbid", strict=True, use_attribute_docstrings=True, hide_input_in_errors=True
    )
