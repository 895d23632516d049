"""Reward servers of other people's forms, on loopback, and what can go wrong with one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

GIBIBYTE = 2**30


def score(completion: str) -> float:
    """What the servers judge by: the more distinct characters the better."""
    return float(len(set(completion)))


class RewardServer:
    """A server of the forms that post JSON, each call counted; `faults` come first, None is none.

    Faults that answer with numbers do so in OpenRLHF's form.

    Example: `faults=[503, "nan"]` answers the first call with 503 and the second with NaN.
    """

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.faults: list[str | int | None] = []
        self.always: str | int | None = None
        """A fault of every call, once `faults` are used up."""
        self.seconds = 0.0
        """How long each answer takes."""
        self.judge_text: str | None = None
        """What the judge says; None: a score."""
        self.app = self._make_app()

    def _make_app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/get_reward")
        async def openrlhf(request: Request) -> Response:
            given = await request.json()
            rewards = [
                score(query.removeprefix(prompt))
                for query, prompt in zip(given["query"], given["prompts"], strict=True)
            ]
            logs = {"distinct": rewards}
            right = {"rewards": rewards, "scores": [min(r, 1.0) for r in rewards]}
            return await self._answer(request, given, {**right, "extra_logs": logs}, rewards)

        @app.post("/get_reward_bare")
        async def openrlhf_bare(request: Request) -> Response:
            given = await request.json()
            reward = score(given["query"][0].removeprefix(given["prompts"][0]))
            right = {"rewards": reward, "scores": 1.0, "extra_logs": {"distinct": reward}}
            return await self._answer(request, given, right, [reward])

        @app.post("/slime")
        async def slime(request: Request) -> Response:
            given = await request.json()
            reward = score(given["response"])
            return await self._answer(request, given, reward, [reward])

        @app.post("/slime_mapping")
        async def slime_mapping(request: Request) -> Response:
            given = await request.json()
            text = given["response"]
            parts = {"score": score(text), "length": len(text), "why": "it is short"}
            return await self._answer(request, given, parts, [])

        @app.post("/seed_session")
        async def seed(request: Request) -> Response:
            response = JSONResponse({})
            response.set_cookie(
                "gym", (await request.json())["responses_create_params"]["input"][0]["content"]
            )
            return response

        @app.post("/verify")
        async def nemo_gym(request: Request) -> Response:
            given = await request.json()
            text = given["response"]["output"][0]["content"][0]["text"]
            return await self._answer(request, given, {**given, "reward": score(text)}, [])

        @app.post("/v1/chat/completions")
        async def judge(request: Request) -> Response:
            given = await request.json()
            text = self.judge_text or json.dumps({"score": 7, "why": "it is short"})
            message = {"role": "assistant", "content": text}
            return await self._answer(
                request, given, {"choices": [{"index": 0, "message": message}]}, []
            )

        return app

    async def _answer(
        self, request: Request, given: Any, right: Any, rewards: Sequence[float]
    ) -> Response:
        self.requests.append((request.url.path, given))
        self.headers.append(dict(request.headers))
        fault = self.faults.pop(0) if self.faults else self.always
        if self.seconds:
            await asyncio.sleep(self.seconds)
        if isinstance(fault, int):
            headers = {"Retry-After": "0"} if fault == 429 else {}
            return JSONResponse({"detail": "not now"}, status_code=fault, headers=headers)
        match fault:
            case None:
                return JSONResponse(right)
            case "hang":
                await asyncio.sleep(3600)
            case "echo":
                sent = request.headers.get("authorization")
                return JSONResponse({"detail": f"not with {sent}"}, status_code=403)
            case "short":
                return JSONResponse({"rewards": list(rewards)[:-1]})
            case "long":
                return JSONResponse({"rewards": [*rewards, 0.0]})
            case "nan":
                return Response(json.dumps({"rewards": [math.nan for _ in rewards]}))
            case "infinite":
                return Response('{"rewards": [1e999]}', media_type="application/json")
            case "text":
                return JSONResponse({"rewards": ["1.0" for _ in rewards]})
            case "null":
                return JSONResponse({"rewards": [None for _ in rewards]})
            case "true":
                return JSONResponse({"rewards": [True for _ in rewards]})
            case "nested":
                return Response("[" * 200_000, media_type="application/json")
            case "nested_list":
                return JSONResponse({"rewards": [[1.0] for _ in rewards]})
            case "no_json":
                return Response("<html>502 from a proxy</html>")
            case "no_rewards":
                return JSONResponse({"reward": list(rewards)})
            case "redirect":
                return Response(status_code=307, headers={"Location": "http://elsewhere/steal"})
            case "huge_announced":
                return Response(headers={"Content-Length": str(GIBIBYTE)}, status_code=200)
            case "gzip":
                return Response(b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
            case "judge_failed":
                return JSONResponse({"reward": 0.0, "_ng_failure_class": "judge_failed"})
        raise ValueError(f"no fault {fault!r}")


Served = TypeVar("Served", bound=RewardServer)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def reward_server() -> Iterator[RewardServer]:
    """A server on a thread of its own, so that it answers whatever the test's loop does."""
    with on_a_thread(RewardServer()) as served:
        yield served


@contextmanager
def on_a_thread(served: Served) -> Iterator[Served]:
    """Has a server answer on a thread of its own."""
    config = uvicorn.Config(
        served.app,
        host="127.0.0.1",
        port=0,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
        assert thread.is_alive() or server.started
    port = server.servers[0].sockets[0].getsockname()[1]
    served.url = f"http://127.0.0.1:{port}"
    try:
        yield served
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(10)


@asynccontextmanager
async def raw_server(
    behave: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """A server that does to a connection whatever it likes; yields its URL."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await behave(reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/get_reward"
    finally:
        server.close()
