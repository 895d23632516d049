"""An agent that offers an MCP server's tools to the policy: mcp_agent.py stdio|http|session.

Prints what it saw as JSON. Base URL and key of the session come from OPENAI_BASE_URL and
OPENAI_API_KEY.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcp import Client, ClientSession, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from openai import OpenAI

MODEL = "policy"
SERVER = str(Path(__file__).with_name("mcp_tools.py"))
START_S = 60.0


def offered(tools: list[Any]) -> list[Any]:
    """Tools of a server as a chat call takes them; strict: arguments keep to the schema."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
                "strict": True,
            },
        }
        for tool in tools
    ]


async def play(server: Any) -> dict[str, Any]:
    """Two tools that the policy has to call, and an answer to what they gave."""
    policy: Any = OpenAI()
    tools = offered((await server.list_tools()).tools)
    messages: list[Any] = [{"role": "user", "content": "What do a plum and a pear cost?"}]
    seen: dict[str, Any] = {"tools": [tool["function"]["name"] for tool in tools]}
    seen |= {"calls": [], "results": []}
    price = {"type": "function", "function": {"name": "price"}}
    for seed, choice in enumerate((price, "required", "none")):
        answer = policy.chat.completions.create(
            model=MODEL,
            messages=messages,
            tools=tools,
            tool_choice=choice,
            max_tokens=96,
            seed=seed,
            extra_body={"return_token_ids": True},
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        seen["prompt"] = answer.model_dump()["prompt_token_ids"]
        for call in message.tool_calls or ():
            arguments = json.loads(call.function.arguments)
            result = await server.call_tool(call.function.name, arguments)
            text = "".join(part.text for part in result.content if part.type == "text")
            seen["calls"].append([call.function.name, arguments])
            seen["results"].append(text)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        seen["text"] = message.content
    return seen


async def stdio() -> dict[str, Any]:
    """The server is a child of the client."""
    async with Client(StdioServerParameters(command=sys.executable, args=[SERVER])) as server:
        return await play(server)


async def http() -> dict[str, Any]:
    """The newest form of the protocol, without sessions."""
    async with Client(f"http://127.0.0.1:{PORT}/mcp") as server:
        return await play(server)


async def session() -> dict[str, Any]:
    """The form with a handshake and a session."""
    async with (
        streamable_http_client(f"http://127.0.0.1:{PORT}/mcp") as (read, write, *_),
        ClientSession(read, write) as server,
    ):
        await server.initialize()
        return await play(server)


def serving(run: Callable[[], Any]) -> Any:
    """Runs something while the server answers at PORT."""
    with subprocess.Popen([sys.executable, SERVER, str(PORT)], stderr=subprocess.DEVNULL) as child:
        try:
            until = time.monotonic() + START_S
            while time.monotonic() < until:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", PORT)) == 0:
                        break
                time.sleep(0.05)
            return run()
        finally:
            child.terminate()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        PORT = free.getsockname()[1]
    if sys.argv[1] == "stdio":
        print(json.dumps(asyncio.run(stdio())))
    else:
        over = {"http": http, "session": session}[sys.argv[1]]
        print(json.dumps(serving(lambda: asyncio.run(over()))))
