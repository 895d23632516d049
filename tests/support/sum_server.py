"""An OpenAI endpoint that answers sums by rule, so that every score is known beforehand."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answers = Callable[[list[int], dict[str, Any]], str | None]
"""Text for the terms of a sum and its request; None: status 400."""


def said(content: Any) -> str:
    """The text of a message, which may show images beside it."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


@contextmanager
def sum_server(
    answers: Answers, key: str | None = None, decode: Callable[[list[int]], str] | None = None
) -> Iterator[tuple[str, list[Any]]]:
    """Its base URL, and the requests that come. With `decode`, prompts are token ids."""
    bodies: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *arguments: Any) -> None:
            pass

        def say(self, status: int, value: Any) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def has_key(self) -> bool:
            return key is None or self.headers.get("authorization") == f"Bearer {key}"

        def do_GET(self) -> None:
            if self.has_key():
                self.say(200, {"data": [{"id": "sums"}]})
            else:
                self.say(401, {"error": {"message": "no key"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            bodies.append(body)
            text = decode(body["prompt"]) if decode else said(body["messages"][-1]["content"])
            found = answers([int(number) for number in re.findall(r"\d+", text)], body)
            if found is None or not self.has_key():
                self.say(400, {"error": {"message": "this server knows no such sum"}})
                return
            message = {"role": "assistant", "content": found}
            choice = {"index": 0, "message": message, "text": found, "finish_reason": "stop"}
            self.say(200, {"choices": [choice], "usage": {"completion_tokens": 1}})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
