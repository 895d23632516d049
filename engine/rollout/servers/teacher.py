"""A teacher that vLLM's servers hold: what a server has to pass, and how a row is asked for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolemesh.engine.model_folders.pretrained import load_config, load_tokenizer
from rolemesh.engine.rollout.servers.adapters import models_at
from rolemesh.engine.rollout.servers.admission import ServerUnfitError
from rolemesh.engine.rollout.servers.client import ServerError, ServerRefusedError
from rolemesh.engine.rollout.servers.fleet import Fleet, Server
from rolemesh.engine.rollout.servers.requests import (
    COMPLETIONS,
    Served,
    entries_of,
    logprob_in,
    most_bytes,
    scoring_body,
)
from rolemesh.engine.rollout.servers.teacher_scores import ABOVE_ZERO, RowScores, row_scores
from rolemesh.engine.specs import TeacherServerSpec

logger = logging.getLogger(__name__)

_SHORT_S = 20.0
"""Time for a question that needs no model; a busy server takes a while all the same."""

_FIELD = "teacher.server"

_TEXTS = (
    "The quick brown fox costs 1,234.50 dollars, doesn't it?",
    "def area(r):\n    return 3.14159 * r ** 2  # in m\u00b2\n",
    "Gr\u00f6\u00dfe, na\u00efve, \u043f\u0440\u0438\u0432\u0435\u0442, \u5317\u4eac, \U0001f642",
    "   <b>two\t tabs </b>\n\n",
)
"""Words, code, other scripts and blanks: what tokenizers cut differently."""

_MOST_SPECIAL = 32
"""Special tokens that are compared, one behind the other."""

_FINAL = frozenset({401, 403, 404})
"""Refusals of no single row: the key is wrong, or the model is not there."""

_NO_TOKEN = "out of vocabulary"
"""In what vLLM says of a token id that its model does not have."""

_TOO_MANY = "greater than max allowed"
"""In what vLLM says where more tokens of a place are asked for than it tells."""


class RowTooLongError(ServerError):
    """A row has more tokens than the servers take."""


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """What is known of the policy's tokens."""

    vocab_size: int
    """Of its model: token ids are less."""
    last: int
    """The greatest token id of its tokenizer."""
    texts: dict[str, list[int]]
    """Texts, and what its tokenizer makes of them."""


def policy_tokens(folder: Path) -> PolicyTokens:
    """Reads them from a folder.

    Raises:
        ModelFolderError: It has no config of a model.
        NoTokenizerError: It has no tokenizer.
    """
    field = f"{_FIELD}.policy_folder"
    config = load_config(folder, field=field)
    tokenizer = load_tokenizer(folder, field=field)
    special = "".join(map(str, tokenizer.all_special_tokens[:_MOST_SPECIAL]))
    return PolicyTokens(
        vocab_size=int(config.get_text_config().vocab_size),
        last=max(tokenizer.get_vocab().values()),
        texts={
            text: list(tokenizer.encode(text, add_special_tokens=False))
            for text in (*_TEXTS, special)
            if text
        },
    )


