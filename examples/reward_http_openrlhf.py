"""A reward server in OpenRLHF's form. In a recipe: `reward: http://localhost:5000/get_reward`.

Run it with `python reward_http_openrlhf.py 5000`; it needs nothing but Python.
`rolemesh reward check http://localhost:5000/get_reward` tries it.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def judge(query, prompt, label):
    """The reward of one sequence, prompt and completion: any finite number."""
    return 1.0 if label and label in query[len(prompt) :] else 0.0


class RewardHandler(BaseHTTPRequestHandler):
    """POST {"query": [...], "prompts": [...], "labels": [...]} -> {"rewards": [...], ...}."""

    protocol_version = "HTTP/1.1"  # keeps connections open
    disable_nagle_algorithm = True  # header and body are sent at once

    def do_POST(self):
        """Judges a batch."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            batch = json.loads(body)
            columns = zip(batch["query"], batch["prompts"], batch["labels"], strict=True)
            rewards = [judge(*row) for row in columns]
        except (ValueError, KeyError, TypeError) as error:
            return self.answer(400, {"error": f"no batch: {error!r}"})
        length = [float(len(query)) for query in batch["query"]]
        self.answer(
            200, {"rewards": rewards, "scores": rewards, "extra_logs": {"query_length": length}}
        )

    def answer(self, status, value):
        """Sends a JSON answer."""
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        """Keeps the terminal quiet."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), RewardHandler)
    print(f"http://127.0.0.1:{server.server_port}/get_reward", flush=True)
    server.serve_forever()
