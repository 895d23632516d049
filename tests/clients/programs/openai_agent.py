"""An agent that has the openai SDK alone: openai_agent.py WHAT prints what it saw as JSON.

Base URL and key of the session come from OPENAI_BASE_URL and OPENAI_API_KEY, as the SDK reads them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import openai

MODEL = "policy"
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": DIGIT, "b": DIGIT},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
QUESTIONS = ("Name a colour.", "Name one more.", "Which of them do you like?")


def turns() -> dict[str, Any]:
    """Three turns, each with the answers before it."""
    client: Any = openai.OpenAI()
    messages: list[Any] = [{"role": "system", "content": "Be short."}]
    seen: dict[str, Any] = {"texts": [], "logprobs": [], "finish_reasons": []}
    for seed, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=16, temperature=1, seed=seed, logprobs=True
        ).choices[0]
        # The message itself, as many agents do: with all the fields that it came with.
        messages.append(answer.message)
        seen["texts"].append(answer.message.content)
        seen["logprobs"].append([place.logprob for place in answer.logprobs.content])
        seen["finish_reasons"].append(answer.finish_reason)
    return seen


def tools() -> dict[str, Any]:
    """Two calls of a tool, one by its name, and what the model says to the second result."""
    client: Any = openai.OpenAI()
    messages: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
    named = {"type": "function", "function": {"name": "add"}}
    seen: dict[str, Any] = {"calls": [], "finish_reasons": []}
    for choice in (named, "required"):
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, tools=[ADD], tool_choice=choice, max_tokens=96, seed=1
        ).choices[0]
        seen["finish_reasons"].append(answer.finish_reason)
        messages.append(answer.message.model_dump(exclude_none=True))
        for call in answer.message.tool_calls or ():
            seen["calls"].append([call.function.name, call.function.arguments])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
    last = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[ADD], tool_choice="auto", max_tokens=16, seed=2
    )
    seen["text"] = last.choices[0].message.content
    return seen


def streams() -> dict[str, Any]:
    """A turn chunk by chunk, one by the SDK's helper, and a tool call in pieces."""
    client: Any = openai.OpenAI()
    messages: list[Any] = [{"role": "user", "content": QUESTIONS[0]}]
    text, usage = "", None
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_completion_tokens=16,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
        usage = chunk.usage or usage
    assert usage is not None
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": QUESTIONS[1]}]
    with client.chat.completions.stream(
        model=MODEL, messages=messages, max_tokens=256, seed=4, stop=[" the"], logprobs=True
    ) as stream:
        events = [event.type for event in stream]
        whole = stream.get_final_completion().choices[0]
    messages += [whole.message.to_dict(), {"role": "user", "content": "Add 1 and 2."}]
    name, arguments = "", ""
    for chunk in client.chat.completions.create(
        model=MODEL, messages=messages, tools=[ADD], tool_choice="required", max_tokens=96,
        seed=5, stream=True,
    ):  # fmt: skip
        for choice in chunk.choices:
            for part in choice.delta.tool_calls or ():
                name += part.function.name or ""
                arguments += part.function.arguments or ""
    return {
        "texts": [text, whole.message.content],
        "completion_tokens": usage.completion_tokens,
        "content_events": events.count("content.delta"),
        "logprobs": [place.logprob for place in whole.logprobs.content],
        "call": [name, arguments],
    }


def choices() -> dict[str, Any]:
    """Three answers to one question, and a turn behind the second of them."""
    client: Any = openai.OpenAI()
    messages: list[Any] = [{"role": "user", "content": QUESTIONS[0]}]
    given = client.chat.completions.create(
        model=MODEL, messages=messages, n=3, max_tokens=12, seed=6, logprobs=True, top_logprobs=2
    ).choices
    messages += [given[1].message, {"role": "user", "content": QUESTIONS[1]}]
    client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, seed=7)
    return {
        "texts": [choice.message.content for choice in given],
        "top": [len(place.top_logprobs) for place in given[0].logprobs.content],
        "logprobs": [[place.logprob for place in choice.logprobs.content] for choice in given],
    }


def side_by_side() -> dict[str, Any]:
    """Six conversations of two turns at once, and a judge's call that is not trained on."""

    async def talk(client: Any, number: int) -> list[str]:
        messages: list[Any] = [{"role": "user", "content": f"Say the number {number}."}]
        said = []
        for seed in range(2):
            answer = await client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=8, seed=10 * number + seed
            )
            said.append(answer.choices[0].message.content)
            messages += [answer.choices[0].message, {"role": "user", "content": "Again."}]
        return said

    async def all_of_them() -> list[list[str]]:
        async with openai.AsyncOpenAI() as client:
            said = await asyncio.gather(*(talk(client, number) for number in range(6)))
            await client.chat.completions.create(
                model=MODEL,
                messages=[
                    {"role": "system", "content": "Judge."},
                    {"role": "user", "content": "?"},
                ],
                max_tokens=4,
                metadata={"train": "false"},
            )
        return said

    return {"texts": asyncio.run(all_of_them())}


def unseeded() -> dict[str, Any]:
    """The same question four times, and once for four answers, all without a seed."""
    client: Any = openai.OpenAI()
    messages: list[Any] = [{"role": "user", "content": "Tell me a story."}]
    texts = []
    for number in (1, 1, 1, 1, 4):
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, n=number, max_tokens=24, temperature=1
        )
        texts += [choice.message.content for choice in answer.choices]
    return {"texts": texts}


def refusals() -> dict[str, Any]:
    """What the SDK makes of refusals, and what needs no messages."""
    client: Any = openai.OpenAI(max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "?"}]

    def refused(ask: Callable[[], Any]) -> list[Any]:
        try:
            ask()
        except openai.APIStatusError as error:
            return [type(error).__name__, error.status_code, error.param, error.message]
        return []

    create = client.chat.completions.create
    model = client.models.list().data[0]
    completion = client.completions.create(
        model=MODEL, prompt="One, two,", max_tokens=4, logprobs=1, seed=8
    ).choices[0]
    return {
        "model": [model.id, model.model_dump()["max_model_len"]],
        "completion": [completion.text, completion.logprobs.token_logprobs],
        "field": refused(
            lambda: create(model=MODEL, messages=messages, service_tier="flex", max_tokens=1)
        ),
        "unknown": refused(
            lambda: create(model=MODEL, messages=messages, extra_body={"mirostat": 2})
        ),
        "overlong": refused(
            lambda: create(model=MODEL, messages=[{"role": "user", "content": "a " * 9000}])
        ),
        "key": refused(
            lambda: client.with_options(api_key="wrong").chat.completions.create(
                model=MODEL, messages=messages
            )
        ),
    }


if __name__ == "__main__":
    KNOWN = (turns, tools, streams, choices, side_by_side, unseeded, refusals)
    print(json.dumps({each.__name__: each for each in KNOWN}[sys.argv[1]]()))
