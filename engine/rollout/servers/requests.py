"""What vLLM's /v1/completions is asked, and its answers, checked.

Token ids go in and come out; nothing is tokenised on the way. /inference/v1/generate would take the
same without texts around it, but vLLM 0.32 serves it with --enable-scale-out alone, and this one
always.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from rolemesh.engine.rollout.requests import (
    RolloutRequest,
    RolloutTrajectory,
    drawing_arguments,
)
from rolemesh.engine.rollout.servers.client import AnswerInvalidError
from rolemesh.engine.specs import SamplingSpec

COMPLETIONS = "/v1/completions"

_MIN_TEMPERATURE = 0.01
"""vLLM silently raises a lower temperature to this one."""

_LEAST_LOGPROB = -9000.0
"""vLLM sends -9999 in the place of minus infinity, and of NaN."""

_ENVELOPE_BYTES = 2**16
"""Of an answer, beside its tokens."""

_TOKEN_BYTES = 4096
"""Most bytes that a token takes in an answer, with an event of a stream around it: some 500."""

_ENTRY_BYTES = 512
"""Most bytes of each further token that is told of at a place, on average: some 80."""


@dataclass(slots=True)
class Segment:
    """Tokens that one request has brought so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None
    """Of vLLM, once it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What requests name to be answered by the weights of one update."""

    model: str | None
    """Of an adapter, its name at the servers; None: the servers' own weights."""
    salt: str | None = None
    """Keeps keys and values of other weights out of the prefix cache."""


