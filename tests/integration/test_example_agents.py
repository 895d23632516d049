"""The examples of agents run as they stand in the repository, against a policy that knows sums.

`tests/clients` has the one that needs verifiers, in an environment of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.agents import agent_server
from support.example_servers import EXAMPLES

TESTS = Path(__file__).parents[1]
AGENTS = EXAMPLES / "agents"
QUESTION = re.compile(r"(\d+) \* (\d+) = \?")
START_S = 120.0
"""Within which a server answers; alone on a machine it takes 3 s."""


def policy(request: dict[str, Any]) -> dict[str, Any]:
    """Calls the calculator for a question, and repeats what that says; a chat completion."""
    asked = request["messages"][-1]["content"]
    question = QUESTION.fullmatch(asked)
    said = f"<calc>{question[1]} * {question[2]}</calc>" if question else asked.split()[-1]
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": request["model"],
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": said},
            }
        ],
    }


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with agent_server(policy) as url:
        yield url


def task(answer: str) -> dict[str, Any]:
    """The row "13 times 7", of which someone says that its product is `answer`."""
    messages = [
        {"role": "system", "content": "Calculate."},
        {"role": "user", "content": "13 * 7 = ?"},
    ]
    return {"messages": messages, "answer": answer}


@pytest.mark.parametrize(("answer", "reward"), [("91", 1.0), ("90", 0.0)])
def test_the_calculator_agent_is_rewarded_for_the_product(
    endpoint: str, answer: str, reward: float
) -> None:
    run = runpy.run_path(str(AGENTS / "calculator_agent.py"))["run"]

    async def played() -> float:
        async with openai.AsyncOpenAI(base_url=endpoint, api_key="none") as client:
            return float(await run(task(answer), client))

    assert asyncio.run(played()) == reward


def test_the_calculator_agent_is_a_program_too(endpoint: str, tmp_path: Path) -> None:
    row = tmp_path / "task.json"
    row.write_text(json.dumps(task("91")))
    done = subprocess.run(
        [sys.executable, str(AGENTS / "calculator_agent.py")],
        env={
            **os.environ,
            "OPENAI_BASE_URL": endpoint,
            "OPENAI_API_KEY": "none",
            "ROLEMESH_TASK": str(row),
        },
        capture_output=True,
        text=True,
        timeout=START_S,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {"reward": 1.0}


@contextlib.contextmanager
def mcp_agents() -> Iterator[str]:
    """The server of agents whose tool is an MCP server; gives its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(AGENTS / "mcp_agent_server.py"), str(port)])
    try:
        end = time.monotonic() + START_S
        while True:
            assert server.poll() is None, "the server has ended"
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            assert time.monotonic() < end, "the server does not answer"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/play"
    finally:
        server.terminate()
        server.wait(30)


def test_the_mcp_agents_are_rewarded_for_what_their_tool_says(endpoint: str) -> None:
    told = {"base_url": endpoint, "api_key": "none", "model": "policy"}
    with mcp_agents() as url:
        for answer, reward in (("91", 1.0), ("90", 0.0)):
            played = httpx.post(url, json={**told, "task": task(answer)}, timeout=60)
            assert played.json() == {"reward": reward}


@pytest.mark.parametrize(
    "example", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.relative_to(EXAMPLES).name
)
def test_every_example_is_run_by_a_test(example: Path) -> None:
    """A file of tests names it, by its file or as the module that is loaded."""
    named = re.compile(rf'\b{example.stem}(\.py\b|"\))')
    assert any(named.search(path.read_text()) for path in TESTS.rglob("test_*.py"))
