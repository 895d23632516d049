"""Samples behind prompts of clients, many of them in one generation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rolemesh.coordinator.sdk.values.experience import Prompt
from rolemesh.coordinator.tinker.forms.forms import (
    EMPTY_LOGPROB,
    Floats,
    Ints,
    SampleCall,
    SampledSequence,
    SampleResult,
    SamplingParams,
    TopkLogprobs,
    WireError,
)
from rolemesh.coordinator.tinker.models.fair_turns import Client, FairTurns
from rolemesh.coordinator.tinker.models.trained import TrainedModel
from rolemesh.engine.seeds import derive_seed
from rolemesh.rpc.experience.columns import ColumnData, Columns

MOST_TOPK = 1024
"""Likeliest tokens that are told of a place."""

_MOST_BYTES = 2 * 2**20
"""Prompts of one generation, of 8 bytes a token: a call of the service takes 4 MiB."""

_GATHER_S, _MOST_GATHERS = 0.01, 10
"""Pauses between the calls of a batch are a few milliseconds, a generation takes far longer than
ten; more calls than one in that time would make it wait forever, hence the second number."""

_FIRST_SEED = 2**61
"""Draws of a client's seeds are numbered from here on, all others below."""


class WeightsMovedError(Exception):
    """The model has other weights by now than those that were to sample."""


def check_sample_call(call: SampleCall, longest: int) -> None:
    """Refuses what is not served, or cannot be.

    Args:
        call: Of a client.
        longest: Most tokens of prompt and sample together.

    Raises:
        WireError: Names field, value and remedy.
    """
    if len(call.prompt) >= longest:
        raise WireError(
            "prompt", f"{len(call.prompt)} tokens", f"the model takes {longest - 1}: shorten it"
        )
    if call.params.stop == ():
        raise WireError("sampling_params.stop", "[]", "a sample always ends at the end of a turn")
    if call.topk_prompt_logprobs > MOST_TOPK:
        raise WireError("topk_prompt_logprobs", call.topk_prompt_logprobs, f"give {MOST_TOPK}")
    for name in ("topk_sample_logprobs", "prompt_alt_tokens_k"):
        if getattr(call, name):
            raise WireError(name, getattr(call, name), "this is not served: leave it out")
    if call.target_prompt_logprobs is not None:
        raise WireError("target_prompt_logprobs", "given", "this is not served: leave it out")


@dataclass(frozen=True, slots=True, eq=False)
class _Scores:
    """Of a prompt of T tokens, but for the first."""

    logprobs: Floats
    """[T - 1]."""
    top_ids: npt.NDArray[Any] | None
    """[T - 1, K], the likeliest first."""
    top: npt.NDArray[Any] | None
    """[T - 1, K], their log-probs."""


