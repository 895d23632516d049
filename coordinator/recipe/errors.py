"""Errors of a recipe for people: field, value, reason, remedy."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.engine.specs import OwnFunctionSpec
from rolemesh.engine.specs.urls import without_passwords

_LONGEST_VALUE = 60
_MOST_DESCRIBED = 50
"""Mistakes that are described. A remedy takes milliseconds to find, and a text may be wrong
everywhere."""
_CLOSE = 0.6
"""difflib's ratio from which a name counts as a likely misspelling."""


class RecipeError(ValueError):
    """The recipe, or something that overrides it, is wrong. The text is for people."""


def describe(error: ValidationError, origins: Mapping[tuple[str, ...], str]) -> str:
    """One message about everything that is wrong, or the first of very many things.

    Args:
        error: What validating a Recipe raised.
        origins: Where a field was set, by its path.
    """
    problems = error.errors()
    missing = [_walk(problem["loc"])[0] for problem in problems if problem["type"] == "missing"]
    texts = [_describe_one(problem, origins, missing) for problem in problems[:_MOST_DESCRIBED]]
    if len(problems) == 1:
        return texts[0]
    if len(problems) > len(texts):
        texts.append(f"and {len(problems) - len(texts)} more")
    return "\n".join(
        (f"{len(problems)} things are wrong with the recipe:", *(f"- {t}" for t in texts))
    )


