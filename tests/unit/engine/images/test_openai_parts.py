"""Turns with images in the form of OpenAI's protocol, and what of it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rolemesh.engine.images.openai_parts import as_text, has_urls, with_urls, without_urls
from rolemesh.engine.images.prompt_images import ImageInvalidError

TURNS = [
    {"role": "system", "content": "Look."},
    {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": " or "}, {"type": "image"}],
    },
    {"role": "user", "content": [{"type": "image"}]},
]
URLS = [f"data:image/png;base64,{letters}" for letters in ("AAAA", "BBBB", "CCCC")]


def shown(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_images_stand_in_their_places_and_come_out_again() -> None:
    said = with_urls(TURNS, URLS)
    assert said[0] == TURNS[0]
    assert said[1]["content"] == [shown(URLS[0]), {"type": "text", "text": " or "}, shown(URLS[1])]
    assert said[2]["content"] == [shown(URLS[2])]
    assert [has_urls(one) for one in said] == [False, True, True]
    assert without_urls(said) == (TURNS, URLS)
    assert as_text(TURNS)[1] == {"role": "user", "content": " or "}


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://127.0.0.1:9/a.png", "'http://127.0.0.1:9/a.png', and nothing is fetched"),
        ("file:///etc/passwd", "'file:///etc/passwd', and nothing is fetched or opened here"),
        ("/etc/passwd", "'/etc/passwd', and nothing is fetched or opened here"),
    ],
)
def test_only_an_image_that_a_message_holds_is_taken(url: str, told: str) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, shown(url)]}
    with pytest.raises(ImageInvalidError, match=r"messages\[1\]\.content\[1\]\.image_url\.url is "):
        without_urls([TURNS[0], message])
    with pytest.raises(ImageInvalidError, match=told):
        without_urls([message])


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "assistant", "content": [shown(URLS[0])]}, "of the role 'assistant'"),
        (
            {"role": "user", "content": [shown(URLS[0]), {"type": "input_audio"}]},
            r"content\[1\] is a part of type 'input_audio'",
        ),
        ({"role": "user", "content": [shown(URLS[0]), "text"]}, "a part of type 'str'"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": URLS[0]}]},
            r"content\[0\] is a part of type 'image_url'",
        ),
        (
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": URLS[0], "detail": "low"}}],
            },
            "detail is 'low': leave it out",
        ),
    ],
)
def test_what_would_be_passed_over_is_refused(message: dict[str, Any], told: str) -> None:
    with pytest.raises(ImageInvalidError, match=told):
        without_urls([message])