@dataclass(slots=True, eq=False)
class Row:
    """A completion in the making.

    Invariant: `tokens`, `logprobs` and `versions` are as long as each other, and hold what whole
    segments have brought; a segment is what one request brings. `begun` holds what the request that
    runs has brought so far; where it fails, that is thrown away and drawn again.
    """

    request: RolloutRequest
    budget: int
    """Most tokens of the completion."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    begun: Segment = field(default_factory=Segment)
    reason: Literal["stop", "length"] | None = None
    """Why it ended."""

    def cut(self, num_known: int) -> bool:
        """Whether the request's caller ends it at a token that has come; drops what is behind.

        Args:
            num_known: Tokens of `begun` of which the caller was asked before.
        """
        if self.request.is_complete is not None:
            for end in range(num_known + 1, len(self.begun.tokens) + 1):
                if self.request.is_complete([*self.tokens, *self.begun.tokens[:end]]):
                    del self.begun.tokens[end:], self.begun.logprobs[end:]
                    return True
        return False

    def keep(self, policy_version: int, stop_tokens: Sequence[int]) -> bool:
        """Takes what the request has brought, drawn by this version; returns whether that is all.

        Args:
            policy_version: Of all that `begun` holds.
            stop_tokens: Token ids that end a completion.
        """
        is_cut = self.cut(0)
        self.tokens += self.begun.tokens
        self.logprobs += self.begun.logprobs
        self.versions += [policy_version] * len(self.begun.tokens)
        self.begun = Segment()
        if self.tokens and (is_cut or self.tokens[-1] in stop_tokens):
            self.reason = "stop"
        elif len(self.tokens) == self.budget:
            self.reason = "length"
        return self.reason is not None

    def trajectory(self) -> RolloutTrajectory:
        """What has ended."""
        assert self.reason is not None
        return RolloutTrajectory(
            row=self.request.row,
            completion_tokens=self.tokens,
            logprobs=self.logprobs,
            finish_reason=self.reason,
            policy_versions=self.versions,
        )

    @property
    def seed(self) -> int:
        """Of the next request.

        That of a later segment is another one, or it would draw by the same noise as the first. It
        depends on the row's seed and on where the segment begins alone.
        """
        if not self.tokens:
            return self.request.seed
        text = f"{self.request.seed}:{len(self.tokens)}".encode()
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1


def check_temperature(sampling: SamplingSpec) -> None:
    """Raises ValueError for a temperature that vLLM does not take."""
    if not sampling.greedy and sampling.temperature < _MIN_TEMPERATURE:
        raise ValueError(
            f"sampling.temperature is {sampling.temperature}, below vLLM's least of "
            f"{_MIN_TEMPERATURE}: raise it, or set sampling.greedy"
        )


def body_of(
    row: Row,
    sampling: SamplingSpec,
    served: Served,
    *,
    stop_tokens: Sequence[int],
    is_streamed: bool,
) -> dict[str, Any]:
    """A request for the rest of a completion.

    Args:
        row: Of it.
        sampling: How to draw.
        served: The weights.
        stop_tokens: Token ids that end a completion.
        is_streamed: Whether tokens come as they are drawn.
    """
    tokens = [*row.request.prompt_tokens, *row.tokens]
    return _body(tokens, served) | {
        **drawing_arguments(sampling),
        "seed": row.seed,
        "max_tokens": row.budget - len(row.tokens),
        "stop_token_ids": list(stop_tokens),
        "logprobs": 0,
        "stream": is_streamed,
    }


def scoring_body(tokens: Sequence[int], served: Served, *, top_k: int = 0) -> dict[str, Any]:
    """A request for the log-probs of a row, and of the likeliest tokens at each of its places.

    One token is drawn, too; a greedy one is no chance.
    """
    return _body(tokens, served) | {
        "temperature": 0.0,
        "max_tokens": 1,
        "prompt_logprobs": top_k,
        "ignore_eos": True,
    }


MODE_TOKENS = 4
"""Drawn to tell the mode: a model that is sure of each of them would tell nothing."""


def mode_body(token: int, served: Served) -> dict[str, Any]:
    """A request whose log-probs tell of which distribution they are; see `is_processed`."""
    return _body([token], served) | {
        "top_k": 1,
        "seed": 0,
        "max_tokens": MODE_TOKENS,
        "logprobs": 0,
        "ignore_eos": True,
    }


def is_processed(segment: Segment) -> bool:
    """Whether log-probs are those of the distribution that was drawn from (processed_logprobs).

    With top_k 1 that has one token, whose log-prob is 0; the model's own is less.
    """
    return all(abs(logprob) < 1e-6 for logprob in segment.logprobs)


def _body(tokens: Sequence[int], served: Served) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": list(tokens),
        # All that a server would otherwise take from the model's generation_config.json.
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if served.model is not None:
        body["model"] = served.model
    if served.salt is not None:
        body["cache_salt"] = served.salt
    return body


def most_bytes(num_tokens: int, top_k: int = 0) -> int:
    """Longest answer with so many tokens, prompt or completion, and others told of at each."""
    return _ENVELOPE_BYTES + (_TOKEN_BYTES + _ENTRY_BYTES * top_k) * num_tokens


def add_answer(
    segment: Segment,
    answer: Any,
    *,
    prompt: Sequence[int],
    most: int,
    vocab_size: int,
    where: str,
) -> None:
    """Adds what came, the whole answer or a piece of it, to what came before.

    Args:
        segment: Extended in place.
        answer: JSON of the server.
        prompt: Token ids that were sent.
        most: Most tokens of the segment.
        vocab_size: Token ids are less.
        where: The server, for errors.

    Raises:
        AnswerInvalidError: It has another form, another prompt, too many tokens, tokens outside the
            vocabulary, or log-probs that are not the tokens' or not finite.
    """
    choices = _get(answer, "choices")
    if not isinstance(choices, list) or len(choices) != 1:
        raise answer_invalid(where, "one choice", choices)
    choice = choices[0]
    taken = _get(choice, "prompt_token_ids")
    if taken is None and not segment.tokens:
        raise answer_invalid(where, "prompt_token_ids (return_token_ids)", taken)
    if taken is not None and taken != list(prompt):
        raise answer_invalid(where, "the prompt's own tokens", taken)
    tokens = _get(choice, "token_ids")
    if not isinstance(tokens, list) or not all(
        type(token) is int and 0 <= token < vocab_size for token in tokens
    ):
        raise answer_invalid(where, f"token ids below {vocab_size}", tokens)
    if len(segment.tokens) + len(tokens) > most:
        raise answer_invalid(where, f"at most {most} tokens", len(segment.tokens) + len(tokens))
    told = _get(choice, "logprobs")
    # A last event without tokens has none.
    names, logprobs = ([], []) if told is None and not tokens else _columns(told)
    if names != [f"token_id:{token}" for token in tokens] or len(logprobs) != len(tokens):
        raise answer_invalid(where, f"{len(tokens)} log-probs, one a token of {tokens}", told)
    for logprob in logprobs:
        if not _is_logprob(logprob):
            raise answer_invalid(where, "finite log-probs (NaN in its weights?)", logprob)
    segment.tokens += tokens
    segment.logprobs += map(float, logprobs)
    reason = _get(choice, "finish_reason")
    if reason is not None:
        segment.reason = str(reason)


def _columns(told: Any) -> tuple[list[Any], list[Any]]:
    names, logprobs = _get(told, "tokens"), _get(told, "token_logprobs")
    is_whole = isinstance(names, list) and isinstance(logprobs, list)
    return (names, logprobs) if is_whole else ([None], [])


def check_end(segment: Segment, *, most: int, stop_tokens: Sequence[int], where: str) -> None:
    """Refuses an answer that ended elsewhere than at a stop token or at its length.

    Raises:
        AnswerInvalidError: It did.
    """
    is_stopped = bool(segment.tokens) and segment.tokens[-1] in stop_tokens
    if segment.reason == "stop" and is_stopped:
        return
    if segment.reason == "length" and len(segment.tokens) == most:
        return
    raise answer_invalid(
        where,
        f"a completion that ends by a stop token or at {most} tokens",
        f"{segment.reason!r} after {len(segment.tokens)}",
    )


def scores_of(answer: Any, tokens: Sequence[int], *, where: str) -> list[float]:
    """Log-probs of all tokens of a scored row but the first.

    Raises:
        AnswerInvalidError: They are not there, not the tokens', or not finite.
    """
    entries = entries_of(answer, len(tokens), where=where)
    pairs = zip(tokens[1:], entries, strict=True)
    return [logprob_in(entry, token, where=where) for token, entry in pairs]


def entries_of(answer: Any, num_tokens: int, *, where: str) -> list[Any]:
    """What a scored row is told of each of its places but the first.

    Raises:
        AnswerInvalidError: It is not there.
    """
    choices = _get(answer, "choices")
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    found = _get(choice, "prompt_logprobs")
    if not isinstance(found, list) or len(found) != num_tokens:
        num = len(found) if isinstance(found, list) else found
        raise answer_invalid(where, f"prompt_logprobs of {num_tokens} tokens", num)
    return found[1:]


def logprob_in(entry: Any, token: int | str, *, where: str) -> float:
    """The log-prob of a token in what is told of a place.

    Raises:
        AnswerInvalidError: It is not there, or not finite.
    """
    logprob = _get(_get(entry, str(token)), "logprob")
    if not _is_logprob(logprob):
        raise answer_invalid(where, f"a finite log-prob of token {token}", logprob)
    return float(logprob)


def _is_logprob(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > _LEAST_LOGPROB


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def answer_invalid(where: str, expected: str, found: Any) -> AnswerInvalidError:
    """The error of an answer that is none."""
    text = repr(found)
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    return AnswerInvalidError(
        f"{where} answered {shown} where {expected} were to come: look into its log, and whether "
        "its vLLM has the version that rolemesh was tested with"
    )
