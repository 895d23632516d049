"""What an agent is told of its row."""

from __future__ import annotations

import base64
import json

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.images.prompt_images import PromptImage
from rolemesh.engine.sessions.results import AgentWork


def work_of(prompt: Prompt) -> AgentWork:
    return AgentWork(prompt=prompt, base_url="b", session_url="s", api_key="k", model="m")


def test_images_stand_in_the_messages_so_that_an_agent_passes_them_on() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "image"}]
    prompt = Prompt(
        prompt_id=3,
        text="a<|image_pad|>",
        tokens=[1, 2, 2],
        answer="x",
        metadata='{"level": 1}',
        messages=({"role": "user", "content": content},),
        images=(PromptImage.of(b"\x89PNG\r\n\x1a\n", (1, 2, 4)),),
    )
    task = work_of(prompt).task()
    assert json.loads(json.dumps(task)) == task
    url = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()
    assert task == {
        "prompt_id": 3,
        "text": "a<|image_pad|>",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "image_url", "image_url": {"url": url}},
                ],
            }
        ],
        "answer": "x",
        "metadata": {"level": 1},
    }


def test_a_row_of_text_is_as_it_is() -> None:
    messages = ({"role": "user", "content": "a"},)
    prompt = Prompt(prompt_id=0, text="a", tokens=[1], answer="", metadata="", messages=messages)
    assert work_of(prompt).task()["messages"] == list(messages)
    assert work_of(prompt).task()["metadata"] == {}
