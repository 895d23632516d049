"""An endpoint of a model of images and text: it takes text, and opens nothing that clients name."""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import support.endpoints
import torch
from support.endpoints import Sampler, Served, serving_endpoint
from support.image_prompts import LARGE_HEADS, text_weights, whole_model
from support.tiny_images import noise, png, write_tiny_image_model

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU vLLM rounds activations too"
)


@dataclass
class Text:
    """The text part of the whole model, as a trainer sends it."""

    whole: Any

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(text_weights(self.whole))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_tiny_image_model(tmp_path_factory.mktemp("images") / "model", **LARGE_HEADS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            support.endpoints, "load_trainer_model", lambda folder: Text(whole_model(folder))
        )
        sampler = Sampler(folder)
        with serving_endpoint(sampler) as endpoint:
            yield endpoint
        sampler.close()


def answered(served: Served, content: Any) -> tuple[int, dict[str, Any]]:
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 4,
        "seed": 1,
        "return_token_ids": True,
    }
    answer = served.http.post("/v1/chat/completions", json=body)
    return answer.status_code, answer.json()


def test_text_is_answered_by_the_model(served: Served) -> None:
    status, answer = answered(served, [{"type": "text", "text": "hello"}])
    assert status == 200, answer
    prompt, drawn = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    assert "user\nhello" in served.sampler.tokenizer.decode(prompt)
    assert len(drawn) == 4


def test_an_address_of_an_image_is_refused_and_never_opened(served: Served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/image.png"
        picture = {"type": "image_url", "image_url": {"url": url}}
        status, answer = answered(served, [picture, {"type": "text", "text": "what?"}])
        assert status == 400
        assert "this endpoint takes none: send text" in answer["error"]["message"]
        with pytest.raises(TimeoutError):
            server.accept()


def data_url(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": data_url(png(noise()))}},
        {"type": "image_embeds", "image_embeds": base64.b64encode(b"a pickle").decode()},
        {"type": "video_url", "video_url": {"url": "http://127.0.0.1:9/a.mp4"}},
    ],
    ids=lambda part: part["type"],
)
def test_pixels_and_tensors_of_clients_are_refused(served: Served, part: dict[str, Any]) -> None:
    status, answer = answered(served, [part, {"type": "text", "text": "what?"}])
    assert status == 400, answer
    status, _ = answered(served, "hello")
    assert status == 200
