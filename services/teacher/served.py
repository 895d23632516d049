"""A teacher at servers: rows of a batch asked for at once, and those that no answer came for.

Shape letters: B rows, N packed completion tokens, K likeliest tokens at each place.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rolemesh.engine.algorithms.judged import LOSS_MASK, left_out, whole_groups
from rolemesh.engine.data.teachers.prompts import TeacherPrompts
from rolemesh.engine.experience import Column, ColumnKind, Experience, offsets_of
from rolemesh.engine.model_folders.pretrained import load_tokenizer
from rolemesh.engine.rollout.servers.admission import ServerUnfitError
from rolemesh.engine.rollout.servers.client import SamplersUnavailableError, ServerError
from rolemesh.engine.rollout.servers.teacher import ServedTeacher, policy_tokens
from rolemesh.engine.rollout.servers.teacher_scores import RowScores
from rolemesh.engine.specs import TeacherPromptSpec, TeacherServerSpec
from rolemesh.engine.specs.columns import INPUT_COLUMNS
from rolemesh.rpc.loop_thread import LoopThread
from rolemesh.rpc.together import together
from rolemesh.services.runtime.calls.call import Call

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""How often a call that waits for servers checks whether its caller still waits."""

OPEN_S = 60.0
"""Time to check servers that can be reached, beside the deadline for reaching them."""

CLOSE_S = 10.0
"""Longest wait for connections to end."""

ASK = "ask"
"""Name of the phase in which a call waits for servers, and computes nothing."""


class TeacherFailedError(RuntimeError):
    """A server of the teacher refused a row, or was started in a way that it cannot be used."""


