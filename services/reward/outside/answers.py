"""Answers of outside rewards, written down so that a step that is made again gets the same ones.

A judge may answer differently the second time. What it answered in a step is therefore kept in a
log that outlives the process, and taken from there when the step is made again after a failure.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from rolemesh.engine.specs import FailSpec, FailurePolicySpec
from rolemesh.services.reward.outside.base import (
    Judgement,
    OutsideRewardError,
    RewardAnswerInvalidError,
    RewardRefusedError,
    RewardTimeoutError,
    RewardUnavailableError,
)

logger = logging.getLogger(__name__)

MAX_LOG_BYTES = 64 << 20
"""Most bytes of a step's answers. A row takes about 20, and a request about 200 more."""

MAX_TEXT = 1000
"""Most characters of each text of a failure that are written down."""

_FRAME = struct.Struct("<II")
"""Before each record: its bytes, and their CRC-32."""

_KINDS = {
    kind.__name__: kind
    for kind in (
        OutsideRewardError,
        RewardUnavailableError,
        RewardTimeoutError,
        RewardRefusedError,
        RewardAnswerInvalidError,
    )
}

_Text = Annotated[str, Field(max_length=MAX_TEXT)]


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _Failure(_Closed):
    """Why rows have no reward."""

    row: int | None
    """Of the request; None: all of them."""
    kind: str
    endpoint: _Text
    expected: _Text
    found: _Text
    remedy: _Text

    @staticmethod
    def of(error: OutsideRewardError, row: int | None) -> _Failure:
        """The failure that an error tells of."""
        facts = {
            name: str(getattr(error, name))[:MAX_TEXT]
            for name in ("endpoint", "expected", "found", "remedy")
        }
        return _Failure(row=row, kind=type(error).__name__, **facts)

    def error(self) -> OutsideRewardError:
        """The error, as it was raised."""
        kind = _KINDS.get(self.kind, OutsideRewardError)
        return kind(self.endpoint, expected=self.expected, found=self.found, remedy=self.remedy)


class _Record(_Closed):
    """What a request came to."""

    step: int
    source: str
    request: str
    """SHA-256 of the call and of all that was sent, in hexadecimal digits."""
    occurrence: int
    """How many equal requests of the call came before."""
    rewards: list[Annotated[float, Field(allow_inf_nan=False)] | None]
    failures: list[_Failure]
    metrics: dict[str, float]
    parts: list[dict[str, Annotated[float, Field(allow_inf_nan=False)]]] = []

    @property
    def key(self) -> tuple[str, str, int]:
        """What it is found by."""
        return self.source, self.request, self.occurrence

    def fits(self, num_rows: int) -> bool:
        """Whether it can be the answer to a request of so many rows."""
        rows = [failure.row for failure in self.failures]
        if None in rows:
            return True
        is_whole = len(self.rewards) == num_rows and len(self.parts) in (0, num_rows)
        return is_whole and all(row is not None and 0 <= row < num_rows for row in rows)

    def judgement(self) -> Judgement:
        """The answer; raises OutsideRewardError if that was the outcome."""
        for failure in self.failures:
            if failure.row is None:
                raise failure.error()
        return Judgement(
            rewards=list(self.rewards),
            failures={one.row: one.error() for one in self.failures if one.row is not None},
            metrics=dict(self.metrics),
            parts=self.parts,
        )


