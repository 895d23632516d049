"""Turns with images as OpenAI's protocol has them: each image part holds a data URL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rolemesh.engine.images.prompt_images import ImageInvalidError
from rolemesh.engine.images.references import DATA, shown
from rolemesh.engine.images.turns import IMAGE_PART, Turn, has_images

_IMAGE_URL = "image_url"
_TEXTS = ("text", "input_text")


def with_urls(turns: Sequence[Turn], urls: Sequence[str]) -> list[dict[str, Any]]:
    """Turns whose images stand in them.

    Example: the parts {"type": "image"} and a text, with one URL, become {"type": "image_url",
    "image_url": {"url": URL}} and that text.

    Args:
        turns: With a part {"type": "image"} where each image is shown.
        urls: Of the images, in their order; as many as there are such parts.
    """
    following = iter(urls)

    def part_of(part: Mapping[str, Any]) -> dict[str, Any]:
        if part["type"] != "image":
            return dict(part)
        return {"type": _IMAGE_URL, _IMAGE_URL: {"url": next(following)}}

    return [
        {**turn, "content": [part_of(part) for part in turn["content"]]}
        if isinstance(turn.get("content"), list)
        else dict(turn)
        for turn in turns
    ]


def has_urls(message: Mapping[str, Any]) -> bool:
    """Whether a message of a client shows an image by a URL."""
    content = message.get("content")
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and part.get("type") == _IMAGE_URL for part in content
    )


def without_urls(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The opposite of `with_urls`, for messages of a client. Opens nothing.

    Returns:
        The turns, and the data URLs of their images in order. Messages without images are as they
        came.

    Raises:
        ImageInvalidError: A message with images is not a user's, or has a part that is neither
            text nor a data URL; the text names the field.
    """
    turns: list[dict[str, Any]] = []
    urls: list[str] = []
    for number, message in enumerate(messages):
        if not has_urls(message):
            turns.append(dict(message))
            continue
        name = f"messages[{number}]"
        if message.get("role") != "user":
            raise ImageInvalidError(
                f"{name} is of the role {message.get('role')!r} and has an image: show images in "
                "messages of the user"
            )
        parts = []
        for at, part in enumerate(message["content"]):
            if isinstance(part, Mapping) and part.get("type") in _TEXTS:
                parts.append({"type": "text", "text": str(part.get("text", ""))})
                continue
            urls.append(_url_of(part, f"{name}.content[{at}]"))
            parts.append(dict(IMAGE_PART))
        turns.append({**message, "content": parts})
    return turns, urls


def as_text(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The turns with their texts alone, for what reads messages and shows nothing."""
    return [
        {**turn, "content": "".join(part.get("text", "") for part in turn["content"])}
        if isinstance(turn.get("content"), list) and has_images(turn)
        else dict(turn)
        for turn in turns
    ]


def _url_of(part: Any, name: str) -> str:
    given = part.get(_IMAGE_URL) if isinstance(part, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(given.get("url"), str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise ImageInvalidError(
            f'{name} is a part of type {kind!r}: beside images a part is {{"type": "text", "text": '
            '...}, and an image is {"type": "image_url", "image_url": {"url": ...}}'
        )
    if given.get("detail") not in (None, "auto"):
        raise ImageInvalidError(
            f"{name}.image_url.detail is {given['detail']!r}: leave it out, since the model's own "
            "processor says how large an image is"
        )
    url: str = given["url"]
    if url[: len(DATA)].lower() != DATA:
        raise ImageInvalidError(
            f"{name}.image_url.url is {shown(url)}, and nothing is fetched or opened here: send "
            "the image itself, as data:image/png;base64, and its bytes in base64"
        )
    return url
