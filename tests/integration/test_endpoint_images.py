"""An endpoint of a model of images and text: it shows what messages hold, and opens nothing."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import support.endpoints
import torch
from support.endpoints import FIRST_VERSION, Sampler, Served, serving_endpoint
from support.evaluations import scored
from support.image_prompts import LARGE_HEADS, scores, text_weights, whole_model
from support.tiny_images import IMAGE_PAD, noise, plain, png, write_tiny_image_model

from rolemesh.engine.images.processing import ImageProcessor
from rolemesh.engine.rollout.requests import RolloutRequest, RolloutTrajectory
from rolemesh.engine.sessions.store import SessionRules
from rolemesh.engine.specs import ImagesSpec
from rolemesh.engine.specs.evaluation import EvaluationQuestion

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU vLLM rounds activations too"
)

ROUNDING = 1e-4
"""Log-probs by two implementations in float32; another picture moves them by more than 0.01."""


@dataclass
class Text:
    """The text part of the whole model, as a trainer sends it."""

    whole: Any

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(text_weights(self.whole))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_image_model(tmp_path_factory.mktemp("images") / "model", **LARGE_HEADS)


@pytest.fixture(scope="module")
def sampler(folder: Path) -> Iterator[Sampler]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            support.endpoints, "load_trainer_model", lambda folder: Text(whole_model(folder))
        )
        sampler = Sampler(folder)
        yield sampler
        sampler.close()


@pytest.fixture(scope="module")
def served(sampler: Sampler) -> Iterator[Served]:
    with serving_endpoint(sampler) as endpoint:
        yield endpoint


def shown(picture: bytes, **more: Any) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    return {"type": "image_url", "image_url": {"url": url, **more}}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def answered(served: Served, content: Any, **more: Any) -> tuple[int, dict[str, Any]]:
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 4,
        "seed": 1,
        "logprobs": True,
        "return_token_ids": True,
        **more,
    }
    answer = served.http.post("/v1/chat/completions", json=body)
    return answer.status_code, answer.json()


def refusal(served: Served, content: Any) -> str:
    status, answer = answered(served, content)
    assert status == 400, answer
    return str(answer["error"]["message"])


def by_the_whole_model(
    served: Served, prompt: Sequence[int], drawn: Sequence[int], pictures: Sequence[np.ndarray]
) -> torch.Tensor:
    """Log-probs of drawn tokens by transformers' model of images and text."""
    request = RolloutRequest(row=0, prompt_tokens=prompt, seed=0)
    trajectory = RolloutTrajectory(
        row=0, completion_tokens=drawn, logprobs=[], finish_reason="stop", policy_versions=[]
    )
    model = whole_model(served.sampler.folder)
    processor = ImageProcessor(served.sampler.folder)
    return scores(model, processor, request, pictures, trajectory)


def test_text_is_answered_by_the_model(served: Served) -> None:
    status, answer = answered(served, [said("hello")])
    assert status == 200, answer
    prompt, drawn = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    assert "user\nhello" in served.sampler.tokenizer.decode(prompt)
    assert len(drawn) == 4


def test_the_model_sees_the_images_of_a_message_in_their_places(served: Served) -> None:
    pictures = [noise(width=56, height=140, seed=1), noise(seed=0)]
    content = [
        said("a"),
        shown(png(pictures[0])),
        said("b"),
        shown(png(pictures[1]), detail="auto"),
    ]
    for order in (pictures, [noise(width=56, height=140, seed=7), pictures[1]]):
        content[1] = shown(png(order[0]))
        status, answer = answered(served, content)
        assert status == 200, answer
        prompt, choice = answer["prompt_token_ids"], answer["choices"][0]
        text = served.sampler.tokenizer.decode(prompt)
        assert text.startswith("<|im_start|>user\na<|vision_start|><|image_pad|>")
        # 2 x 5 places and 4 x 3.
        assert prompt.count(IMAGE_PAD) == 22
        told = [place["logprob"] for place in choice["logprobs"]["content"]]
        found = by_the_whole_model(served, prompt, choice["token_ids"], order)
        assert told == pytest.approx(found.tolist(), abs=ROUNDING)
        other = by_the_whole_model(
            served, prompt, choice["token_ids"], [noise(width=56, height=140, seed=3), order[1]]
        )
        assert float((found - other).abs().max()) > 100 * ROUNDING
        asked = {"model": "policy", "messages": [{"role": "user", "content": content}]}
        assert served.http.post("/tokenize", json=asked).json()["tokens"] == prompt