class AnswerLog:
    """The answers of one step, in a file that only grows. Thread-safe.

    Invariant: a record is in the file whole, or it is cut off when the file is read again: a
    process may be killed while it writes one.
    """

    def __init__(
        self,
        descriptor: int,
        begin: int,
        tell: Callable[[str], None] = logger.warning,
        number: int = 0,
    ) -> None:
        """Takes a file that this process alone writes; reads nothing yet.

        Args:
            descriptor: Of the file; closed by `close`.
            begin: Byte at which the records begin.
            tell: Told when an answer cannot be kept.
            number: Of the log among those of several services.
        """
        self.number = number
        self._descriptor: int | None = descriptor
        self._begin = self._end = begin
        self._tell = tell
        self._step: int | None = None
        self._records: dict[tuple[str, str, int], _Record] = {}
        self._taken: dict[int, int] = {}
        """Bytes up to which other logs of the step are known, by their numbers."""
        self._lock = threading.Lock()

    def turn_to(self, step: int) -> None:
        """Makes it the log of a step: its answers are read, those of another step are dropped."""
        with self._lock:
            if self._descriptor is None or self._step == step:
                return
            found: list[_Record] = []
            self._end = self._begin
            if self._step is None:
                size = min(os.fstat(self._descriptor).st_size - self._begin, MAX_LOG_BYTES)
                held, num_bytes = _records_in(os.pread(self._descriptor, size, self._begin))
                if all(record.step == step for record in held):
                    found = held
                    self._end += num_bytes
            self._step, self._records = step, {record.key: record for record in found}
            self._taken.clear()
            # Also what follows the last whole record.
            os.ftruncate(self._descriptor, self._end)

    def take_in(self, number: int, read: Callable[[int, int], bytes]) -> None:
        """Takes in what another service has written of the step since this was last called.

        Args:
            number: Of its log.
            read: Returns bytes of it, of a first byte and a number of bytes.
        """
        with self._lock:
            start = self._taken.get(number, self._begin)
            found, num_bytes = _records_in(read(start, MAX_LOG_BYTES))
            for record in found:
                if record.step == self._step:
                    self._records.setdefault(record.key, record)
            # A log that has not come to the step yet is begun anew then.
            if found and all(record.step == self._step for record in found):
                self._taken[number] = start + num_bytes

    def find(self, step: int, key: tuple[str, str, int]) -> _Record | None:
        """The record of a request; None if there is none."""
        with self._lock:
            return self._records.get(key) if step == self._step else None

    def add(self, record: _Record) -> None:
        """Writes a record, unless the log has gone on to another step, or has no room."""
        text = json.dumps(record.model_dump(), separators=(",", ":")).encode()
        frame = _FRAME.pack(len(text), zlib.crc32(text)) + text
        with self._lock:
            if self._descriptor is None or record.step != self._step:
                return
            if record.key in self._records:
                return  # a late answer to a call that was ended: the first one counts
            if self._end + len(frame) - self._begin > MAX_LOG_BYTES:
                self._tell(
                    f"the answers of step {record.step} take more than {MAX_LOG_BYTES} bytes"
                )
                return
            written, why = 0, "it is full"
            try:
                written = os.pwrite(self._descriptor, frame, self._end)
            except OSError as error:
                why = str(error.strerror)
            if written < len(frame):
                os.ftruncate(self._descriptor, self._end)
                self._tell(f"shared memory takes no more ({why}): enlarge /dev/shm")
                return
            self._end += written
            self._records[record.key] = record

    def close(self) -> None:
        """Lets the file go; it stays. Safe to repeat."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
            self._descriptor = self._step = None


class Answers:
    """The answers of one call: those that its log has, and those that it gets. Owner: one loop.

    Example: a call that asks for rows a and b is ended between the two answers. The same call of a
    later attempt gets the first one from the log, and asks for b.
    """

    def __init__(self, log: AnswerLog, step: int, call: Sequence[object]) -> None:
        """Takes the log.

        Args:
            log: Turned to the step.
            step: Of the call.
            call: What tells it from other calls of the step, in each attempt alike.
        """
        self._log = log
        self._step = step
        self._call = repr(tuple(call)).encode()
        self._seen: Counter[tuple[str, str]] = Counter()

    def key_of(self, source: str, sent: Sequence[bytes]) -> tuple[str, str, int]:
        """The key of the next request of a source that sends this."""
        digest = hashlib.sha256()
        for part in (self._call, *sent):
            digest.update(len(part).to_bytes(8, "little") + part)
        request = digest.hexdigest()
        occurrence = self._seen[source, request]
        self._seen[source, request] += 1
        return source, request, occurrence

    async def get(
        self,
        key: tuple[str, str, int],
        num_rows: int,
        policy: FailurePolicySpec,
        ask: Callable[[], Awaitable[Judgement]],
    ) -> Judgement:
        """The answer to a request: the one that was written down, else that of `ask`.

        Args:
            key: Of `key_of`.
            num_rows: Rows of the request.
            policy: What failures lead to.
            ask: Sends the request.

        Raises:
            OutsideRewardError: That is what the request came to, now or before.
        """
        known = self._log.find(self._step, key)
        if known is not None and known.fits(num_rows):
            return known.judgement()
        # A failure that ends the run is not the answer when it goes on, with the judge fixed.
        ends_run = isinstance(policy, FailSpec)
        try:
            found = await ask()
        except OutsideRewardError as error:
            if not ends_run:
                self._write(key, Judgement(rewards=[]), [_Failure.of(error, None)])
            raise
        if not (found.failures and ends_run):
            failures = [_Failure.of(error, row) for row, error in found.failures.items()]
            self._write(key, found, failures)
        return found

    def _write(self, key: tuple[str, str, int], found: Judgement, failures: list[_Failure]) -> None:
        source, request, occurrence = key
        record = _Record(
            step=self._step,
            source=source,
            request=request,
            occurrence=occurrence,
            rewards=found.rewards,
            failures=failures,
            metrics=dict(found.metrics),
            parts=[dict(one) for one in found.parts],
        )
        self._log.add(record)


current_answers: ContextVar[Answers | None] = ContextVar("rolemesh_reward_answers", default=None)
"""Answers of the call for which rows are judged; None where they are not kept."""


def kept(
    source: str,
    sent: Sequence[bytes],
    policy: FailurePolicySpec,
    ask: Callable[[], Awaitable[Judgement]],
) -> Callable[[], Awaitable[Judgement]]:
    """Makes a request take the answer that was written down for it, or write its own down.

    Equal requests of a call are told apart by the order in which this is called for them.

    Args:
        source: Name of the reward.
        sent: What is sent of each row.
        policy: What failures lead to.
        ask: Sends the request.
    """
    answers = current_answers.get()
    if answers is None:
        return ask
    return functools.partial(answers.get, answers.key_of(source, sent), len(sent), policy, ask)


def _records_in(held: bytes) -> tuple[list[_Record], int]:
    """The records up to the first that is not whole, or not ours, and their bytes."""
    records, end = [], 0
    while end + _FRAME.size <= len(held):
        length, checksum = _FRAME.unpack_from(held, end)
        begin = end + _FRAME.size
        text = held[begin : begin + length]
        if len(text) < length or zlib.crc32(text) != checksum:
            break
        try:
            records.append(_Record.model_validate(json.loads(text)))
        except (ValueError, RecursionError) as error:  # also of pydantic
            logger.warning("a record of answers cannot be read, and is left out: %s", error)
            break
        end = begin + length
    return records, end
