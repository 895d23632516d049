"""A reward server in OpenRLHF's form that goes wrong as it is told: `python FILE FAULT`."""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
BUSY = threading.Lock()
CALLS = itertools.count()


def rewards_of(queries: list[str], prompts: list[str]) -> Any:
    """Length of the completion, but for the fault."""
    lengths: list[Any] = [
        float(len(query) - len(prompt)) for query, prompt in zip(queries, prompts, strict=True)
    ]
    if FAULT == "short" and len(lengths) > 1:
        return lengths[:-1]
    if FAULT == "nan":
        lengths[0] = float("nan")
    if FAULT == "text":
        lengths[0] = "good"
    if FAULT == "sorted":
        lengths.sort()
    if FAULT == "random":
        return [length + random.random() for length in lengths]
    if FAULT == "constant":
        return [1.0] * len(lengths)
    if FAULT == "compares":
        mean = sum(lengths) / len(lengths)
        return [length - mean for length in lengths]
    return lengths


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            batch = json.loads(body)
        except ValueError:
            self.answer(500 if FAULT == "malformed" else 400, {})
            return
        if FAULT == "alone" and not BUSY.acquire(blocking=False):
            self.answer(503, {})
            return
        if FAULT == "flaky" and next(CALLS) % 2 == 0:
            self.answer(503, {})
            return
        try:
            time.sleep(0.05 * (FAULT == "alone"))
            lengths = [
                len(q) - len(p) for q, p in zip(batch["query"], batch["prompts"], strict=True)
            ]
            is_odd = any(ord(letter) > 127 for query in batch["query"] for letter in query)
            if FAULT == "dies" and is_odd:
                os._exit(1)
            if (FAULT == "empty" and 0 in lengths) or (FAULT == "ascii" and is_odd):
                self.answer(500, {})
            elif FAULT == "brief" and max(lengths) > 1000:
                self.answer(413, {})
            else:
                self.answer(200, {"rewards": rewards_of(batch["query"], batch["prompts"])})
        finally:
            if FAULT == "alone":
                BUSY.release()

    def answer(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_port}/get_reward", flush=True)
    server.serve_forever()