@dataclass(eq=False)
class _Asked:
    call: SampleCall
    draw: int
    client: Client
    done: asyncio.Future[SampleResult] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Sampling:
    """Samples with the weights of one model. Owner: the server's loop.

    Calls that come while a generation runs are sampled together in the next one, where they draw
    alike. A sample depends on its own draw alone, whatever is sampled beside it.
    """

    def __init__(self, model: TrainedModel, longest: int, fair_turns: FairTurns) -> None:
        """Takes the model, the most tokens of prompt and sample together, and whose turn it is."""
        self._model = model
        self._longest = longest
        self._fair_turns = fair_turns
        self._waiting: list[tuple[int, _Asked]] = []
        self._task: asyncio.Task[None] | None = None

    async def sample(self, call: SampleCall, version: int, client: Client) -> SampleResult:
        """The samples of a call, and what it asks of its prompt.

        Args:
            call: Checked by `check_sample_call`.
            version: Of the weights that are to sample.
            client: Who asks.

        Raises:
            WeightsMovedError: The model has other ones.
            RolemeshError: The service refuses it.
        """
        seed = call.params.seed
        draw = self._model.next_draw() if seed is None else _draw_of(seed, call)
        asked = _Asked(call, draw, client)
        self._waiting.append((version, asked))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        return await asked.done

    async def _work(self) -> None:
        while self._waiting:
            await self._gather()
            # Without those that were given up meanwhile.
            self._waiting = [one for one in self._waiting if not one[1].done.done()]
            if not self._waiting:
                return
            version, first = self._waiting[0]
            together, room = [first], _MOST_BYTES - 8 * len(first.call.prompt)
            for other_version, other in self._waiting[1:]:
                room -= 8 * len(other.call.prompt)
                if room < 0:
                    break
                # Of equal draws in one generation the second would count on.
                is_new = all(other.draw != one.draw for one in together)
                if is_new and other_version == version and _drawn_alike(first.call, other.call):
                    together.append(other)
            self._waiting = [one for one in self._waiting if one[1] not in together]
            tokens = sum(self._most_tokens(one.call) for one in together)
            try:
                async with self._fair_turns.turn(first.client, tokens):
                    found = await self._generated(version, together)
                    scored = await self._scored(version, [one.call for one in together])
            except BaseException as error:
                for one in together:
                    if not one.done.done():
                        one.done.set_exception(error)
                if not isinstance(error, Exception):
                    raise
            else:
                for one, sequences, scores in zip(together, found, scored, strict=True):
                    if not one.done.done():
                        one.done.set_result(_result(one.call, sequences, scores))

    async def _gather(self) -> None:
        """Waits until no further call comes: a client's batch arrives call by call."""
        for _ in range(_MOST_GATHERS):
            count = len(self._waiting)
            await asyncio.sleep(_GATHER_S)
            if len(self._waiting) == count:
                return

    async def _generated(
        self, version: int, together: Sequence[_Asked]
    ) -> list[list[SampledSequence]]:
        params, num_samples = together[0].call.params, together[0].call.num_samples
        # The service ends a sample where the model does.
        most = self._longest if params.max_tokens is None else params.max_tokens
        stop = params.stop or ()
        texts = tuple(one for one in stop if isinstance(one, str))

        async def work() -> Columns:
            mesh, step = self._model.mesh, self._model.mesh.step
            # A draw follows from the step, too: a sampler that loads these weights is at the first.
            mesh.begin_step(0)
            try:
                made = await self._model.actor.sample(
                    [
                        Prompt(tokens=one.call.prompt.tolist(), prompt_id=one.draw)
                        for one in together
                    ],
                    samples_per_prompt=num_samples,
                    temperature=params.temperature or 1.0,
                    greedy=params.temperature == 0,
                    top_p=params.top_p,
                    top_k=params.top_k,
                    max_new_tokens=most,
                    stop=texts,
                    stop_token_ids=tuple(one for one in stop if isinstance(one, int)),
                )
            finally:
                mesh.begin_step(step)
            names = ["tokens", "prompt_lengths", "logprobs", "finished"]
            try:
                return await self._model.mesh.fetch(made, names)
            finally:
                await self._model.mesh.release([made])

        async with self._model.lock:
            self._check(version)
            columns = await self._model.making(work)
        rows = [
            SampledSequence(
                tokens=tokens[length:],
                logprobs=np.asarray(logprobs, dtype=np.float32),
                is_stopped=bool(finished),
            )
            for tokens, length, logprobs, finished in zip(
                columns["tokens"].rows(),
                columns["prompt_lengths"].values.tolist(),
                columns["logprobs"].rows(),
                columns["finished"].values.tolist(),
                strict=True,
            )
        ]
        return [rows[at : at + num_samples] for at in range(0, len(rows), num_samples)]

    async def _scored(self, version: int, calls: Sequence[SampleCall]) -> list[_Scores | None]:
        """What each call asks of its prompt; those that ask the same are scored together."""
        found: list[_Scores | None] = [None] * len(calls)
        places: dict[int, list[int]] = {}
        for place, call in enumerate(calls):
            if len(call.prompt) > 1 and (call.prompt_logprobs or call.topk_prompt_logprobs):
                places.setdefault(call.topk_prompt_logprobs, []).append(place)
        for top_k, mine in places.items():
            scores = await self._scores(version, [calls[place].prompt for place in mine], top_k)
            for place, one in zip(mine, scores, strict=True):
                found[place] = one
        return found

    async def _scores(self, version: int, prompts: Sequence[Ints], top_k: int) -> list[_Scores]:
        columns = Columns(
            {
                "tokens": ColumnData.sequence(prompts),
                "prompt_lengths": ColumnData.row([1] * len(prompts), np.int64),
            }
        )

        async def work() -> Columns:
            rows = await self._model.actor.put(columns)
            scored = await self._model.actor.compute_logprobs(rows, "scores", top_k=top_k)
            names = ["scores", *(("scores_top_ids", "scores_top") if top_k else ())]
            try:
                return await self._model.mesh.fetch(scored, names)
            finally:
                await self._model.mesh.release([rows, scored])

        async with self._model.lock:
            self._check(version)
            found = await self._model.making(work)
        ids, top = (
            [row.reshape(-1, top_k) for row in found[name].rows()]
            if top_k
            else [None] * len(prompts)
            for name in ("scores_top_ids", "scores_top")
        )
        return [
            _Scores(logprobs.astype(np.float32), *best)
            for logprobs, *best in zip(found["scores"].rows(), ids, top, strict=True)
        ]

    def _most_tokens(self, call: SampleCall) -> int:
        """That a call computes, where each sample is as long as it may be."""
        room = self._longest - len(call.prompt)
        most = room if call.params.max_tokens is None else min(room, call.params.max_tokens)
        return len(call.prompt) + call.num_samples * most

    def _check(self, version: int) -> None:
        if self._model.version != version or not self._model.is_open:
            raise WeightsMovedError