def test_a_session_keeps_what_its_first_prompt_shows(served: Served) -> None:
    session = served.session(seed=5)
    picture = noise(seed=2)
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [shown(png(picture)), said("what?")]}
    ]
    answer = session.chat(messages, max_tokens=5)
    messages += [
        {"role": "assistant", "content": answer.choices[0].message.content},
        {"role": "user", "content": [said("and"), said(" now?")]},
    ]
    session.chat(messages, max_tokens=3)
    with pytest.raises(openai.BadRequestError, match="is shown an image behind an answer"):
        session.chat([*messages[:2], {"role": "user", "content": [shown(png(picture))]}])
    calls = session.read()["calls"]
    assert [call["parent"] for call in calls] == [None, 0]
    opened = served.endpoint.sessions.of_id(session.session_id)
    assert opened is not None
    (branch,) = opened.session.branches()
    assert [image.data for image in branch.images] == [png(picture)]
    assert branch.prompt_tokens.count(IMAGE_PAD) == 12
    drawn = [at for at, is_trained in enumerate(branch.loss_mask) if is_trained]
    assert len(drawn) == 8
    found = by_the_whole_model(served, branch.prompt_tokens, branch.completion_tokens, [picture])[
        drawn
    ]
    told = [branch.logprobs[at] for at in drawn]
    assert told == pytest.approx(found.tolist(), abs=ROUNDING)
    assert set(branch.policy_versions) == {FIRST_VERSION}


def test_equal_tokens_with_another_picture_are_another_tree(served: Served) -> None:
    session = served.session(seed=5)
    for color in ((200, 0, 0), (0, 0, 200)):
        content = [shown(png(plain(color))), said("what?")]
        session.chat([{"role": "user", "content": content}], max_tokens=2)
    opened = served.endpoint.sessions.of_id(session.session_id)
    assert opened is not None
    first, second = opened.session.branches()
    assert first.prompt_tokens == second.prompt_tokens
    assert [one.images[0].data for one in (first, second)] == [
        png(plain(color)) for color in ((200, 0, 0), (0, 0, 200))
    ]


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_an_address_of_an_image_is_refused_and_never_opened(served: Served, scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        url = f"{scheme}://127.0.0.1:{server.getsockname()[1]}/image.png"
        picture = {"type": "image_url", "image_url": {"url": url}}
        assert "nothing is fetched or opened here" in refusal(served, [picture, said("what?")])
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}},
        {"type": "image_embeds", "image_embeds": base64.b64encode(b"a pickle").decode()},
        {"type": "video_url", "video_url": {"url": "http://127.0.0.1:9/a.mp4"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        shown(png(noise())[:200]),
    ],
    ids=["file", "embeds", "video", "no image", "cut off"],
)
def test_what_is_no_whole_image_is_refused_and_the_next_call_answered(
    served: Served, part: dict[str, Any]
) -> None:
    refusal(served, [part, said("what?")])
    status, _ = answered(served, "hello")
    assert status == 200


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"max_pixels": 112 * 84 - 1}, "has 112 x 84 pixels, more than 9407"),
        ({"max_bytes": 100}, "more than 100: make it smaller"),
        ({"max_per_prompt": 1}, "messages show 2 images, more than 1"),
    ],
)
def test_the_bounds_of_the_data_hold_for_clients(
    sampler: Sampler, served: Served, bounds: dict[str, int], message: str
) -> None:
    with serving_endpoint(sampler, image_bounds=[ImagesSpec(**bounds)]) as bounded:
        picture = shown(png(noise()))
        assert message in refusal(bounded, [picture, picture])


def test_a_session_whose_rows_have_no_place_for_images_takes_none(served: Served) -> None:
    opened = served.endpoint.sessions.open(SessionRules(may_show_images=False))
    messages = [{"role": "user", "content": [shown(png(noise()))]}]
    answer = served.http.post(
        "/v1/chat/completions",
        json={"model": "policy", "messages": messages, "max_tokens": 2},
        headers={"authorization": f"Bearer {opened.key}"},
    )
    assert answer.status_code == 400, answer.text
    assert "has no section images" in answer.json()["error"]["message"]


AGENT = """
async def run(task, client):
    (turn,) = task["messages"]
    answer = await client.chat.completions.create(model="policy", messages=[turn], max_tokens=3)
    urls = [part["image_url"]["url"] for part in turn["content"] if part["type"] == "image_url"]
    return float(len(urls) and len(urls[0]))
"""


def test_an_evaluation_has_agents_play_rows_with_images(served: Served, tmp_path: Path) -> None:
    pictures = [png(noise(seed=3)), png(plain((9, 9, 9)))]
    for name, picture in zip(("train", "held"), pictures, strict=True):
        (tmp_path / f"{name}.png").write_bytes(picture)
        row = {"prompt": f"{name}?", "images": [f"{name}.png"]}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    (tmp_path / "agent.py").write_text(AGENT)
    data = {
        "type": "jsonl",
        "path": str(tmp_path / "train.jsonl"),
        "held_out_path": str(tmp_path / "held.jsonl"),
        "images": {"folder": str(tmp_path)},
    }
    agent = {"type": "python_agent", "run": f"{tmp_path / 'agent.py'}:run"}
    question = EvaluationQuestion.model_validate(
        {
            "asked": {"url": f"{served.endpoint.url}/v1", "tokenizer": str(served.sampler.folder)},
            "drawing": {"max_tokens": 3},
            "tasks": [{"name": "shown", "data": data, "agent": agent}],
        }
    )
    (row,) = scored(question.model_dump_json())
    assert row["score"] == len(shown(pictures[1])["image_url"]["url"]), row
    assert row["num_tokens"] == 3
    assert "<|image_pad|>" in row["prompt"]
