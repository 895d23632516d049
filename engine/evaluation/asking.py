"""Asks an endpoint of OpenAI's protocol for completions, many at once, each with its own seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from rolemesh.engine.data.rendering.rendering import ChatTokenizer, Renderer
from rolemesh.engine.evaluation.tasks import EvaluatedRow
from rolemesh.engine.granted.outgoing_http import outgoing_client
from rolemesh.engine.images.turns import MARKER
from rolemesh.engine.messages import on_one_line
from rolemesh.engine.seeds import derive_seed
from rolemesh.engine.specs.evaluation import AskedSpec, DrawingSpec
from rolemesh.engine.specs.urls import check_token_is_safe, check_url, masked_text, masked_url

TRIES = 5
"""Times that a request is sent at most, where it may succeed later."""

FIRST_PAUSE_S = 0.5
"""Before the second try, at most; it doubles with each."""

GONE_AFTER = 20
"""Rows in a row without any answer, after which the endpoint counts as gone."""

_AGAIN = frozenset({408, 429, 500, 502, 503, 504})
_SHOWN_CHARACTERS = 400
_SEED_BITS = 31
"""Servers take a seed as a signed number of 32 bits at least."""


class UnansweredError(RuntimeError):
    """The endpoint gave no completion for one row; says why."""


class EndpointGoneError(RuntimeError):
    """The endpoint gives no answers at all; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the policy answered."""

    text: str
    finish_reason: str
    """"stop", or "length" where it was cut."""
    num_tokens: int | None
    """None where the endpoint does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What came of one row of a task, before it is judged."""

    at: int
    """Number of the row in its task."""
    sample: int
    """Number of the answer among those of the row."""
    prompt: str
    """The row as text."""
    completion: Completion | None = None
    """None: there is none."""
    reward: float | None = None
    """What an agent or an environment gave; None: nothing did."""
    why: str = ""
    """Why there is no completion."""


class Asker:
    """Asks one endpoint. Owner: one loop.

    Invariant: a completion depends on the weights, on the row, on the drawing and on the number of
    the sample, and not on what else is asked.
    """

    def __init__(
        self,
        spec: AskedSpec,
        drawing: DrawingSpec,
        *,
        key: str | None,
        tokenizer: ChatTokenizer | None,
    ) -> None:
        """Opens no connection yet.

        Args:
            spec: Who is asked.
            drawing: How completions are drawn.
            key: Of the endpoint.
            tokenizer: That of `spec.tokenizer`.

        Raises:
            ValueError: The URL cannot be used, or the key would travel where others can read it.
        """
        check_url(spec.url, ("http", "https"))
        if key is not None:
            check_token_is_safe(spec.url)
        self._spec = spec
        self._drawing = drawing
        self._base = spec.url.rstrip("/")
        self._shown = masked_url(self._base)
        self._tokenizer = tokenizer
        self._renderer = None if tokenizer is None else Renderer(tokenizer)
        self._model = spec.model
        self._without_answer = 0
        # 2 more, so that a slow end of one holds nothing up.
        limits = httpx.Limits(max_connections=spec.concurrency + 2)
        self._client = outgoing_client(
            spec.url, key, limits, timeout=httpx.Timeout(spec.timeout_s, connect=10.0)
        )

    async def open(self) -> str:
        """Finds the model's name.

        Raises:
            EndpointGoneError: The endpoint does not answer, or lists no model.
        """
        if self._model is None:
            (self._model, *_) = await self._listed()
        return self._model

    async def longest_sequence(self) -> int | None:
        """Tokens that the model takes, prompt and completion together, as the endpoint says.

        Returns:
            The number; None where it does not say.

        Raises:
            EndpointGoneError: As `open`.
        """
        found = (await self._listed()).get(await self.open())
        return found if isinstance(found, int) else None

    async def _listed(self) -> dict[str, Any]:
        """The models of the endpoint, in its order, with what it says of their length."""
        try:
            response = await self._client.get(f"{self._base}/models")
        except httpx.HTTPError as error:
            raise EndpointGoneError(f"{self._shown} does not answer: {_told(error)}") from error
        if response.status_code != 200:
            hint = ""
            if response.status_code in (401, 403):
                hint = ": give --key-variable the variable that holds its key"
            elif response.status_code == 404 and not urlsplit(self._base).path:
                hint = ": base URLs mostly end with /v1"
            raise EndpointGoneError(
                f"{self._shown}/models answers with status {response.status_code}{hint}"
            )
        try:
            cards = response.json()["data"]
            listed = {str(card["id"]): card.get("max_model_len") for card in cards}
        except (ValueError, LookupError, TypeError, AttributeError):
            listed = {}
        if not listed:
            raise EndpointGoneError(f"{self._shown}/models lists no model: name it with --model")
        return listed

    def prompt_of(self, row: EvaluatedRow) -> str:
        """The prompt as text: rendered where there is a tokenizer, else its turns."""
        if self._renderer is not None:
            return self._renderer.prompt_text(row.row)
        turns = (f"{turn['role']}: {_shown(turn.get('content'))}" for turn in row.row.messages)
        return "\n".join((*turns, *filter(None, (row.row.assistant_prefix,))))

    async def ask(self, task: str, row: EvaluatedRow, sample: int) -> Completion:
        """One completion.

        Args:
            task: Name of its task.
            row: The prompt.
            sample: Number of the completion among those of the prompt.

        Raises:
            UnansweredError: There is none for this row.
            EndpointGoneError: There are none any more.
            ImageInvalidError: An image of the row cannot be read any more.
        """
        seed = seed_of(self._drawing, task, row, sample)
        path, body = self._request(row, seed)
        answer = await self._answer(path, body)
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] if "message" in choice else self._text(choice)
            usage = answer.get("usage") or {}
            return Completion(
                # A message may have a tool call or a refusal alone.
                text="" if text is None else str(text),
                finish_reason=str(choice.get("finish_reason")),
                num_tokens=usage.get("completion_tokens"),
            )
        except (LookupError, TypeError, AttributeError, OverflowError) as error:
            raise UnansweredError(f"the answer has no completion ({error!r})") from error

    def _text(self, choice: Mapping[str, Any]) -> str:
        """What a completion says, as a run reads its tokens where the endpoint tells them."""
        tokens = choice.get("token_ids")
        if self._tokenizer is None or not isinstance(tokens, list):
            return str(choice["text"])
        # A server leaves out bytes at the end that are no whole character, which a reward would
        # see in a run.
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _request(self, row: EvaluatedRow, seed: int) -> tuple[str, dict[str, Any]]:
        drawing = self._drawing
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": drawing.max_tokens,
            "temperature": drawing.temperature,
            "top_p": drawing.top_p,
            "seed": seed,
        }
        if drawing.top_k is not None:
            body["top_k"] = drawing.top_k
        if drawing.stop:
            body["stop"] = list(drawing.stop)
        if drawing.stop_token_ids:
            # VLLM's; other servers refuse it.
            body["stop_token_ids"] = list(drawing.stop_token_ids)
        if self._renderer is not None:
            body["prompt"] = self._renderer.tokens(self._renderer.prompt_text(row.row))
            # A server of token ids is vLLM's, which fills in what the model's folder suggests.
            body = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, **body}
            body["return_token_ids"] = True
            if drawing.stop:
                # As in a run, where a stop text is a part of what was sampled.
                body["include_stop_str_in_output"] = True
            return "/completions", body
        turns = row.messages()
        if row.row.assistant_prefix:
            # vLLM's fields for an answer that has begun; other servers refuse them.
            turns.append({"role": "assistant", "content": row.row.assistant_prefix})
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        return "/chat/completions", {**body, "messages": turns}

    async def _answer(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        for number in range(TRIES):
            is_last = number + 1 == TRIES
            try:
                response = await self._client.post(f"{self._base}{path}", json=body)
            except httpx.HTTPError as error:
                why = f"no answer: {_told(error)}"
                if is_last:
                    self._without_answer += 1
                    if self._without_answer >= GONE_AFTER:
                        raise EndpointGoneError(
                            f"{self._shown} has given no answer to the last {GONE_AFTER} rows: "
                            f"{_told(error)}"
                        ) from error
            else:
                self._without_answer = 0
                if response.status_code == 200:
                    try:
                        answer = response.json()
                    except ValueError as error:
                        raise UnansweredError("the answer is no JSON") from error
                    if not isinstance(answer, dict):
                        raise UnansweredError("the answer is no JSON object")
                    return answer
                why = f"status {response.status_code}: {message_of(response)}"
                if response.status_code not in _AGAIN:
                    raise UnansweredError(why)
            if is_last:
                break
            await asyncio.sleep(random.uniform(0, FIRST_PAUSE_S * 2**number))
        raise UnansweredError(f"{why} ({TRIES} tries)")

    async def close(self) -> None:
        """Ends all connections."""
        await self._client.aclose()


def seed_of(drawing: DrawingSpec, task: str, row: EvaluatedRow, sample: int) -> int:
    """The seed of one completion, or trajectory; see `Asker`."""
    seed: int = derive_seed(drawing.seed, task, row.key, sample) % 2**_SEED_BITS
    return seed


def _shown(content: Any) -> Any:
    """A turn's content for people: an image is a marker."""
    if not isinstance(content, list):
        return content
    return "".join(part.get("text", MARKER) for part in content)


def _told(error: Exception) -> str:
    return on_one_line(masked_text(f"{type(error).__name__} {error}".strip()), _SHOWN_CHARACTERS)


def message_of(response: httpx.Response) -> str:
    """What an answer with an error says, as servers of this protocol say it."""
    try:
        found = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        found = response.text
    return on_one_line(masked_text(str(found)), _SHOWN_CHARACTERS)