def _draw_of(seed: int, call: SampleCall) -> int:
    # Of the prompt as well: clients give one seed to all prompts of a batch, and equal draws are
    # not sampled together.
    mixed = derive_seed(seed, call.prompt.tobytes().hex())
    return _FIRST_SEED + mixed % _FIRST_SEED


def _result(
    call: SampleCall, sequences: list[SampledSequence], scores: _Scores | None
) -> SampleResult:
    """What a client gets: of its prompt NaN for the first token, which nothing predicts."""
    if not (call.prompt_logprobs or call.topk_prompt_logprobs):
        return SampleResult(sequences)
    first, top_k = np.full(1, np.nan, dtype=np.float32), call.topk_prompt_logprobs
    logprobs = first if scores is None else np.concatenate([first, scores.logprobs])
    # Clients refuse log-probs of tokens that they have said they would not read.
    last = call.prompt_logprobs_last_n
    num_unread = 0 if last is None else max(0, len(logprobs) - last)
    logprobs[:num_unread] = np.nan
    topk = _empty_topk(max(1, num_unread), top_k)
    if topk is not None and scores is not None:
        assert scores.top_ids is not None
        assert scores.top is not None
        skipped = len(topk.token_ids) - 1
        topk = TopkLogprobs(
            np.concatenate([topk.token_ids, scores.top_ids[skipped:]]),
            np.concatenate([topk.logprobs, scores.top[skipped:]]),
        )
    return SampleResult(
        sequences,
        prompt_logprobs=logprobs if call.prompt_logprobs else None,
        topk_prompt_logprobs=topk,
    )


def _drawn_alike(one: SampleCall, other: SampleCall) -> bool:
    """Whether two calls may be rows of one generation."""
    return _plain(one.params) == _plain(other.params) and one.num_samples == other.num_samples


def _plain(params: SamplingParams) -> SamplingParams:
    """Without what differs from row to row."""
    return replace(params, seed=None)


def _empty_topk(length: int, top_k: int) -> TopkLogprobs | None:
    if not top_k:
        return None
    shape = (length, top_k)
    return TopkLogprobs(
        np.zeros(shape, dtype=np.int32), np.full(shape, EMPTY_LOGPROB, dtype=np.float32)
    )