def _describe_one(
    problem: ErrorDetails,
    origins: Mapping[tuple[str, ...], str],
    missing: Sequence[tuple[str, ...]],
) -> str:
    where, models = _walk(problem["loc"])
    dotted = ".".join(where)
    parent = models[-1]
    source = _origin(where, origins)
    context = problem.get("ctx", {})
    match problem["type"]:
        case "extra_forbidden":
            return f"{dotted}: unknown key{source}; {_nearest(where, parent, missing)}"
        case "missing":
            return f"{dotted}: required, but not given{_meaning(parent, where[-1])}"
        case "union_tag_invalid":
            tags = [tag.strip(" '") for tag in str(context["expected_tags"]).split(",")]
            near = difflib.get_close_matches(str(context["tag"]), tags, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            valid = f"valid types are {', '.join(tags)}{hint}{_own_form(parent, where[-1])}"
            return f"{dotted}.type is {context['tag']!r}{source}: {valid}"
        case "union_tag_not_found":
            tags = sorted(_variants(_annotation(parent, where[-1])))
            return f"{dotted}.type: required, but not given; valid types are {', '.join(tags)}"
        case "model_type" | "model_attributes_type" | "dict_type":
            fields = _model_of(_annotation(parent, where[-1])) if where else Recipe
            keys = f" with the keys {', '.join(_keys(fields))}" if fields else ""
            return f"{dotted} is {_shown(problem['input'])}{source}: give a section{keys}"
        case "value_error":
            reason = str(context.get("error", problem["msg"]))
            return f"{dotted}: {reason}{source}" if where else f"{reason}{source}"
    reason = _reason(problem)
    meaning = _meaning(parent, where[-1]) if where else ""
    return f"{dotted} is {_shown(problem['input'])}{source}: {reason}{meaning}"


def _own_form(parent: type[BaseModel], name: str) -> str:
    """How a function of the user is named, where a field takes one."""
    variant = _variants(_annotation(parent, name)).get("python")
    if variant is None or not issubclass(variant, OwnFunctionSpec):
        return ""
    return "; a function of yours is python:path/to/file.py:name"


_PLAIN = {
    "int_parsing": "give a whole number",
    "int_type": "give a whole number",
    "int_from_float": "give a whole number",
    "float_parsing": "give a number",
    "float_type": "give a number",
    "finite_number": "give a finite number",
    "bool_parsing": "give true or false",
    "bool_type": "give true or false",
    "string_type": "give a text",
    "string_pattern_mismatch": "this is not the form of it",
    "path_type": "give a path",
    "tuple_type": "give a list",
    "list_type": "give a list",
    "greater_than": "give more than {gt:g}",
    "greater_than_equal": "give {ge:g} or more",
    "less_than": "give less than {lt:g}",
    "less_than_equal": "give {le:g} or less",
    "too_short": "give {min_length} or more of them",
    "too_long": "give {max_length} of them at most",
    "string_too_short": "give {min_length} or more characters",
}
"""Remedies by pydantic's kind of mistake, in everyday words."""


def _reason(problem: ErrorDetails) -> str:
    """What is wrong with a value, in everyday words."""
    context = problem.get("ctx", {})
    if problem["type"] == "literal_error":
        valid = re.findall(r"'([^']*)'", str(context["expected"])) or [str(context["expected"])]
        near = difflib.get_close_matches(str(problem["input"]), valid, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"valid are {', '.join(valid)}{hint}" if len(valid) > 1 else f"give {valid[0]}"
    plain = _PLAIN.get(problem["type"])
    if plain is not None:
        return plain.format(**context)
    # A kind that no field of a recipe has had so far.
    return problem["msg"][:1].lower() + problem["msg"][1:]


def _walk(loc: Sequence[int | str]) -> tuple[tuple[str, ...], list[type[BaseModel]]]:
    """The path as a person writes it, without the tags that pydantic puts in, and the models on it.

    The last model is the one that the last name belongs to.
    """
    where: list[str] = []
    models: list[type[BaseModel]] = [Recipe]
    annotation: Any = Recipe
    for part in loc:
        variants = _variants(annotation)
        if part in variants:
            annotation = variants[str(part)]
            models.append(annotation)
            continue
        model = _model_of(annotation)
        if model is not None and model is not models[-1]:
            models.append(model)
        where.append(str(part))
        annotation = _annotation(model, str(part)) if model else _item(annotation)
    return tuple(where), models


def _annotation(model: type[BaseModel], name: str) -> Any:
    field = _keys(model).get(name)
    return field.annotation if field else None


def _keys(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a section by their keys in a recipe."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _item(annotation: Any) -> Any:
    arguments = [a for a in typing.get_args(_unwrapped(annotation)) if a is not Ellipsis]
    return arguments[-1] if arguments else None


def _unwrapped(annotation: Any) -> Any:
    """Without Annotated and without None."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _unwrapped(typing.get_args(annotation)[0])
    members = _members(annotation)
    return (
        _unwrapped(members[0]) if len(members) == 1 and members[0] is not annotation else annotation
    )


def _members(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [a for a in typing.get_args(annotation) if a is not type(None)]
    return [annotation]


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    unwrapped = _unwrapped(annotation)
    return unwrapped if _is_model(unwrapped) else None


def _variants(annotation: Any) -> dict[str, type[BaseModel]]:
    """Members of a union of models, by their `type`; empty for anything else."""
    members = _members(_unwrapped(annotation))
    if len(members) < 2 or not all(_is_model(member) for member in members):
        return {}
    return {
        tag: member
        for member in members
        for tag in typing.get_args(member.model_fields["type"].annotation)
    }


def _nearest(
    where: tuple[str, ...], parent: type[BaseModel], missing: Sequence[tuple[str, ...]]
) -> str:
    """What may have been meant by a key: of its section first, then below it, then elsewhere."""
    *above, name = where
    prefix = ".".join(above)
    near = difflib.get_close_matches(name, _keys(parent), n=1, cutoff=_CLOSE)
    if near:
        return f"did you mean {'.'.join((*above, near[0]))}?"
    below = _places(name, parent, prefix)
    if below:
        return f"did you mean {' or '.join(below)}?"
    absent = [".".join(one) for one in missing if [*one[:-1]] == above]
    if absent:
        return f"did you mean {' or '.join(absent[:3])}, which is required?"
    keys = f"keys {'of ' + prefix if prefix else 'here'} are {', '.join(_keys(parent))}"
    elsewhere = _places(name, Recipe, "")
    return f"{keys}; did you mean {' or '.join(elsewhere)}?" if elsewhere else keys


def _places(name: str, model: type[BaseModel], prefix: str) -> list[str]:
    """Where the right name would be, each once; the first few."""
    # Variants of a section may have the same key.
    found = dict.fromkeys(p for p in _paths(model, prefix) if p.rpartition(".")[2] == name)
    return list(found)[:3]


def _paths(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in _keys(model).items():
        path = f"{prefix}.{name}" if prefix else name
        yield path
        inner = _variants(field.annotation).values() or [_model_of(field.annotation)]
        for variant in inner:
            if variant is not None:
                yield from _paths(variant, path)


def _meaning(model: type[BaseModel], name: str) -> str:
    field = _keys(model).get(name)
    if field is None:
        return ""
    annotation = _unwrapped(field.annotation)
    if typing.get_origin(annotation) is Literal:
        return ""
    return f" ({field.description.rstrip('.')})" if field.description else ""


def _origin(where: tuple[str, ...], origins: Mapping[tuple[str, ...], str]) -> str:
    """Where a field, or the first thing below it, was set."""
    for path, source in reversed(list(origins.items())):
        if path[: len(where)] == where or where[: len(path)] == path:
            return f" ({source})" if where else ""
    return ""


def _shown(value: Any) -> str:
    text = repr(without_passwords(value))
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
