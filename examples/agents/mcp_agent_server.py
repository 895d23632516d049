"""A server of agents whose tool comes from an MCP server, in an environment of its own.

    pip install "mcp==2.3.0" "openai==3.51.0"
    python examples/agents/mcp_agent_server.py 8500

A recipe names it: `environment: {type: http, url: "http://127.0.0.1:8500/play"}`. Each POST is one
trajectory; its answer, the reward, comes when the trajectory is over.
"""

import contextlib
import re
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from mcp import Client, StdioServerParameters
from mcp.server.mcpserver import MCPServer
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

EXAMPLES = [
    ("12 * 3 = ?", "<calc>12 * 3</calc>", "36"),
    ("41 * 5 = ?", "<calc>41 * 5</calc>", "205"),
]
CALL = re.compile(r"<calc>\s*(\d+)\s*\*\s*(\d+)\s*</calc>")
MAX_CALLS = 3

# Else it logs each request of the policy.
tools = MCPServer("calculator", log_level="WARNING")


@tools.tool()
def multiply(left: int, right: int) -> str:
    """The product of two whole numbers."""
    return str(left * right)


async def trajectory(task: dict[str, Any], policy: AsyncOpenAI, model: str, server: Any) -> float:
    """Asks until the policy calls no tool; 1 where its last number is right."""
    system, question = task["messages"]
    messages = [system]
    for asked, call, result in EXAMPLES:
        messages += [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": call},
            {"role": "user", "content": f"Result: {result}"},
            {"role": "assistant", "content": result},
        ]
    messages.append(question)
    said = ""
    for _ in range(MAX_CALLS):
        answer = await policy.chat.completions.create(model=model, messages=messages, max_tokens=24)
        said = answer.choices[0].message.content or ""
        found = CALL.search(said)
        if found is None:
            break
        product = await server.call_tool(
            "multiply", {"left": int(found[1]), "right": int(found[2])}
        )
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": f"Result: {product.content[0].text}"},
        ]
    numbers = re.findall(r"\d+", said)
    return float(bool(numbers) and numbers[-1] == task["answer"])


async def play(request: Request) -> JSONResponse:
    """One trajectory."""
    told = await request.json()
    async with AsyncOpenAI(base_url=told["base_url"], api_key=told["api_key"]) as policy:
        reward = await trajectory(told["task"], policy, told["model"], request.app.state.server)
    return JSONResponse({"reward": reward})


@contextlib.asynccontextmanager
async def with_tools(app: Starlette) -> AsyncIterator[None]:
    """The MCP server is a child of this process, and serves all trajectories."""
    child = StdioServerParameters(command=sys.executable, args=[__file__, "tools"])
    async with Client(child) as server:
        app.state.server = server
        yield


if __name__ == "__main__":
    if sys.argv[1] == "tools":
        tools.run("stdio")
    else:
        app = Starlette(routes=[Route("/play", play, methods=["POST"])], lifespan=with_tools)
        uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
