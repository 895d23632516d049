"""An agent between environments of OpenEnv and the policy: openenv_agent.py WHAT prints JSON.

Base URL and key of the session come from OPENAI_BASE_URL and OPENAI_API_KEY.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from typing import Any

import httpx
from openai import OpenAI
from openenv.core.generic_client import GenericEnvClient
from openenv.core.harness.capture import CaptureServer, validate_llm
from openenv.core.harness.capture.upstream import prepare_request
from openenv.core.harness.capture.validate import check_upstream_response
from openenv.core.mcp_client import MCPToolClient
from openenv_games import Letters, Purse, app_of, serving

MODEL = "policy"


def websocket() -> dict[str, Any]:
    """An episode over the websocket: the policy answers each observation."""
    client: Any = OpenAI()
    seen: dict[str, Any] = {"texts": [], "rewards": []}
    with serving(app_of(Letters)) as url, GenericEnvClient(base_url=url).sync() as environment:
        result = environment.reset(seed=1, episode_id="bees")
        messages: list[Any] = []
        while not result.done:
            messages.append({"role": "user", "content": result.observation["question"]})
            answer = client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=16, seed=len(messages)
            ).choices[0]
            messages.append(answer.message)
            result = environment.step({"text": answer.message.content})
            seen["texts"].append(answer.message.content)
            seen["rewards"].append(result.reward)
        seen["state"] = environment.state()
    return seen


def mcp() -> dict[str, Any]:
    """An episode over an MCP session: tools are listed, offered to the policy, and called."""
    client: Any = OpenAI()

    async def play(url: str) -> dict[str, Any]:
        seen: dict[str, Any] = {"calls": [], "results": []}
        async with MCPToolClient(base_url=url) as environment:
            await environment.reset()
            tools: list[Any] = [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": tool.input_schema,
                        "strict": True,
                    },
                }
                for tool in await environment.list_tools()
            ]
            messages: list[Any] = [{"role": "user", "content": "Put 3 coins into the purse."}]
            for seed in range(2):
                answer = client.chat.completions.create(
                    model=MODEL,
                    messages=messages,
                    tools=tools,
                    tool_choice="required",
                    max_tokens=96,
                    seed=seed,
                ).choices[0]
                messages.append(answer.message)
                for call in answer.message.tool_calls or ():
                    arguments = json.loads(call.function.arguments)
                    result = await environment.call_tool(call.function.name, **arguments)
                    seen["calls"].append([call.function.name, arguments])
                    seen["results"].append(str(result))
                    messages.append(
                        {"role": "tool", "tool_call_id": call.id, "content": str(result)}
                    )
            state = await environment.state()
            seen["num_calls"] = state.step_count
            seen["tools"] = [tool["function"]["name"] for tool in tools]
        return seen

    with serving(app_of(Purse)) as url:
        return asyncio.run(play(url))


def capture() -> dict[str, Any]:
    """Its proxy between an agent and the policy: what it captures, and what it says of us."""
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    proxy = CaptureServer(llm_url=url, model=MODEL, port=port, api_key=key)
    proxy.start()
    try:
        base = f"http://127.0.0.1:{port}"
        opened = httpx.post(f"{base}/sessions", json={"sampling": {"temperature": 1.0}}).json()
        client: Any = OpenAI(base_url=f"{base}/v1", api_key=opened["session_id"])
        messages: list[Any] = []
        for seed, question in enumerate(("Name a fish.", "And a bird.", "And a tree.")):
            messages.append({"role": "user", "content": question})
            answer = client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=12, seed=seed, top_p=0.5
            )
            messages.append(answer.choices[0].message)
        session = f"{base}/sessions/{opened['session_id']}"
        entries = httpx.get(f"{session}/trace_entries").json()
        rollout = httpx.get(f"{session}/rollout").json()
    finally:
        proxy.stop()
    checked, key = os.environ["CHECKED_BASE_URL"], os.environ["CHECKED_KEY"]
    answer = httpx.post(
        f"{checked}/chat/completions",
        # With all that it adds to a request, neutral values among it.
        json=prepare_request(
            {
                **{"model": MODEL, "messages": [{"role": "user", "content": "Name a bird."}]},
                **{"max_tokens": 8, "top_p": 0.5, "top_k": 4, "min_p": 0.1},
                **{"frequency_penalty": 1, "presence_penalty": 1, "repetition_penalty": 2},
            }
        ),
        headers={"authorization": f"Bearer {key}"},
        timeout=120,
    ).json()
    report = validate_llm(checked, MODEL, api_key=key)
    return {
        "opened": opened,
        "entries": entries,
        "rollout": rollout,
        "problems": [str(finding) for finding in check_upstream_response(answer).findings],
        "report": {
            "capture_level": report.capture_level,
            "rollout_type": report.rollout_type,
            "logprobs_mode": report.logprobs_mode,
            "param_fixes": report.param_fixes,
            "tool_support": report.tool_support,
        },
    }


if __name__ == "__main__":
    WHAT = {each.__name__: each for each in (websocket, mcp, capture)}
    print(json.dumps(WHAT[sys.argv[1]](), default=str))