class ServedTeacher:
    """Asks servers for what they find likely. Owner: one loop.

    A server is checked when it is asked first, and again after it was unreachable:

    - It serves a model of the name, and gives log-probs.
    - It serves no adapters, or is asked for one row at a time. vLLM 0.32 takes the adapters of a
      step's requests, one each, for those of all tokens that it scores: on a CPU the engine ends.
    - Where the policy's tokens are known: it has all of them, and makes the same tokens of a few
      texts, if it has a route that says so.

    Example::

        teacher = ServedTeacher(spec, policy_tokens(folder))
        await teacher.open()
        scores = await teacher.score([1, 5, 9, 7], first=2, top_k=8)
    """

    def __init__(self, spec: TeacherServerSpec, policy: PolicyTokens | None) -> None:
        """Prepares; opens no connection yet.

        Args:
            spec: Servers, and their limits.
            policy: Its tokens; None: not known.

        Raises:
            ValueError: A URL cannot be used, or the token is not set.
        """
        self._spec = spec
        self._policy = policy
        self._served = Served(model=spec.model)
        self._fleet = Fleet(spec, self, field=_FIELD)
        self.compared = "no (no policy_folder)"
        """How far the servers' tokens are known to be the policy's, for people."""

    async def open(self) -> None:
        """Checks the servers; see `Fleet.open`."""
        await self._fleet.open()

    async def close(self) -> None:
        """Closes all connections."""
        await self._fleet.close()

    async def score(self, tokens: Sequence[int], first: int, top_k: int) -> RowScores:
        """Has a server score the tokens of a row from `first` on.

        Raises:
            SamplersUnavailableError: None can be reached in all tries.
            ServerUnfitError: A server was started in a way that it cannot be used.
            RowTooLongError: The row has more tokens than a server takes.
            ServerError: A server refused the row, or its answer is none.
        """
        vocab_size = None if self._policy is None else self._policy.vocab_size

        async def at(server: Server) -> RowScores:
            most = server.max_model_len
            if most is not None and len(tokens) >= most:
                raise RowTooLongError(
                    f"a row has {len(tokens)} tokens, but {server.url} takes {most}, one of them "
                    f"behind the row: start it with --max-model-len {len(tokens) + 1} or more, or "
                    "have the sampler make shorter rows (max_model_len)"
                )
            answer = await self._asked(server, tokens, top_k)
            return row_scores(answer, tokens, first, top_k, vocab_size=vocab_size, where=server.url)

        return await self._fleet.ask(at)

    # --- what a server has to pass -----------------------------------------------------------

    async def admit(self, server: Server) -> None:
        """See `Admission`."""
        await self._check_model(server)
        await self._check_scores(server)
        self.compared = await self._check_texts(server)
        logger.info("%s serves the teacher; tokens compared: %s", server.url, self.compared)

    async def _check_model(self, server: Server) -> None:
        cards = {
            card.get("id"): card for card in await models_at(server.client, timeout_s=_SHORT_S)
        }
        card = cards.get(self._spec.model)
        if card is None:
            raise ServerUnfitError(
                f"{server.url} serves no model {self._spec.model!r}: give {_FIELD}.model one of "
                f"{sorted(map(str, cards))}"
            )
        adapters = [name for name, one in cards.items() if one.get("parent")]
        if adapters and self._spec.max_num_seqs > 1:
            raise ServerUnfitError(
                f"{server.url} serves the adapter {adapters[0]!r}, and vLLM 0.32 fails where it "
                "may serve adapters and scores several rows at once: start it without "
                f"--enable-lora, or set {_FIELD}.max_num_seqs to 1"
            )
        # An adapter's own card may leave it out.
        lengths = (one.get("max_model_len") for one in (card, cards.get(card.get("parent"), {})))
        server.max_model_len = next((one for one in lengths if type(one) is int), None)

    async def _check_scores(self, server: Server) -> None:
        last = 1 if self._policy is None else self._policy.last
        row = [0, last // 2, last]
        try:
            answer = await self._asked(server, row, 1)
        except ServerRefusedError as error:
            if _NO_TOKEN not in error.words:
                raise
            raise ServerUnfitError(
                f"{server.url} lacks a token of {row}, of which the last is the policy's "
                f"greatest: take a teacher with the policy's vocabulary ({error.words})"
            ) from error
        places = entries_of(answer, len(row), where=server.url)
        told = [logprob_in(entry, token, where=server.url) for entry in places for token in entry]
        if max(told) > ABOVE_ZERO:
            raise ServerUnfitError(
                f"{server.url} gives {max(told)} as a log-prob, which is none: start it with "
                "--logprobs-mode raw_logprobs"
            )

    async def _check_texts(self, server: Server) -> str:
        if self._policy is None:
            return self.compared
        for text, tokens in self._policy.texts.items():
            body = {"model": self._spec.model, "prompt": text, "add_special_tokens": False}
            try:
                came = await server.client.post("/tokenize", body, timeout_s=_SHORT_S)
            except ServerRefusedError:
                return f"ids up to {self._policy.last} (no route /tokenize)"
            answer = server.client.decoded(came, "/tokenize")
            found = answer.get("tokens") if isinstance(answer, dict) else None
            if found != tokens:
                raise ServerUnfitError(
                    f"{server.url} makes the tokens {found} of {text!r}, but the policy's "
                    f"tokenizer makes {tokens}: take a teacher with the policy's tokenizer"
                )
        return f"ids up to {self._policy.last}, and {len(self._policy.texts)} texts"

    async def _asked(self, server: Server, tokens: Sequence[int], top_k: int) -> Any:
        """The answer of one server, asked once."""
        body = scoring_body(tokens, self._served, top_k=top_k)
        try:
            text = await server.client.post(
                COMPLETIONS,
                body,
                timeout_s=self._spec.timeout_s,
                max_bytes=most_bytes(len(tokens), top_k),
            )
        except ServerRefusedError as error:
            if _TOO_MANY in error.words:
                raise ServerUnfitError(
                    f"{server.url} does not tell the {top_k} likeliest tokens that are asked for: "
                    f"start it with --max-logprobs {top_k}, or lower algorithm.policy_loss.top_k "
                    f"({error.words})"
                ) from error
            if error.status in _FINAL:
                raise ServerUnfitError(str(error)) from error
            raise
        return server.client.decoded(text, COMPLETIONS)
