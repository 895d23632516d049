"""One server over HTTP: bounds on time and size, and meanings of a status."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx

from rolemesh.engine.granted.bearer_tokens import bearer_token
from rolemesh.engine.granted.outgoing_http import outgoing_client
from rolemesh.engine.specs import ServersSpec

SHOWN_CHARACTERS = 400
"""Of what a server says, in an error."""

SMALL_ANSWER_BYTES = 2**20
"""Longest answer of a route that answers with a few words."""

CONNECT_S = 10.0
"""A server that listens takes a connection sooner."""

IDLE_CONNECTION_S = 4.0
"""Connections without a request are closed after this: uvicorn closes its end after 5 s, and a
request that met that moment would have to be repeated."""

_MAY_PASS = frozenset({408, 425, 429, 500, 502, 503, 504})
"""500 too: vLLM gives it to all that runs when its engine dies, and ends then."""


_NOT_FINITE = "not JSON compliant"
"""In what vLLM says where a log-prob cannot be told in JSON, with status 400."""


class ServerError(RuntimeError):
    """What a server was asked for could not be had from it."""


class ServerUnavailableError(ServerError):
    """No connection, no answer in time, or one that says that it may pass."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """Of HTTP; None: there was no answer."""


class WeightsLostError(ServerUnavailableError):
    """It lives, and lacks the weights that it was handed: it is another process by now."""


class ServerRefusedError(ServerError):
    """It said no, and would again."""

    def __init__(self, message: str, *, status: int, words: str) -> None:
        super().__init__(message)
        self.status = status
        """Of HTTP."""
        self.words = words
        """Its own."""


class AnswerInvalidError(ServerError):
    """It answered with something else than was asked for."""


class SamplersUnavailableError(RuntimeError):
    """No server can be reached, in all tries. Says which, and what to do."""


class ServerClient:
    """One server, over a client of `outgoing_client`. Owner: one loop.

    Example::

        client = ServerClient("http://host:8000", spec)
        answer = await client.post("/v1/completions", body, timeout_s=60, max_bytes=10_000)
    """

    def __init__(self, url: str, spec: ServersSpec) -> None:
        """Prepares; opens no connection yet.

        Raises:
            ValueError: The URL cannot be used, or the token is not set.
        """
        self._token = bearer_token(spec.token_variable, "this service")
        self._http = outgoing_client(
            url,
            self._token,
            # What runs beside the completions: weights, health.
            httpx.Limits(
                max_connections=spec.max_num_seqs + 8,
                max_keepalive_connections=spec.max_num_seqs,
                keepalive_expiry=IDLE_CONNECTION_S,
            ),
        )
        self.url = url.rstrip("/")

    async def get(self, route: str, *, timeout_s: float) -> bytes:
        """The answer to a GET; raises as `post`."""
        return await self._whole("GET", route, None, timeout_s, SMALL_ANSWER_BYTES)

    async def post(
        self,
        route: str,
        body: Mapping[str, Any],
        *,
        timeout_s: float,
        max_bytes: int = SMALL_ANSWER_BYTES,
    ) -> bytes:
        """The answer to a POST of JSON.

        Args:
            route: Path of it, with parameters.
            body: JSON-able.
            timeout_s: Until the answer is whole.
            max_bytes: Longest answer.

        Raises:
            ServerUnavailableError: No answer in time, or one that says that it may pass.
            ServerRefusedError: Any other status but a success.
            AnswerInvalidError: The answer is too long.
        """
        return await self._whole("POST", route, body, timeout_s, max_bytes)

    async def events(
        self, route: str, body: Mapping[str, Any], *, timeout_s: float, max_bytes: int
    ) -> AsyncGenerator[Any, None]:
        """The JSON of each event of a stream, until its end; raises as `post`.

        Args:
            route: Path of it.
            body: JSON-able.
            timeout_s: Until the next event, each time.
            max_bytes: Of all events together.
        """
        request = self._request("POST", route, body)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                answer = await self._http.send(request, stream=True)
                try:
                    await self._check(answer)
                    num_bytes = 0
                    rest = b""
                    async for piece in answer.aiter_raw():
                        num_bytes += len(piece)
                        if num_bytes > max_bytes:
                            raise self._too_long(request, max_bytes)
                        *lines, rest = (rest + piece).split(b"\n")
                        for line in lines:
                            name, _, text = line.strip().partition(b":")
                            if name != b"data":
                                continue
                            if text.strip() == b"[DONE]":
                                return
                            event = self.decoded(text, route)
                            if isinstance(event, dict) and event.get("error"):
                                raise ServerUnavailableError(
                                    f"{self.url}{route} broke off: {self._shown(text)}"
                                )
                            yield event
                            limit.reschedule(asyncio.get_running_loop().time() + timeout_s)
                finally:
                    await answer.aclose()
        except TimeoutError:
            raise self._silent(request, timeout_s) from None
        except httpx.HTTPError as error:
            raise self._unreachable(request, error) from error
        raise ServerUnavailableError(f"{self.url}{route} ended its answer before it was whole")

    def decoded(self, text: bytes, route: str) -> Any:
        """JSON that came; raises AnswerInvalidError."""
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise AnswerInvalidError(
                f"{self.url}{route} answered {self._shown(text)}, which is no JSON: look whether "
                "the URL is that of a vLLM server"
            ) from error

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.aclose()

    async def _whole(
        self, method: str, route: str, body: Mapping[str, Any] | None, timeout_s: float, most: int
    ) -> bytes:
        request = self._request(method, route, body)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._http.send(request, stream=True)
                try:
                    await self._check(answer)
                    found = bytearray()
                    async for piece in answer.aiter_raw():
                        found += piece
                        if len(found) > most:
                            raise self._too_long(request, most)
                    return bytes(found)
                finally:
                    await answer.aclose()
        except TimeoutError:
            raise self._silent(request, timeout_s) from None
        except httpx.HTTPError as error:
            raise self._unreachable(request, error) from error

    def _request(self, method: str, route: str, body: Mapping[str, Any] | None) -> httpx.Request:
        content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        # Bounds of whole answers stand around it: httpx has them for single reads alone.
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        return self._http.build_request(
            method, self.url + route, content=content, headers=headers, timeout=timeout
        )

    async def _check(self, answer: httpx.Response) -> None:
        """Refuses a status other than success; reads only as much as it shows."""
        if answer.is_success:
            return
        start = bytearray()
        async for piece in answer.aiter_raw():
            start += piece
            if len(start) >= SHOWN_CHARACTERS:
                break
        words = self._shown(start)
        found = (
            f"{answer.request.method} {answer.request.url}: status {answer.status_code}: {words}"
        )
        if answer.status_code in _MAY_PASS:
            raise ServerUnavailableError(found, status=answer.status_code)
        if answer.is_redirect:
            found += (
                f"; redirects are not followed: give the URL {answer.headers.get('Location')!r}"
            )
        elif _NOT_FINITE in words:
            found += (
                "; its log-probs are NaN or infinite: look for that in the weights, and start it "
                "anew, for such numbers stay in its cache of keys and values"
            )
        elif answer.status_code in (401, 403):
            found += "; put its --api-key into the variable that token_variable names"
        raise ServerRefusedError(found, status=answer.status_code, words=words)

    def _shown(self, body: bytes | bytearray) -> str:
        """The beginning of an answer, without the token that a server may send back."""
        text = bytes(body[: 4 * SHOWN_CHARACTERS]).decode("utf-8", "replace")
        if self._token is not None:
            text = text.replace(self._token, "***")
        return repr(text[:SHOWN_CHARACTERS]) + ("..." if len(text) > SHOWN_CHARACTERS else "")

    def _too_long(self, request: httpx.Request, most: int) -> AnswerInvalidError:
        return AnswerInvalidError(
            f"{request.url} answered with more than {most} bytes, which no answer to this has: "
            "look whether the URL is that of a vLLM server"
        )

    def _silent(self, request: httpx.Request, timeout_s: float) -> ServerUnavailableError:
        return ServerUnavailableError(
            f"{request.url} was silent for {timeout_s:.3g} s: give it less at once "
            "(max_num_seqs) or more time (timeout_s)"
        )

    def _unreachable(self, request: httpx.Request, error: Exception) -> ServerUnavailableError:
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        return ServerUnavailableError(f"{request.url} cannot be reached ({what})")
