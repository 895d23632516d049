"""Measures what an endpoint costs over sampling by itself, its front, and what it remembers.

    PYTHONPATH=tests python tests/benchmarks/endpoint.py [--model FOLDER|tiny] [--sessions 256]

Prints one JSON line. `over_generate` is the time of all sessions through HTTP, asked by a process
of its own, over that of our own `generate` on the same prompts with the same seeds, in pairs side
by side. `front` is a chat call that a scripted sampler answers at once. `remembered` is the memory
of sessions, as a fresh process measures it, over what they are counted as.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from support.raw_http import RawHttp
from support.tiny_models import write_tiny_llama
from transformers import AutoTokenizer

from rolemesh.engine.rollout.base import RolloutBackend
from rolemesh.engine.rollout.endpoint.calls import EndpointCall, EndpointCalls
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.sessions.store import Sessions
from rolemesh.engine.specs import EndpointSpec, SamplingSpec, VllmSpec
from rolemesh.rpc.loop_thread import LoopThread
from rolemesh.services.endpoint.endpoint import Endpoint
from rolemesh.services.runtime.calls.compute import ComputeThread

PATIENCE_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=".models/SmolLM2-135M-Instruct", help="folder, or tiny")
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32, help="that each session samples, at most")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--front-calls", type=int, default=1000)
    parser.add_argument("--remembered", type=int, default=10_000, help="sessions")
    parser.add_argument("--part", choices=["client", "memory"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part == "client":
        asyncio.run(ask())
    elif arguments.part == "memory":
        print(json.dumps(remember(arguments.remembered)))
    else:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measured(arguments, Path(folder))))


def measured(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = Path(arguments.model)
    if arguments.model == "tiny":
        model = write_tiny_llama(folder / "model")
    compute, loop = ComputeThread(), LoopThread("benchmark", "benchmark")
    spec = VllmSpec(dtype="float32", max_model_len=512, max_num_seqs=arguments.sessions)

    def do(fn: Any) -> Any:
        return loop.run(compute.run(fn))

    backend = do(lambda: make_backend(spec, model, has_endpoint=True, folder_version=0))
    with Client() as client:
        costs = do_pairs(arguments, model, backend, compute, do, client)
        front = do_front(arguments, backend, compute, do, client)
    do(backend.close)
    memory = subprocess.run(
        [sys.executable, __file__, "--part", "memory", "--remembered", str(arguments.remembered)],
        capture_output=True,
        check=True,
    )
    return {
        "benchmark": "endpoint",
        "config": {name: value for name, value in vars(arguments).items() if name != "part"},
        **costs,
        "front": front,
        "remembered": json.loads(memory.stdout),
    }


# --- over our own generate ------------------------------------------------------------------


def do_pairs(
    arguments: argparse.Namespace,
    model: Path,
    backend: RolloutBackend,
    compute: ComputeThread,
    do: Any,
    client: Client,
) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    draw = random.Random(1)
    asked, requests = [], []
    for row in range(arguments.sessions):
        words = " ".join(str(draw.randrange(1000)) for _ in range(draw.randrange(4, 24)))
        messages = [{"role": "user", "content": f"Add {words}"}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        requests.append(RolloutRequest(row=row, prompt_tokens=tokens, seed=row))
        body = {"model": "policy", "messages": messages, "seed": row, "temperature": 1.0}
        asked.append({**body, "max_tokens": arguments.tokens, "logprobs": True})
    sampling = SamplingSpec(max_new_tokens=arguments.tokens)

    def generated() -> tuple[float, int]:
        started = time.perf_counter()
        rows = list(backend.generate(requests, sampling))
        taken = time.perf_counter() - started
        return taken, sum(len(row.completion_tokens) for row in rows)

    with Opened(backend, EndpointCalls(), compute, do) as endpoint:
        alone, through, num_tokens = [], [], set()
        # The first pair warms both.
        for pair in range(arguments.pairs + 1):
            sessions = [endpoint.sessions.open() for _ in asked]
            paths = [f"/sessions/{one.session_id}/v1/chat/completions" for one in sessions]
            taken, num_own = do(generated)
            answer = client.ask(endpoint.url, list(zip(paths, asked, strict=True)), len(asked))
            num_http = sum(one.num_sampled for one in sessions)
            if pair:
                alone.append(taken)
                through.append(answer["seconds"])
                num_tokens |= {num_own, num_http}
    ratios = [ours / own for ours, own in zip(through, alone, strict=True)]
    return {
        "generate_s": [round(one, 3) for one in alone],
        "endpoint_s": [round(one, 3) for one in through],
        "over_generate": round(statistics.median(ratios), 4),
        "tokens": sorted(num_tokens),
    }


class Opened:
    """An endpoint of the back end with these calls."""

    def __init__(
        self, backend: RolloutBackend, calls: EndpointCalls, compute: ComputeThread, do: Any
    ) -> None:
        backend.endpoint_calls = calls
        self._do = do
        self._endpoint: Endpoint = do(
            lambda: Endpoint(
                EndpointSpec(),
                backend,
                compute,
                bring_weights=lambda: None,
                may_sample=lambda: True,
            )
        )

    def __enter__(self) -> Endpoint:
        return self._endpoint

    def __exit__(self, *_: object) -> None:
        self._do(self._endpoint.close)


# --- the front alone ------------------------------------------------------------------------


class AnsweredAtOnce(EndpointCalls):
    """A sampler that has one token for each call before it is asked."""

    def begin(self, call: EndpointCall) -> None:
        """Answers."""
        from vllm.logprobs import Logprob
        from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

        completion = CompletionOutput(
            index=0,
            text="a",
            token_ids=[5],
            cumulative_logprob=None,
            logprobs=[{5: Logprob(0.0, 1, "a")}],
            finish_reason="length",
            weight_versions=[WeightVersionSpan("0", 0, 1)],
        )
        prompt = call.prompt["prompt_token_ids"]
        call.told(RequestOutput(call.call_id, None, prompt, None, [completion], finished=True))


def do_front(
    arguments: argparse.Namespace,
    backend: RolloutBackend,
    compute: ComputeThread,
    do: Any,
    client: Client,
) -> dict[str, Any]:
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": "Add " + "12 34 " * 20}],
        "max_tokens": 1,
    }
    found: dict[str, Any] = {}
    with Opened(backend, AnsweredAtOnce(), compute, do) as endpoint:
        for name, at_once in (("warm", 1), ("one_at_a_time", 1), ("at_once", 64)):
            sessions = [endpoint.sessions.open() for _ in range(arguments.front_calls)]
            paths = [f"/sessions/{one.session_id}/v1/chat/completions" for one in sessions]
            answer = client.ask(endpoint.url, [(path, body) for path in paths], at_once)
            if name == "one_at_a_time":
                times = sorted(answer["each_ms"])
                found["p50_ms"] = round(times[len(times) // 2], 2)
                found["p99_ms"] = round(times[int(0.99 * len(times))], 2)
            elif name == "at_once":
                found["calls_per_s"] = round(arguments.front_calls / answer["seconds"])
    return found


# --- the client, a process of its own -------------------------------------------------------


class Client:
    """The process that asks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--part", "client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def ask(self, url: str, asked: Sequence[tuple[str, Any]], at_once: int) -> dict[str, Any]:
        """Seconds of all requests together, and milliseconds of each."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps({"url": url, "asked": asked, "at_once": at_once})
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


async def ask() -> None:
    """Asks what each line of stdin says, and says how long it took."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        given = json.loads(line)
        http, each_ms = RawHttp(given["url"], PATIENCE_S), list[float]()
        left = iter([(path, json.dumps(body).encode()) for path, body in given["asked"]])

        async def work(http: RawHttp, left: Any, each_ms: list[float]) -> None:
            for path, body in left:
                begun = time.perf_counter()
                kind = {"content-type": "application/json"}
                answer = await http.ask("POST", path, kind, body)
                each_ms.append(1000 * (time.perf_counter() - begun))
                assert answer.status == 200, answer.body

        started = time.perf_counter()
        await asyncio.gather(*(work(http, left, each_ms) for _ in range(given["at_once"])))
        taken = time.perf_counter() - started
        http.close()
        print(json.dumps({"seconds": taken, "each_ms": each_ms}), flush=True)


