"""A resources server in the form of NeMo-Gym, imitated: sessions by cookie, tools, a verifier.

The original needs a newer Python than the rest of this suite has. Of its contract this holds what
agents meet: /seed_session sets a cookie, each tool is a POST route of its own, and /verify answers
with what it was given and a reward. A judge that fails gives status 200, reward 0 and
_ng_failure_class.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
from collections.abc import Iterator
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

CREATE_PARAMS = {"input", "tools", "tool_choice", "temperature", "max_output_tokens", "model"}
"""Of a request for a Response; those that are not among them are refused, as upstream does."""


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Resources(BaseHTTPRequestHandler):
    """An account for each session: the tool puts amounts on it."""

    balances: ClassVar[dict[str, int]] = {}
    session = ""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
        routes = {"/seed_session": self.seed, "/deposit": self.deposit, "/verify": self.verify}
        try:
            if self.path not in routes:
                raise Refused(404, f"there is no {self.path}")
            if self.path != "/seed_session":
                self.session = SimpleCookie(self.headers.get("cookie"))["session"].value
                if self.session not in self.balances:
                    raise Refused(422, "this session was not seeded")
            self.answer(200, routes[self.path](body))
        except (KeyError, TypeError, ValueError) as error:
            self.answer(422, {"detail": repr(error)})
        except Refused as refused:
            self.answer(refused.status, {"detail": str(refused)})

    def seed(self, body: dict[str, Any]) -> dict[str, Any]:
        self.session = secrets.token_hex(8)
        self.balances[self.session] = body.get("start", 0)
        return {}

    def deposit(self, body: dict[str, Any]) -> dict[str, Any]:
        self.balances[self.session] += int(body["amount"])
        return {"balance": self.balances[self.session]}

    def verify(self, body: dict[str, Any]) -> dict[str, Any]:
        unknown = body["responses_create_params"].keys() - CREATE_PARAMS
        if unknown or "input" not in body["responses_create_params"]:
            raise Refused(422, f"responses_create_params: {unknown or 'input is missing'}")
        kinds = [item["type"] for item in body["response"]["output"]]
        if body.get("judge") == "down":
            return {**body, "reward": 0.0, "_ng_failure_class": "judge_failed"}
        paid = kinds.count("function_call_output") / body["deposits"]
        kept = self.balances[self.session] != body.get("start", 0)
        return {
            **body,
            "reward": paid + kept,
            "reward_components": {"paid": paid, "kept": float(kept)},
        }

    def answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        if self.path == "/seed_session":
            self.send_header("set-cookie", f"session={self.session}; Path=/")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """The address of a server, until the end of the block."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Resources) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
