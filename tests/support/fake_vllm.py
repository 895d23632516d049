"""A `vllm serve` on a real socket, with a toy for a model: routes, their order, and faults.

The toy's log-probs depend on the token before and on the factors of the adapter that a request
names, which are read from the folder; its tokens depend on the seed and the number of tokens so
far. So what a row gets does not depend on which server drew it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from support.toy_sampling import STOP, toy_logprob, toy_token

BASE = "base-model"


class Refusal(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class FakeVllm:
    """One server. Attributes are set by tests, before or while it runs.

    Example::

        with fake_vllm() as server:
            server.faults = [503, "nan"]  # of the next two completions
            ...
            server.kill()  # every connection breaks, and none is taken
            server.start()  # another process at the same address: it knows nothing
    """

    def __init__(self, *, vocab_size: int = 512) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = 512
        self.max_rank = 16
        self.logprobs_mode = "processed_logprobs"
        self.has_lora_routes = True
        self.is_name_checked = True
        self.serves_base = False
        """Takes adapters, and ignores them."""
        self.token_s = 0.0
        self.faults: list[Any] = []
        """Of the next completions that are drawn; None is none."""
        self.always: Any = None
        self.route_faults: dict[str, list[int]] = {}
        self.key: str | None = None
        self.calls: list[tuple[str, Any]] = []
        """Routes with their bodies, in order of coming."""
        self.num_aborted = 0
        self.most_in_flight = 0
        self.workers: Any = None
        """What takes part in broadcasts."""
        self.world_size = 1
        self.is_dev = False
        self.port = 0
        self._forget()

    def _forget(self) -> None:
        self.adapters: dict[str, str] = {}
        self._scales: dict[str, float] = {}
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self.is_updating = False
        self.is_initialized = False
        self.weight_version = "default"
        self.in_flight = 0

    @property
    def is_paused(self) -> bool:
        return not self._goes_on.is_set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def routes(self, *names: str) -> list[str]:
        """Routes in order, of these names where some are given."""
        return [route for route, _ in self.calls if not names or route in names]

    def drawn(self) -> list[Any]:
        """Bodies of completions that were asked for."""
        return [body for route, body in self.calls if route == "draw"]

    # --- the process -------------------------------------------------------------------------

    def start(self) -> None:
        self._forget()
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        started = threading.Event()

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            self._server = self._loop.run_until_complete(
                asyncio.start_server(self._serve, "127.0.0.1", self.port)
            )
            self.port = self._server.sockets[0].getsockname()[1]
            started.set()
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert started.wait(10)

    def kill(self) -> None:
        if not self._thread.is_alive():
            return

        def end() -> None:
            self._server.close()
            for writer in self._writers:
                writer.transport.abort()
            self._loop.stop()

        self._loop.call_soon_threadsafe(end)
        self._thread.join(10)

    # --- HTTP --------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode()
                    first, *lines = head.split("\r\n")
                    headers = {
                        name.lower(): value.strip()
                        for name, _, value in (line.partition(":") for line in lines if line)
                    }
                    raw = await reader.readexactly(int(headers.get("content-length", 0)))
                    method, target, _ = first.split(" ")
                    if not await self._answer(method, target, headers, raw, reader, writer):
                        return
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(
        self,
        method: str,
        target: str,
        headers: dict[str, str],
        raw: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        route, _, query = target.partition("?")
        body = json.loads(raw) if raw else None
        try:
            if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
                raise Refusal(401, f"Unauthorized: {headers.get('authorization')}")
            if self.route_faults.get(route):
                raise Refusal(self.route_faults[route].pop(0), "a fault of the test")
            if route == "/v1/completions":
                return await self._complete(body, reader, writer)
            self.calls.append((target if query else route, body))
            answer = await self._plain(method, route, query, body)
        except Refusal as refusal:
            answer = {"error": {"message": str(refusal), "code": refusal.status}}
            await send(writer, refusal.status, answer)
            return True
        await send(writer, 200, answer)
        return True

    async def _plain(self, method: str, route: str, query: str, body: Any) -> Any:
        if route == "/health":
            return {}
        if route == "/v1/models":
            card = {"id": BASE, "root": "/models/base", "max_model_len": self.max_model_len}
            return {"data": [card, *({"id": one, "parent": BASE} for one in self.adapters)]}
        if route.endswith("_lora_adapter") and self.has_lora_routes:
            return self._lora(route, body["lora_name"], body.get("lora_path"))
        if self.is_dev:
            return await self._dev(route, query, body)
        raise Refusal(404, "Not Found")

    def _lora(self, route: str, name: str, path: str | None) -> Any:
        if route == "/v1/unload_lora_adapter":
            if name not in self.adapters:
                raise Refusal(404, f"The lora adapter '{name}' cannot be found.")
            del self.adapters[name]
            return "Success"
        if name in self.adapters:
            raise Refusal(400, f"The lora adapter '{name}' has already been loaded.")
        assert path is not None
        folder = Path(path)
        if not (folder / "adapter_config.json").is_file():
            raise Refusal(404, f"Loading lora {name} failed: No adapter found for {path}")
        config = json.loads((folder / "adapter_config.json").read_text())
        if config["r"] > self.max_rank:
            raise Refusal(
                500, f"LoRA rank {config['r']} is greater than max_lora_rank {self.max_rank}."
            )
        self.adapters[name] = path
        if name not in self._scales:
            # As with keys and values: what a name meant first, it means for ever.
            tensors = load_file(folder / "adapter_model.safetensors")
            self._scales[name] = sum(
                float(one.abs().mean()) for key, one in tensors.items() if "lora_B" in key
            )
        return "Success"

    # --- whole weights -----------------------------------------------------------------------

    async def _dev(self, route: str, query: str, body: Any) -> Any:
        match route:
            case "/get_world_size":
                return {"world_size": self.world_size}
            case "/weight_info":
                return {"weight_version": self.weight_version}
            case "/pause":
                assert query == "mode=keep"
                self._goes_on.clear()
            case "/resume":
                self._goes_on.set()
            case "/reset_prefix_cache":
                pass
            case "/shutdown_weight_transfer_engine":
                if self.is_updating:
                    raise Refusal(500, "Cannot release a trainer connection during an update")
                self.is_initialized = False
            case "/init_weight_transfer_engine":
                info = body["init_info"]
                await asyncio.to_thread(self.workers.join, self, info)
                self.is_initialized = True
            case "/start_weight_update":
                if self.is_updating or not self.is_initialized or not self.is_paused:
                    raise Refusal(500, "a weight update is active, or was not initialized")
                self.is_updating = True
            case "/update_weights":
                if not self.is_updating:
                    raise Refusal(500, "no weight update is active")
                await asyncio.to_thread(self.workers.receive, self, body["update_info"])
            case "/finish_weight_update":
                if not self.is_updating:
                    raise Refusal(500, "no weight update is active")
                self.is_updating = False
                self.weight_version = body["weight_version"]
            case _:
                raise Refusal(404, "Not Found")
        return {"message": "ok"}

    # --- the toy -----------------------------------------------------------------------------

    def logprob(self, before: int, token: int, model: str | None) -> float:
        """Of a token after another one, by the base or an adapter that was loaded."""
        scale = 0.0 if self.serves_base or model in (None, BASE) else self._scales[str(model)]
        return toy_logprob(before, token, scale)

    def _model(self, name: str | None) -> str | None:
        if name in (None, BASE) or name in self.adapters:
            return name
        if self.is_name_checked:
            raise Refusal(404, f"The model `{name}` does not exist.")
        return None

    async def _complete(
        self, body: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        model, prompt = self._model(body.get("model")), body["prompt"]
        if len(prompt) + 1 > self.max_model_len:
            raise Refusal(400, f"This model's maximum context length is {self.max_model_len}")
        if "prompt_logprobs" in body:
            self.calls.append(("score", body))
            entries: list[Any] = [None]
            for before, token in itertools.pairwise(prompt):
                entries.append({str(token): {"logprob": self.logprob(before, token, model)}})
            choice = {"index": 0, "prompt_logprobs": entries, "token_ids": [3]}
            await send(writer, 200, {"choices": [choice]})
            return True
        if body["top_k"] == 1 and body["ignore_eos"]:
            self.calls.append(("mode", body))
            return await self._draw(body, model, None, reader, writer)
        self.calls.append(("draw", body))
        fault = self.faults.pop(0) if self.faults else self.always
        if isinstance(fault, int):
            raise Refusal(fault, "a fault of the test")
        if fault == "not_finite":
            # As vLLM 0.32 answers.
            raise Refusal(400, "Out of range float values are not JSON compliant")
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._draw(body, model, fault, reader, writer)
        finally:
            self.in_flight -= 1

    async def _draw(
        self,
        body: Any,
        model: str | None,
        fault: Any,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        prompt, drawn = list(body["prompt"]), []
        is_streamed = bool(body.get("stream"))
        reason, most = None, min(body["max_tokens"], self.max_model_len - len(prompt))
        if fault == "too_many":
            most += 3
        pieces: list[tuple[list[int], list[float]]] = []
        if is_streamed:
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
            )
        while reason is None:
            if fault == "hang" and len(drawn) >= 1:
                await asyncio.sleep(3600)
            if self.token_s:
                await asyncio.sleep(self.token_s)
            await self._goes_on.wait()
            if reader.at_eof():
                self.num_aborted += 1
                return False
            before = (prompt + drawn)[-1]
            token = toy_token(body["seed"], len(drawn), before, self.vocab_size)
            if fault == "too_many" and token == STOP:
                token = STOP + 1
            logprob = self.logprob(before, token, model)
            if self.logprobs_mode == "processed_logprobs" and body["top_k"] == 1:
                logprob = 0.0
            if self.logprobs_mode == "raw_logits":
                logprob = 7.5
            drawn.append(token)
            pieces.append(([token], [logprob]))
            if token in body.get("stop_token_ids", []):
                reason = "stop"
            elif len(drawn) == most:
                reason = "length"
            if is_streamed:
                await _event(writer, self._choice([token], [logprob], reason, prompt, fault))
                if fault == "cut":
                    writer.transport.abort()
                    return False
        if is_streamed:
            writer.write(b"data: [DONE]\n\n")
            await writer.drain()
            return False
        if fault == "huge":
            await send(writer, 200, {"choices": [], "text": "x" * 2**23})
            return True
        if fault == "no_json":
            await send(writer, 200, "<html>")
            return True
        tokens = [token for piece, _ in pieces for token in piece]
        logprobs = [logprob for _, piece in pieces for logprob in piece]
        await send(
            writer, 200, {"choices": [self._choice(tokens, logprobs, reason, prompt, fault)]}
        )
        return True

    def _choice(
        self,
        tokens: list[int],
        logprobs: Sequence[float],
        reason: str | None,
        prompt: Sequence[int],
        fault: Any,
    ) -> dict[str, Any]:
        told: list[float | None] = list(logprobs)
        if fault == "nan":
            told[0] = float("nan")
        if fault == "floor":
            told[0] = -9999.0
        if fault == "short_logprobs":
            del told[-1]
        if fault == "outside":
            tokens = [self.vocab_size, *tokens[1:]]
        if fault == "abort":
            reason = "abort"
        return {
            "index": 0,
            "text": "",
            "token_ids": tokens,
            "prompt_token_ids": [1, *prompt] if fault == "other_prompt" else list(prompt),
            "logprobs": {
                "tokens": [f"token_id:{token}" for token in tokens],
                "token_logprobs": told,
            },
            "finish_reason": reason,
        }


async def send(writer: asyncio.StreamWriter, status: int, answer: Any) -> None:
    text = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    writer.write(head.encode() + b"\r\n\r\n" + text)
    await writer.drain()


async def _event(writer: asyncio.StreamWriter, choice: Any) -> None:
    writer.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    await writer.drain()


@contextmanager
def fake_vllm(**options: Any) -> Iterator[FakeVllm]:
    """A server that runs, ended with the block."""
    server = FakeVllm(**options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def wait_until(is_true: Any, *, seconds: float = 10.0) -> None:
    """Returns once something holds."""
    ends_at = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < ends_at, "it never came to hold"
        time.sleep(0.005)
