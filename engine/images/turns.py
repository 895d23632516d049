"""Turns that show images: content in parts, and where images stand in plain text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rolemesh.engine.images.prompt_images import ImageInvalidError
from rolemesh.engine.images.references import reference_of
from rolemesh.engine.specs import ImagesSpec

Turn: TypeAlias = Mapping[str, Any]
"""A chat turn: role, content and other keys. The content is a text, or a list of parts."""

MARKER = "<image>"
"""Stands in plain text where an image is shown, as data for verl has it."""

IMAGE_PART: Mapping[str, Any] = {"type": "image"}

_MARKERS = re.compile(f"({re.escape(MARKER)})")


def references_of(value: Any, spec: ImagesSpec, name: str) -> tuple[str, ...]:
    """The images of a row, as text; see `references`.

    Args:
        value: Of the column: one image or a list of them; None: there is none.
        spec: Bounds their number.
        name: Of the column, for messages.

    Raises:
        ImageInvalidError: One is of no known form, or there are too many.
    """
    if value is None:
        return ()
    values = value if isinstance(value, list | tuple) else [value]
    if len(values) > spec.max_per_prompt:
        raise ImageInvalidError(
            f"{name!r} has {len(values)} images, more than {spec.max_per_prompt}: give "
            "fewer, or raise data.images.max_per_prompt"
        )
    found = []
    for number, one in enumerate(values):
        try:
            found.append(reference_of(one))
        except ImageInvalidError as error:
            raise ImageInvalidError(f"{name}[{number}] {error}") from error
    return tuple(found)


def joined_parts(turn: Turn, name: str) -> Turn:
    """A turn whose content may be parts; one without images comes out with a text.

    Raises:
        ImageInvalidError: A part is neither text nor an image.
    """
    content = turn.get("content")
    if not isinstance(content, list):
        return turn
    parts = [_part(part, name) for part in content]
    if any(part["type"] == "image" for part in parts):
        return {**turn, "content": parts}
    return {**turn, "content": "".join(part["text"] for part in parts)}


def _part(part: Any, name: str) -> dict[str, Any]:
    if isinstance(part, Mapping):
        # Arrow fills the keys that a part lacks with null.
        given = {key: value for key, value in part.items() if value is not None}
        kind = given.pop("type", None)
        if kind == "text" and isinstance(given.get("text"), str) and len(given) == 1:
            return {"type": "text", "text": given["text"]}
        # Some writers leave an empty text beside an image.
        if kind == "image" and not any(given.values()):
            return dict(IMAGE_PART)
        found = f"a part of type {kind!r} with {', '.join(map(str, given)) or 'nothing else'}"
    else:
        found = f"a part of type {type(part).__name__}"
    raise ImageInvalidError(
        f'{name!r} has {found}: a part is {{"type": "text", "text": ...}} or {{"type": '
        '"image"}, and the images themselves stand in their own column'
    )


def has_images(turn: Turn) -> bool:
    """Whether the turn shows an image."""
    return not isinstance(turn["content"], str)


def texts_of(turn: Turn) -> list[str]:
    """The texts of a turn's content."""
    content = turn["content"]
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part["type"] == "text"]


def placed(turns: Sequence[Turn], number: int, name: str) -> list[Turn]:
    """The turns of a prompt with a part where each image is shown.

    Parts of type "image" and markers in plain text say where. Without any, the images stand in
    front of what the user says first.

    Example: with 1 image the user's "Which bird?" becomes an image part and that text.

    Args:
        turns: Of the prompt.
        number: Of the row's images.
        name: Of the column of images, for messages.

    Raises:
        ImageInvalidError: There are more places than images, or fewer, or nothing that a user says.
    """
    if not number:
        if any(map(has_images, turns)):
            raise _mismatch(_places(turns), number, name)
        return list(turns)
    made = [_split(turn) for turn in turns]
    places = _places(made)
    if places:
        if places != number:
            raise _mismatch(places, number, name)
        return made
    at = next((at for at, turn in enumerate(turns) if turn["role"] == "user"), None)
    if at is None:
        raise ImageInvalidError(
            f"{name!r} has {number} images, but no turn of the prompt is a user's: say "
            f'where they stand, with {MARKER} in a text or a part {{"type": "image"}}'
        )
    text = made[at]["content"]
    behind = [{"type": "text", "text": text}] if text else []
    content = [*(dict(IMAGE_PART) for _ in range(number)), *behind]
    made[at] = {**made[at], "content": content}
    return made


def _split(turn: Turn) -> Turn:
    """A turn whose markers are parts."""
    content = turn["content"]
    if not isinstance(content, str) or MARKER not in content:
        return turn
    pieces = [piece for piece in _MARKERS.split(content) if piece]
    parts = [
        dict(IMAGE_PART) if piece == MARKER else {"type": "text", "text": piece} for piece in pieces
    ]
    return {**turn, "content": parts}


def _places(turns: Sequence[Turn]) -> int:
    return sum(
        part["type"] == "image"
        for turn in turns
        if not isinstance(turn["content"], str)
        for part in turn["content"]
    )


def _mismatch(places: int, number: int, name: str) -> ImageInvalidError:
    return ImageInvalidError(
        f"the prompt shows {places} images, but {name!r} has {number}: give as many of "
        f'one as of the other (a place is {MARKER} in a text, or a part {{"type": "image"}})'
    )
