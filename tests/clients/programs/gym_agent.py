"""An agent of a resources server of NeMo-Gym: gym_agent.py URL ROW prints what it saw as JSON.

URL is that of the server. Base URL and key of the session come from OPENAI_BASE_URL and
OPENAI_API_KEY. It ends the session with the verifier's reward; where the verifier failed, with
none.
"""

from __future__ import annotations

import http.cookiejar
import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any

from openai import OpenAI

MODEL = "policy"


class Server:
    """A resources server, with the cookie that it gave."""

    def __init__(self, url: str) -> None:
        self._url = url
        cookies = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        self._opener = urllib.request.build_opener(cookies)

    def post(self, path: str, body: Any, **headers: str) -> Any:
        headers = {"content-type": "application/json", **headers}
        asked = urllib.request.Request(self._url + path, json.dumps(body).encode(), headers)
        with self._opener.open(asked) as answer:
            return json.load(answer)


def rollout(server: Server, row: dict[str, Any]) -> Any:
    """Plays a row; gives what the verifier answers, or why it does not."""
    asked = row["responses_create_params"]
    policy: Any = OpenAI()
    server.post("/seed_session", row)
    messages: list[Any] = list(asked["input"])
    # Responses have the function's fields beside the type, chat completions below it.
    tools: list[Any] = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in asked["tools"]
    ]
    output: list[dict[str, Any]] = []
    for turn in range(row["deposits"] + 1):
        is_last = turn == row["deposits"]
        answer = policy.chat.completions.create(
            model=MODEL,
            messages=messages,
            tools=tools,
            tool_choice="none" if is_last else "required",
            temperature=asked["temperature"],
            max_tokens=asked["max_output_tokens"],
            seed=turn,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        choice = answer.choices[0]
        drawn = {
            "prompt_token_ids": answer.model_dump()["prompt_token_ids"],
            "generation_token_ids": choice.model_dump()["token_ids"],
            "generation_log_probs": [place.logprob for place in choice.logprobs.content],
        }
        messages.append(choice.message)
        for call in choice.message.tool_calls or ():
            name, arguments = call.function.name, call.function.arguments
            result = json.dumps(server.post(f"/{name}", json.loads(arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            item = {"type": "function_call", "id": call.id, "call_id": call.id, "name": name}
            output.append({**item, "arguments": arguments, **drawn})
            output.append({"type": "function_call_output", "call_id": call.id, "output": result})
        if not choice.message.tool_calls:
            text = {"type": "output_text", "text": choice.message.content, "annotations": []}
            item = {"type": "message", "id": answer.id, "role": "assistant", "content": [text]}
            output.append({**item, "status": "completed", **drawn})
    response = {
        "id": answer.id,
        "object": "response",
        "created_at": answer.created,
        "model": MODEL,
        "output": output,
        "tools": asked["tools"],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
    }
    try:
        return server.post("/verify", {**row, "response": response})
    except urllib.error.HTTPError as error:
        return {"_ng_failure_class": f"status {error.code}: {error.read().decode()}"}


def main() -> None:
    verified = rollout(Server(sys.argv[1]), json.loads(sys.argv[2]))
    # A judge that failed says nothing about the answer: its reward of 0 is none.
    failure = verified.get("_ng_failure_class")
    session = Server(os.environ["OPENAI_BASE_URL"].removesuffix("/v1"))
    session.post(
        "/end",
        {"reward": None if failure else verified["reward"]},
        authorization=f"Bearer {os.environ['OPENAI_API_KEY']}",
    )
    print(json.dumps({"failure": failure, "verified": verified}))


if __name__ == "__main__":
    main()