class TeacherUnavailableError(TeacherFailedError):
    """No server of the teacher can be reached, in all tries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What servers said of a batch."""

    columns: Experience
    """To publish: float32 [N], completion, and on request int32 and float32 [N, K]; where rows may
    be left out also is_judged and loss_mask. A row that no answer came for has NaN."""
    metrics: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Why rows have no scores, for people."""


_Row = tuple[list[int], int]
"""Tokens, and where the completion begins."""


class TeacherAtServers:
    """Owner: the service's loop; the servers are asked on a loop of its own, which close ends."""

    def __init__(self, spec: TeacherServerSpec, prompt: TeacherPromptSpec | None = None) -> None:
        """Reads the policy's tokens, where its folder is given; asks nobody yet.

        Args:
            spec: Servers, their limits, and what becomes of rows without an answer.
            prompt: What the teacher is told in the place of the student's prompts; None: these.

        Raises:
            ValueError: A URL cannot be used, the token is not set, or a prompt is given without a
                folder.
            ModelFolderError, NoTokenizerError: server.policy_folder is none of a model.
            DataInvalidError: As `TeacherPrompts`.
        """
        folder = spec.policy_folder
        if prompt is not None and folder is None:
            raise ValueError(
                "teacher.prompt is given, which the policy's tokenizer renders, and "
                "teacher.server.policy_folder is not: give the folder of the policy's model"
            )
        self._prompts: TeacherPrompts | None = None
        if prompt is not None and folder is not None:
            tokenizer = load_tokenizer(folder, field="teacher.server.policy_folder")
            # A row that gets too long for the servers is one that they cannot score.
            self._prompts = TeacherPrompts(tokenizer, prompt, None)
        self._spec = spec
        self._teacher = ServedTeacher(spec, None if folder is None else policy_tokens(folder))
        self._loop = LoopThread("teacher-servers", "teacher")
        self.may_drop = spec.may_drop
        """Whether rows may be left without scores."""
        told = INPUT_COLUMNS if self._prompts is None else self._prompts.columns
        self.columns = (*told, *(("prompt_ids", LOSS_MASK) if self.may_drop else ()))
        """Columns of a batch that `score` needs."""

    @property
    def compared(self) -> str:
        """How far the servers' tokens are known to be the policy's, for people."""
        return self._teacher.compared

    def open(self) -> None:
        """Checks the servers. On the compute thread.

        Raises:
            TeacherFailedError: One cannot be used; says what to change.
            TeacherUnavailableError: None can be reached within deadline_s.
        """
        try:
            self._loop.run(self._teacher.open(), self._spec.deadline_s + OPEN_S)
        except BaseException as error:
            self.close()
            if isinstance(error, SamplersUnavailableError):
                raise TeacherUnavailableError(str(error)) from error
            if isinstance(error, ServerError):
                raise TeacherFailedError(str(error)) from error
            raise

    def close(self) -> None:
        """Ends all requests and connections. Not on the loop."""
        if self._loop.is_running:
            try:
                self._loop.run(self._teacher.close(), CLOSE_S)
            except TimeoutError:
                logger.warning("connections to the teacher's servers did not close in time")
        self._loop.close(CLOSE_S)

    async def score(
        self,
        batch: Experience,
        column: str,
        top_k: int,
        call: Call,
        *,
        places: Sequence[int] | None = None,
    ) -> Scored:
        """Has servers score the completion tokens of a batch.

        Args:
            batch: With `columns`; with is_judged if another role has left rows out.
            column: Name of the log-probs, and beginning of those of the likeliest tokens.
            top_k: K; 0: none.
            call: The call for which it works.
            places: What messages call each row; None: its place in the batch.

        Raises:
            TeacherFailedError: A row could not be scored, and may not be left out; or a server
                cannot be used as it was started.
            TeacherUnavailableError: No server can be reached, and no row may be left out.
            DataInvalidError: The teacher's prompt of a row cannot be made.
        """
        if self._prompts is not None:
            batch = batch | await call.compute(self._prompts.of, batch, places)
        tokens = (row.tolist() for row in batch["tokens"].rows())
        rows = list(zip(tokens, batch["prompt_lengths"].values.tolist(), strict=True))
        done: list[int] = []
        places = range(len(rows)) if places is None else places
        with call.phase(ASK):
            asking = asyncio.ensure_future(
                self._loop.run_async(self._score_rows(rows, places, top_k, done))
            )

            async def watch() -> None:
                while not asking.done():
                    call.progress("ask the teacher's servers", len(done), len(rows))
                    await asyncio.wait([asking], timeout=HEARTBEAT_S)

            await together([asking, watch()])
        return await call.compute(self._scored, batch, rows, asking.result(), column, top_k)

    async def _score_rows(
        self, rows: Sequence[_Row], places: Sequence[int], top_k: int, done: list[int]
    ) -> list[RowScores | TeacherFailedError]:
        """What comes of each row; raises where a failure may not be left out."""
        found: dict[int, RowScores | TeacherFailedError] = {}

        async def one(number: int) -> None:
            tokens, first = rows[number]
            try:
                found[number] = await self._teacher.score(tokens, first, top_k)
            except ServerUnfitError:
                raise
            except ServerError as error:
                failure = TeacherFailedError(f"row {places[number]} could not be scored: {error}")
                if not self.may_drop:
                    raise failure from error
                found[number] = failure
            done.append(number)

        try:
            await together(one(number) for number in range(len(rows)))
        except ServerUnfitError as error:
            raise TeacherFailedError(str(error)) from error
        except SamplersUnavailableError as error:
            # What waits for a place would wait as long again, one request after another.
            gone = TeacherUnavailableError(str(error))
            if not self.may_drop:
                raise gone from error
            return [found.get(number, gone) for number in range(len(rows))]
        return [found[number] for number in range(len(rows))]

    def _scored(
        self,
        batch: Experience,
        rows: Sequence[_Row],
        found: Sequence[RowScores | TeacherFailedError],
        column: str,
        top_k: int,
    ) -> Scored:
        """Columns and metrics of what came. On the compute thread."""
        lengths = [len(tokens) - first for tokens, first in rows]
        offsets = offsets_of(torch.tensor(lengths, dtype=torch.int64))
        # A row without an answer is no number, so that nothing can take it for one.
        logprobs_N = torch.full((int(offsets[-1]),), math.nan)
        top_NK = torch.full((int(offsets[-1]), top_k), math.nan)
        ids_NK = torch.zeros(top_NK.shape, dtype=torch.int32)
        failed_B = torch.zeros(len(rows), dtype=torch.bool)
        for number, scores in enumerate(found):
            if isinstance(scores, TeacherFailedError):
                failed_B[number] = True
                continue
            own = slice(int(offsets[number]), int(offsets[number + 1]))
            logprobs_N[own] = torch.tensor(scores.logprobs)
            if top_k:
                ids_NK[own] = torch.tensor(scores.top_ids, dtype=torch.int32).view(-1, top_k)
                top_NK[own] = torch.tensor(scores.top).view(-1, top_k)
        values = {column: logprobs_N}
        if top_k:
            values |= {f"{column}_top_ids": ids_NK, f"{column}_top": top_NK}
        columns = Experience(
            {name: Column(ColumnKind.COMPLETION, one, offsets) for name, one in values.items()}
        )
        if not self.may_drop:
            return Scored(columns=columns)
        dropped_B = whole_groups(failed_B, batch["prompt_ids"].values)
        failures = [one for one in found if isinstance(one, TeacherFailedError)]
        metrics = {
            "teacher/failed_rows": float(len(failures)),
            "teacher/dropped_rows": float(dropped_B.sum()),
        }
        columns |= left_out(batch, ~dropped_B)
        if not failures:
            return Scored(columns=columns, metrics=metrics)
        note = f"teacher: {len(failures)} of {len(rows)} rows have no scores: {failures[0]}"
        logger.warning("%s", note)
        return Scored(columns=columns, metrics=metrics, notes=(note,))
