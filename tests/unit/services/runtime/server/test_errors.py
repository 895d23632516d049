"""The error catalogue covers every exception class, and every row of it exists."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from pydantic import BaseModel, ValidationError

from rolemesh.engine.specs import RewardSpec
from rolemesh.rpc.errors import (
    CapacityError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
)
from rolemesh.services.runtime.server.errors import CATALOGUE, describe, dotted_name, entry_for

REPOSITORY = Path(__file__).resolve().parents[5]
SOURCES = {
    "rolemesh.engine": REPOSITORY / "engine",
    "rolemesh.services": REPOSITORY / "services",
    "rolemesh.rpc": REPOSITORY / "src" / "rolemesh" / "rpc",
}
OWN_WIRE_FORM = "rolemesh.rpc.errors"
"""Classes of this module carry their status themselves."""


def exception_classes() -> Iterator[str]:
    """Dotted names of all exception classes, read from the sources without importing them."""
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder).with_suffix("")
            module = ".".join([package, *relative.parts]).removesuffix(".__init__")
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and node.name.endswith(("Error", "Exception")):
                    yield f"{module}.{node.name}"


def test_every_exception_class_is_in_the_catalogue_and_every_row_of_ours_exists() -> None:
    there = {name for name in exception_classes() if not name.startswith(OWN_WIRE_FORM)}
    assert there == {name for name in CATALOGUE if name.startswith("rolemesh.")}


@pytest.mark.parametrize("name", [name for name in CATALOGUE if not name.startswith("rolemesh.")])
def test_every_row_of_others_names_an_exception_as_python_spells_it(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    exception = getattr(importlib.import_module(module), attribute)
    assert issubclass(exception, BaseException)
    assert dotted_name(exception) == name


def test_reasons_are_upper_snake_and_codes_are_errors() -> None:
    for entry in CATALOGUE.values():
        assert entry.reason.replace("_", "").isalpha()
        assert entry.reason == entry.reason.upper()
        assert entry.code not in (grpc.StatusCode.OK, grpc.StatusCode.INTERNAL)


def test_a_subclass_travels_as_its_nearest_base() -> None:
    class NarrowError(ValueError):
        pass

    entry = entry_for(NarrowError)
    assert entry is not None
    assert entry.reason == "VALUE_INVALID"
    assert entry_for(RuntimeError) is None


@pytest.mark.parametrize(
    ("error", "expected", "reason"),
    [
        (ValueError("rows is -1: give 1"), InvalidRequestError, "VALUE_INVALID"),
        (FileNotFoundError(2, "No such file", "/model"), InvalidRequestError, "PATH_INVALID"),
        (MemoryError(), CapacityError, "OUT_OF_MEMORY"),
        (NotFoundError("x", reason="EXPERIENCE_NOT_FOUND"), NotFoundError, "EXPERIENCE_NOT_FOUND"),
        (PreconditionError("x", reason="STALE_EPOCH"), PreconditionError, "STALE_EPOCH"),
        (KeyError("x"), InternalError, "INTERNAL"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_exceptions_become_typed_errors(
    error: Exception, expected: type[Exception], reason: str
) -> None:
    described = describe(error)
    assert type(described) is expected
    assert described.reason == reason
    assert described.message


def test_an_unforeseen_exception_tells_type_message_place_and_cause() -> None:
    def fail() -> None:
        try:
            raise OSError("disk on fire")
        except OSError as error:
            raise RuntimeError("could not save") from error

    with pytest.raises(RuntimeError) as caught:
        fail()
    message = describe(caught.value).message
    assert message.startswith("RuntimeError: could not save (at ")
    assert "in fail)" in message
    assert message.endswith("caused by OSError: disk on fire")


def test_a_validation_error_names_field_value_and_problem() -> None:
    class Inner(BaseModel):
        rate: float

    class Outer(BaseModel):
        inner: Inner

    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"inner": {"rate": "fast"}})
    described = describe(caught.value)
    assert described.reason == "SPEC_INVALID"
    assert "inner.rate is 'fast'" in described.message


def test_a_validation_error_shows_no_password_of_a_url() -> None:
    class Place(BaseModel):
        url: str
        port: int

    with pytest.raises(ValidationError) as caught:
        Place.model_validate({"url": "http://me:s3cret@h", "port": "http://me:s3cret@h"})
    assert "port is 'http://***@h'" in describe(caught.value).message
    with pytest.raises(ValidationError) as whole:
        RewardSpec.model_validate({"source": {"type": "openrlhf", "urls": ["http://me:s3cret@h"]}})
    assert "s3cret" not in describe(whole.value).message
    assert "s3cret" not in str(whole.value)
