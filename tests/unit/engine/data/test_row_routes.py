"""Which rows go to which of several teachers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from rolemesh.engine.data.rows import DataInvalidError
from rolemesh.engine.data.teachers.routes import RowRoute
from rolemesh.engine.specs import RouteShare, TeacherRouteSpec, TeacherSpec

MODEL = {"model": {"path": "/m"}}
NAMED = {"one": MODEL, "two": MODEL}
VALUES: tuple[Any, ...] = ("math", "code", "both", True, {"b": 1}, "law")
ROWS = [json.dumps({"data": {"domain": value}, "other": 1}) for value in VALUES]
SHARED = {"two": 3.0, "one": 1.0}


def of(share: RouteShare, rows: list[str]) -> dict[int, float]:
    route = RowRoute(share.field, share.weights, frozenset(share.left), share.others)
    return route.of(rows if route.columns else None, len(rows))


def expected(route: dict[str, Any], value: Any) -> dict[str, float]:
    """Each teacher's weight for a row of a value, as the section's words have it."""
    text = value if isinstance(value, str) else json.dumps(value)
    shares = route.get("to", {}).get(text, route.get("default"))
    shares = {shares: 1.0} if isinstance(shares, str) else shares
    return {name: weight / sum(shares.values()) for name, weight in shares.items()}


@pytest.mark.parametrize(
    "route",
    [
        {
            "by": "metadata.data.domain",
            "to": {"math": "one", "code": "two", "both": SHARED, "true": "two", '{"b": 1}': "one"},
            "default": {"one": 1.0},
        },
        {"by": "metadata.data.domain", "to": {"math": "one"}, "default": SHARED},
        {"default": SHARED},
        {"default": "one"},
    ],
)
def test_each_row_has_its_teachers_and_their_weights(route: dict[str, Any]) -> None:
    spec = TeacherRouteSpec.model_validate(route)
    voices = spec.voices()
    assert len(voices) == spec.most_teachers
    for row, value in enumerate(VALUES):
        found: dict[str, float] = {}
        for shares in voices:
            # In each voice one teacher answers for the row, and no second one.
            (answer,) = [
                (one.teacher, of(one, ROWS)[row]) for one in shares if row in of(one, ROWS)
            ]
            if answer[1] > 0:
                found[answer[0]] = answer[1]
        assert found == pytest.approx(expected(route, value))


def test_a_value_that_goes_to_nobody_is_named_with_its_row() -> None:
    route = {"by": "metadata.data.domain", "to": {"math": "one", "code": "two"}}
    spec = TeacherRouteSpec.model_validate(route)
    ((first, _),) = spec.voices()
    with pytest.raises(DataInvalidError, match=r"row 2 .* has 'both' as its metadata"):
        of(first, ROWS)
    with pytest.raises(DataInvalidError, match=r"row 1 .* no metadata\.data\.domain \(it has x\)"):
        of(first, [ROWS[0], '{"x": 1}'])
    with pytest.raises(DataInvalidError, match=r"row 0 .* no metadata"):
        of(first, [""])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"named": NAMED}, "named is given without route"),
        ({**MODEL, "route": {"default": "one"}}, "route is given without named"),
        ({"named": NAMED, **MODEL, "route": {"default": "one"}}, "model and named given"),
        ({"named": {}, "route": {"default": "one"}}, "at least 1"),
        ({"named": {"A b": MODEL}, "route": {"default": "one"}}, "pattern"),
        ({"named": NAMED, "route": {"default": "three"}}, "route names the teacher 'three'"),
        ({"named": NAMED, "route": {"default": "one"}}, r"named\.two scores no row"),
        ({"named": NAMED, "route": {"default": {"one": 0.0, "two": 1}}}, "greater than 0"),
        ({"named": NAMED, "route": {"default": {}}}, "default has 0 teachers"),
        ({"named": NAMED, "route": {"by": "metadata.x"}}, "by is given without to"),
        ({"named": NAMED, "route": {"to": {"a": "one"}}}, "to is given without by"),
        ({"named": NAMED, "route": {}}, "no row goes to a teacher"),
        ({"named": NAMED, "route": {"by": "answer", "to": {"a": "one"}}}, "'answer' is no place"),
        (
            {"named": NAMED, "route": {"default": SHARED}, "layout": {"tp": 2}},
            r"layout is given beside named: .* named\.NAME\.layout",
        ),
        (
            {"named": {key: {"of": "actor"} for key in NAMED}, "route": {"default": SHARED}},
            r"named\.one and named\.two are both of 'actor'",
        ),
        (
            {
                "named": {
                    **NAMED,
                    "one": {
                        "server": {
                            "urls": ["http://h:1"],
                            "model": "m",
                            "on_failure": {"type": "drop_group"},
                        }
                    },
                },
                "route": {"default": SHARED},
            },
            r"named\.one\.server\.on_failure is 'drop_group'",
        ),
    ],
)  # fmt: skip
def test_several_teachers_that_cannot_be_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        TeacherSpec.model_validate(fields)
