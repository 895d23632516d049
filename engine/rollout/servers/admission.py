"""What a server has to pass before it samples for us."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from rolemesh.engine.rollout.agreement.probe import FARTHEST, FARTHEST_EXACT
from rolemesh.engine.rollout.model_folder import ModelFolder
from rolemesh.engine.rollout.servers.adapters import models_at
from rolemesh.engine.rollout.servers.client import (
    AnswerInvalidError,
    ServerError,
    ServerRefusedError,
)
from rolemesh.engine.rollout.servers.fleet import Server
from rolemesh.engine.rollout.servers.held import HeldWeights
from rolemesh.engine.rollout.servers.requests import (
    COMPLETIONS,
    MODE_TOKENS,
    Segment,
    Served,
    add_answer,
    is_processed,
    mode_body,
    most_bytes,
    scores_of,
    scoring_body,
)
from rolemesh.engine.specs import SamplingSpec, VllmServerSpec

logger = logging.getLogger(__name__)

_SHORT_S = 20.0
"""Time for a question that needs no model; a busy server takes a while all the same."""

_NO_MODEL = "rolemesh-no-such-model"


class ServerUnfitError(ServerError):
    """A server was started in a way that it cannot be used; says what to change."""


class ServerAdmission:
    """Checks a server when it is asked first, and again after it was unreachable.

    Owner: one loop.

    - It listens, and serves rows as long as ours.
    - It refuses a model that it does not have. One that served its base instead would do so for an
      adapter that it lost.
    - Its log-probs are those of a distribution; of which one is noted in `Server.is_processed`.
    - It is brought the newest weights, and gives a row what others gave it by these.
    """

    def __init__(self, spec: VllmServerSpec, folder: ModelFolder, held: HeldWeights) -> None:
        self._spec = spec
        self._folder = folder
        self._held = held
        self._known: tuple[Sequence[int], Sequence[float]] | None = None
        """A row, and its log-probs by the newest weights."""

    def remember(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Notes what the newest weights give a row."""
        self._known = tokens, logprobs

    def forget(self) -> None:
        """There will be other weights."""
        self._known = None

    async def admit(self, server: Server) -> None:
        """Checks, and brings the weights.

        Raises:
            ServerUnavailableError: It cannot be reached now.
            ServerError: It cannot be used as it was started.
        """
        await server.client.get("/health", timeout_s=_SHORT_S)
        await self._check_model(server)
        await self._check_names(server)
        await self._check_mode(server)
        await self._held.bring(server)
        await self._check_scores(server)

    async def _check_model(self, server: Server) -> None:
        cards = await models_at(server.client, timeout_s=_SHORT_S)
        own = [card for card in cards if not card.get("parent")]
        if not own:
            raise AnswerInvalidError(f"{server.url}/v1/models names no model beside adapters")
        server.name = str(own[0].get("id"))
        most = own[0].get("max_model_len")
        if type(most) is int and most < self._spec.max_model_len:
            raise ServerUnfitError(
                f"{server.url} serves {most} tokens, but rollout.max_model_len is "
                f"{self._spec.max_model_len}: start it with --max-model-len "
                f"{self._spec.max_model_len}, or give at most {most}"
            )
        logger.info("%s serves %s", server.url, own[0].get("root") or server.name)

    async def _check_names(self, server: Server) -> None:
        body = scoring_body([self._a_token, self._a_token], Served(model=_NO_MODEL))
        try:
            await self._post(server, body)
        except ServerRefusedError as error:
            if error.status == 404:
                return
            raise
        raise ServerUnfitError(
            f"{server.url} answers for model {_NO_MODEL!r}, which it does not have, and so would "
            "for an adapter that it lost: start it without VLLM_SKIP_MODEL_NAME_VALIDATION"
        )

    async def _check_mode(self, server: Server) -> None:
        segment, body = Segment(), mode_body(self._a_token, Served(model=server.name))
        answer = await self._post(server, body)
        add_answer(
            segment,
            answer,
            prompt=body["prompt"],
            most=MODE_TOKENS,
            vocab_size=self._folder.vocab_size,
            where=server.url,
        )
        if max(segment.logprobs, default=1.0) > 1e-6:
            raise ServerUnfitError(
                f"{server.url} gives {max(segment.logprobs, default=None)} as a log-prob, which is "
                "none: start it with --logprobs-mode processed_logprobs"
            )
        server.is_processed = is_processed(segment)

    async def _check_scores(self, server: Server) -> None:
        if self._known is None:
            return
        tokens, expected = self._known
        answer = await self._post(server, scoring_body(tokens, self._held.served))
        found = scores_of(answer, tokens, where=server.url)
        pairs = zip(found, expected, strict=True)
        distance = math.fsum(abs(one - other) for one, other in pairs) / len(expected)
        farthest = FARTHEST_EXACT if self._spec.dtype == "float32" else FARTHEST
        if not distance <= farthest:
            raise ServerUnfitError(
                f"{server.url} was started anew, and gives a row of {len(tokens)} tokens log-probs "
                f"that are {distance:.2g} nats a token from the other servers', where at most "
                f"{farthest:g} is rounding: start it with the same model and the same settings"
            )

    async def _post(self, server: Server, body: dict[str, Any]) -> Any:
        text = await server.client.post(
            COMPLETIONS,
            body,
            timeout_s=self._spec.timeout_s,
            max_bytes=most_bytes(len(body["prompt"]) + MODE_TOKENS),
        )
        return server.client.decoded(text, COMPLETIONS)

    @property
    def _a_token(self) -> int:
        """Some token of the vocabulary."""
        return self._folder.stop_tokens[0]


def check_distribution(server: Server, sampling: SamplingSpec) -> None:
    """Refuses a server whose log-probs are not those of the distribution that is drawn from.

    Raises:
        ServerUnfitError: It gives the model's own, and they differ.
    """
    is_plain = sampling.greedy or (
        sampling.temperature == 1.0 and sampling.top_p == 1.0 and sampling.top_k == -1
    )
    if not is_plain and not server.is_processed:
        raise ServerUnfitError(
            f"{server.url} gives log-probs of the model and not of the distribution that it draws "
            "from, which differ for this temperature, top_p or top_k: start it with "
            "--logprobs-mode processed_logprobs"
        )
