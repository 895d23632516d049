"""POST of JSON to an untrusted server: bounds on time and size, and meanings of a status."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar, Generic, TypeVar

import httpx

from rolemesh.engine.granted.bearer_tokens import bearer_token
from rolemesh.engine.granted.outgoing_http import outgoing_client
from rolemesh.engine.specs import EndpointRewardSpec
from rolemesh.services.reward.outside.base import (
    SHOWN_CHARACTERS,
    Judgement,
    OutsideRewardError,
    RewardAnswerInvalidError,
    RewardClient,
    RewardRefusedError,
    RewardTimeoutError,
    RewardUnavailableError,
    checked_rewards,
)
from rolemesh.services.reward.outside.parts import SCORE, PartsFaultError, split

SpecT = TypeVar("SpecT", bound=EndpointRewardSpec)

TOO_MANY_REQUESTS = 429
REQUEST_TIMEOUT = 408

IDLE_CONNECTION_S = 30.0
"""Connections without a request are closed after this."""


class JsonEndpoint:
    """One URL that takes JSON and answers it, by `outgoing_client`. Owner: one loop."""

    def __init__(self, url: str, spec: EndpointRewardSpec) -> None:
        """Prepares; opens no connection yet.

        Args:
            url: URL of the server.
            spec: Bounds, and the name of the token's variable.

        Raises:
            ValueError: The URL cannot be used, or the token is not set.
        """
        self._token = bearer_token(spec.token_variable, "the reward service")
        self._client = outgoing_client(
            url,
            self._token,
            httpx.Limits(
                # A hedged request is one more than the concurrency allows.
                max_connections=2 * spec.concurrency,
                max_keepalive_connections=spec.concurrency,
                keepalive_expiry=IDLE_CONNECTION_S,
            ),
            timeout=httpx.Timeout(spec.timeout_s),
            headers={"Accept": "application/json"},
        )
        self.url = url
        self._max_bytes = spec.max_response_bytes

    async def post(
        self, content: bytes, *, url: str | None = None, cookies: Mapping[str, str] | None = None
    ) -> tuple[Any, dict[str, str]]:
        """Sends JSON; returns the JSON that came, and the cookies that came with it.

        Args:
            content: The encoded JSON.
            url: Another URL of the same server; None: the endpoint's own.
            cookies: Cookies to send.

        Raises:
            RewardTimeoutError: No byte came within timeout_s.
            RewardUnavailableError: No connection, or 408, 429 or 5xx.
            RewardRefusedError: Any other status but a success.
            RewardAnswerInvalidError: The answer is too long, compressed, or no JSON.
        """
        url = url or self.url
        headers = {"Content-Type": "application/json"}
        if cookies:
            headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
        try:
            async with self._client.stream("POST", url, content=content, headers=headers) as answer:
                body = await self._read(answer)
                # Of several cookies with one name (other paths or domains) the last one counts.
                set_cookies = {one.name: one.value or "" for one in answer.cookies.jar}
        except httpx.TimeoutException as error:
            raise RewardTimeoutError(
                url,
                found=f"none in time ({type(error).__name__})",
                remedy="give timeout_s more, batch_size less, or make the reward faster",
            ) from error
        except httpx.TransportError as error:
            raise RewardUnavailableError(
                url, found=f"{type(error).__name__}: {error}".rstrip(": ")
            ) from error
        try:
            return json.loads(body), set_cookies
        except (ValueError, RecursionError) as error:
            raise RewardAnswerInvalidError(
                url,
                expected="JSON",
                found=f"{self._text(body)} ({type(error).__name__})",
                remedy="give the URL of the reward itself; its answer must be JSON",
            ) from error

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.aclose()

    async def _read(self, answer: httpx.Response) -> bytes:
        status = answer.status_code
        if not answer.is_success:
            raise await self._refusal(answer)
        encoding = answer.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise self._invalid(
                status,
                "an answer that is not compressed, as Accept-Encoding says",
                f"Content-Encoding: {encoding[:SHOWN_CHARACTERS]}",
            )
        announced = answer.headers.get("Content-Length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            raise self._invalid(
                status, f"at most max_response_bytes, {self._max_bytes}", f"{announced} announced"
            )
        body = bytearray()
        async for piece in answer.aiter_raw():
            body += piece
            if len(body) > self._max_bytes:
                raise self._invalid(
                    status,
                    f"at most max_response_bytes, {self._max_bytes}",
                    f"more ({self._text(body)})",
                )
        return bytes(body)

    async def _refusal(self, answer: httpx.Response) -> OutsideRewardError:
        """The error for a status other than success; reads only as much as it shows."""
        status, url = answer.status_code, str(answer.request.url)
        start = bytearray()
        async for piece in answer.aiter_raw(SHOWN_CHARACTERS):
            start += piece
            if len(start) >= SHOWN_CHARACTERS:
                break
        found = f"status {status}: {self._text(start)}"
        if status in (REQUEST_TIMEOUT, TOO_MANY_REQUESTS) or answer.is_server_error:
            return RewardUnavailableError(
                url,
                found=found,
                remedy="look into the log of the reward service",
                retry_after_s=_retry_after_s(answer.headers.get("Retry-After", "")),
            )
        remedy = "look whether the URL and the form (type) are those of this reward"
        if answer.is_redirect:
            remedy = f"redirects are not followed: give the URL {answer.headers.get('Location')!r}"
        elif status in (401, 403):
            remedy = "put a token into the variable that token_variable names"
        return RewardRefusedError(url, expected="status 200", found=found, remedy=remedy)

    def _text(self, body: bytes | bytearray) -> str:
        """The beginning of an answer, without the token that a server may send back."""
        text = bytes(body).decode("utf-8", "replace")
        if self._token is not None:
            text = text.replace(self._token, "***")
        return f"{text[:SHOWN_CHARACTERS]!r}{'...' if len(text) > SHOWN_CHARACTERS else ''}"

    def _invalid(self, status: int, expected: str, found: str) -> RewardAnswerInvalidError:
        return RewardAnswerInvalidError(
            self.url,
            expected=expected,
            found=f"{found}, with status {status}",
            remedy="look whether the URL is that of the reward; raise max_response_bytes if it is",
        )


class JsonClient(RewardClient, Generic[SpecT]):
    """Base of the clients that post JSON to one URL."""

    remedy: ClassVar[str]
    """What to do when an answer has another form."""

    def __init__(self, url: str, spec: SpecT) -> None:
        """Prepares; raises ValueError as `JsonEndpoint` does."""
        self.endpoint = url
        self._spec = spec
        self._http = JsonEndpoint(url, spec)

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.close()

    def _judged(self, values: object, num_rows: int, key: str = SCORE) -> Judgement:
        """As `_rewards`, where an entry may also be an object with the reward and its parts.

        Args:
            values: The entries.
            num_rows: How many there must be.
            key: Of the reward in such an object.
        """
        if not isinstance(values, list) or not any(isinstance(one, Mapping) for one in values):
            return Judgement(rewards=self._rewards(values, num_rows))
        found = []
        for row, one in enumerate(values):
            try:
                is_object = isinstance(one, Mapping)
                found.append(split(one, f"row {row}", key) if is_object else (one, {}))
            except PartsFaultError as error:
                raise RewardAnswerInvalidError(
                    self.endpoint,
                    expected="a number, or an object with it and its parts",
                    found=error.found,
                    remedy=error.remedy,
                ) from error
        rewards = self._rewards([reward for reward, _ in found], num_rows)
        return Judgement(rewards=rewards, parts=[parts for _, parts in found])

    def _rewards(self, values: object, num_rows: int) -> list[float | None]:
        """One number a row, within the bounds of the spec; see `checked_rewards`."""
        low, high = self._spec.minimum, self._spec.maximum
        return checked_rewards(values, num_rows, self.endpoint, minimum=low, maximum=high)

    def _invalid(self, expected: str, found: str) -> RewardAnswerInvalidError:
        return RewardAnswerInvalidError(
            self.endpoint, expected=expected, found=found, remedy=self.remedy
        )


def encoded(payload: Any) -> bytes:
    """Encodes a payload as JSON; equal payloads give equal bytes."""
    return json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _retry_after_s(header: str) -> float | None:
    """Seconds that Retry-After asks for (RFC 9110, 10.2.3); None if it cannot be read."""
    if header.isdecimal():
        return float(header)
    try:
        moment = parsedate_to_datetime(header)
    except (ValueError, OverflowError):  # not a date, or one with an impossible year
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())
