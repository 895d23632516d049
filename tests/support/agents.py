"""Agents for tests: programs and functions that ask the policy, and a server that plays them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TWO_TURNS = '''
import asyncio, json, os, sys
from pathlib import Path

async def run(task, client):
    messages = list(task["messages"])
    print("counts to", task["answer"], file=sys.stderr)
    length = 0
    for turn in range(2):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=6, temperature=0.1, seed=5
        )
        said = answer.choices[0].message.content
        length += len(said)
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": f"{task['answer']} and on"},
        ]
    return length / 100

async def silent(task, client):
    return 1.0

async def unrewarded(task, client):
    await run(task, client)

async def wrong(task, client):
    await run(task, client)
    return {"rewards": 1}

async def falls(task, client):
    if task["answer"] == "1":
        print("looks for the tool")
        raise OSError("the tool is out of order")
    return await run(task, client)

async def forks(task, client):
    """The main line, a judge that is not trained, and a second way from the first answer."""
    first = list(task["messages"])
    answer = await client.chat.completions.create(model="policy", messages=first, max_tokens=5)
    said = {"role": "assistant", "content": answer.choices[0].message.content}
    for way in ("left", "right"):
        await client.chat.completions.create(
            model="policy",
            messages=[*first, said, {"role": "user", "content": way}],
            max_tokens=4,
        )
    await client.chat.completions.create(
        model="policy:untrained", messages=[{"role": "user", "content": "judge"}], max_tokens=3
    )
    return {"reward": 1.0, "call_rewards": {1: 0.5}}
'''

PROGRAM = (
    TWO_TURNS
    + """
if __name__ == "__main__":
    import openai

    what = sys.argv[1]
    task = json.loads(Path(os.environ["ROLEMESH_TASK"]).read_text())
    if what == "exit":
        print("what went wrong")
        sys.exit(3)
    if what == "loud":
        print("x" * 100_000)
    if what == "hang":
        import time
        time.sleep(600)
    if what == "elsewhere":
        import socket
        tries = {"other port": ("127.0.0.1", int(sys.argv[2])), "far": ("192.0.2.1", 80)}
        for name, place in tries.items():
            try:
                socket.create_connection(place, timeout=2).close()
                print(json.dumps({"reward": 1.0}))
                sys.exit(5)
            except PermissionError:
                print(name, "is closed")
        try:
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sys.exit(6)
        except PermissionError:
            print("datagrams are closed")
        try:
            open(sys.argv[3]).read()
            sys.exit(7)
        except OSError:
            print("files are closed")
    if what == "word":
        print("{no json")
        sys.exit(0)
    async def main():
        async with openai.AsyncOpenAI() as client:
            return await run(task, client)
    print(json.dumps({"reward": asyncio.run(main())}))
"""
)


def write_agents(folder: Path) -> Path:
    """The file with all of them, which is a program as well."""
    path = folder / "agents.py"
    path.write_text(PROGRAM)
    return path


@contextmanager
def agent_server(play: Callable[[dict[str, Any]], Any]) -> Iterator[str]:
    """A server of agents: each POST is played on a thread, and what that gives is the answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status, said = 200, play(json.loads(body))
            if isinstance(said, int):
                status, said = said, {"error": "on purpose"}
            answer = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/play"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def played(run: Callable[[dict[str, Any], Any], Any], told: dict[str, Any]) -> Any:
    """Plays a function as the server of agents does, with OpenAI's client."""
    from openai import AsyncOpenAI

    async def play() -> Any:
        async with AsyncOpenAI(base_url=told["base_url"], api_key=told["api_key"]) as client:
            return await run(told["task"], client)

    return {"reward": asyncio.run(play())}