# --- what is remembered ---------------------------------------------------------------------


def remember(num_sessions: int) -> dict[str, Any]:
    """Memory of sessions of four turns, over what it is counted as."""
    draw = random.Random(1)
    process = psutil.Process()
    sessions = Sessions(max_sessions=num_sessions, max_bytes=1 << 40)
    tokens = [draw.randrange(1 << 15) for _ in range(4096)]
    gc.collect()
    before = process.memory_info().rss
    for number in range(num_sessions):
        opened = sessions.open()
        prompt: list[int] = tokens[number % 1000 : number % 1000 + draw.randrange(50, 200)]
        for _ in range(4):
            sessions.begin(opened)
            sampled = draw.sample(tokens, draw.randrange(20, 100))
            logprobs = [-draw.random() for _ in sampled]
            call = sessions.end_call(
                opened, prompt, sampled, logprobs, [(0, number)], finish_reason="stop"
            )
            opened.session.note_answer(draw.randbytes(32), call)
            prompt = [*prompt, *sampled, *tokens[:20]]
        sessions.end(opened, reward=1.0)
    gc.collect()
    taken = process.memory_info().rss - before
    return {
        "sessions": len(sessions),
        "calls": 4 * num_sessions,
        "mib": round(taken / 2**20, 1),
        "over_counted": round(taken / sessions.num_bytes, 3),
    }


if __name__ == "__main__":
    main()
