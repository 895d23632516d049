"""Messages to an endpoint, and what judges the answers, need nothing but the light installation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.client_programs import free_ports

ABSENT = ("torch", "transformers", "tokenizers", "jinja2", "safetensors", "pyarrow", "vllm")


def test_rows_are_asked_and_judged_without_torch(tmp_path: Path) -> None:
    for name, text in {"train": "1 + 1", "held": "2 + 2"}.items():
        row = {"prompt": [{"role": "user", "content": text}], "answer": "4"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (port,) = free_ports(1)
    question = {
        "asked": {"url": f"http://127.0.0.1:{port}/v1"},
        "drawing": {},
        "tasks": [
            {
                "name": "sums",
                "data": {
                    "type": "jsonl",
                    "path": str(tmp_path / "train.jsonl"),
                    "held_out_path": str(tmp_path / "held.jsonl"),
                },
                "reward": {"type": "arithmetic"},
            }
        ],
    }
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({ABSENT!r}))\n"
        "from rolemesh.services.evaluation.__main__ import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        check=True,
    )
    (told,) = map(json.loads, done.stdout.splitlines())
    # All is there, but for the endpoint.
    assert not told["is_input"], told
    assert "does not answer" in told["text"]
