"""Contract of outside rewards: what they are given, what they return, how they fail."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

current_step: ContextVar[int | None] = ContextVar("rolemesh_reward_step", default=None)
"""Step of the run for which rows are judged, set by whoever asks; None where nobody said."""

SHOWN_CHARACTERS = 200
"""Of a foreign answer, the part that a message shows."""

MAX_FLOAT32 = 3.4028234663852886e38
"""Rewards are float32: a larger number would become infinite."""

MAX_METRICS = 32
"""More scalars of one reward than this are refused."""

_METRIC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRow:
    """One trajectory, as plain Python."""

    prompt: str
    """As rendered for the policy."""
    completion: str
    """Without special tokens."""
    query: str
    """Prompt and completion, with special tokens where the policy's tokenizer is known."""
    prompt_tokens: tuple[int, ...] = ()
    completion_tokens: tuple[int, ...] = ()
    """Exactly as sampled."""
    answer: str = ""
    """The expected one; empty where the data has none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The data set's row."""


class OutsideRewardError(RuntimeError):
    """An outside reward gave no reward for some rows."""

    may_pass: bool = False
    """Whether the same request may succeed a little later."""

    def __init__(self, endpoint: str, *, expected: str, found: str, remedy: str) -> None:
        """Takes what a person needs to mend it.

        Args:
            endpoint: Whom we asked.
            expected: What would have been right.
            found: What came instead.
            remedy: What to do.
        """
        super().__init__(f"reward {endpoint}: expected {expected}, found {found}; {remedy}")
        self.endpoint = endpoint
        self.expected = expected
        self.found = found
        self.remedy = remedy


class RewardUnavailableError(OutsideRewardError):
    """It does not answer, or says that it cannot now: the same request may succeed later."""

    may_pass = True

    def __init__(
        self,
        endpoint: str,
        *,
        found: str,
        expected: str = "an answer",
        remedy: str = "look whether the reward service runs and is reachable from ours",
        retry_after_s: float | None = None,
    ) -> None:
        """As the base; `retry_after_s` is how long it asks us to wait, where it does."""
        super().__init__(endpoint, expected=expected, found=found, remedy=remedy)
        self.retry_after_s = retry_after_s


class RewardTimeoutError(RewardUnavailableError):
    """No answer in time."""


class RewardRefusedError(OutsideRewardError):
    """It answers that it will never take this request."""


class RewardAnswerInvalidError(OutsideRewardError):
    """It answered, with what cannot be a reward: asking again would be asking a liar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Rewards of some rows.

    Example: of three rows the second is not applicable and the third failed:
    Judgement(rewards=[1.0, None, None], failures={2: RewardTimeoutError(...)}).
    """

    rewards: list[float | None]
    """One a row, finite; None: does not apply to the row, or failed."""
    failures: Mapping[int, OutsideRewardError] = field(default_factory=dict)
    """Why a row has no reward though it should, by its position."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Scalars over these rows."""


class OutsideReward(ABC):
    """Judges rows; says of each one that it cannot judge why.

    Owner: the loop on which it is first used. What fails for all rows may be raised; it then stands
    for each of them.
    """

    async def open(self) -> None:  # noqa: B027  (most have nothing to prepare)
        """Prepares for the first rows, so that what can never work shows before a run's first step.

        Raises:
            OutsideRewardError: It cannot work.
        """

    @abstractmethod
    async def judge(self, rows: Sequence[RewardRow]) -> Judgement:
        """Judges rows, at least one. Cancelling it ends all requests that it began.

        Raises:
            OutsideRewardError: No row could be judged.
        """

    @abstractmethod
    async def close(self) -> None:
        """Gives back connections and processes."""


class RewardClient(ABC):
    """Speaks one protocol to one place. It sends a request once: what is around it is not its own.

    `rolemesh.services.reward.outside.endpoints` adds batches, tries, hedging and all the rest.
    """

    endpoint: str
    """Whom it asks, for messages."""

    @abstractmethod
    async def ask(self, rows: Sequence[RewardRow]) -> Judgement:
        """Sends one request for rows, at least one; has a bound of its own on what it reads.

        Raises:
            OutsideRewardError: The subclass says whether it may pass.
        """

    @abstractmethod
    def sent(self, row: RewardRow) -> bytes:
        """All of a row that decides its reward, i.e. what is sent: the key of the cache."""

    @abstractmethod
    async def close(self) -> None:
        """Gives back connections."""


def checked_rewards(
    values: object,
    num_rows: int,
    endpoint: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    takes_none: bool = False,
) -> list[float | None]:
    """A foreign list of rewards, if it is one finite number a row.

    Args:
        values: What came.
        num_rows: Rewards that there must be.
        endpoint: Who gave them.
        minimum: Lowest that is taken.
        maximum: Highest that is taken.
        takes_none: Whether None may stand for "does not apply".

    Raises:
        RewardAnswerInvalidError: Names the first row that is wrong.
    """

    def invalid(expected: str, found: str) -> RewardAnswerInvalidError:
        return RewardAnswerInvalidError(
            endpoint,
            expected=expected,
            found=found,
            remedy="mend the reward, or see docs/rewards.md for the form",
        )

    if not isinstance(values, list | tuple):
        raise invalid(f"a list of {num_rows} numbers", shown(values))
    if len(values) != num_rows:
        raise invalid(f"{num_rows} rewards, one a row", f"{len(values)}: {shown(values)}")
    rewards: list[float | None] = []
    for row, value in enumerate(values):
        if value is None and takes_none:
            rewards.append(None)
            continue
        # bool is an int in Python, and some judges answer it; but so is a mistake.
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(f"a number for row {row}", shown(value))
        if not abs(value) <= MAX_FLOAT32:  # also NaN
            raise invalid(f"a finite number for row {row} (float32)", shown(value))
        number = float(value)
        if (minimum is not None and number < minimum) or (maximum is not None and number > maximum):
            raise invalid(
                f"a number from {_bound(minimum)} to {_bound(maximum)} for row {row}", shown(value)
            )
        rewards.append(number)
    return rewards


def checked_metrics(metrics: Mapping[str, float], endpoint: str) -> dict[str, float]:
    """Foreign scalars by name, if they are few, named plainly and finite: each becomes a curve.

    Raises:
        RewardAnswerInvalidError: Names what is wrong.
    """
    if len(metrics) > MAX_METRICS:
        found = f"{len(metrics)}"
        raise RewardAnswerInvalidError(
            endpoint, expected=f"at most {MAX_METRICS} metrics", found=found, remedy="give fewer"
        )
    for name, value in metrics.items():
        # Beyond float32 a mean over rows could become infinite.
        if not _METRIC_NAME.fullmatch(name) or not abs(value) <= MAX_FLOAT32:
            raise RewardAnswerInvalidError(
                endpoint,
                expected='finite metrics with names of letters, digits, "_", ".", "-" and "/"',
                found=f"{shown(name)}: {value}",
                remedy="mend the reward, or leave the metric out",
            )
    return dict(metrics)


def _bound(bound: float | None) -> str:
    return "anything" if bound is None else f"{bound:g}"


def shown(value: object) -> str:
    """A foreign value in a message: its type, and its beginning."""
    if isinstance(value, str):
        cut = value[:SHOWN_CHARACTERS]
        return f"the text {cut!r}{'...' if len(cut) < len(value) else ''}"
    if isinstance(value, list | tuple | dict) and len(value) > SHOWN_CHARACTERS:
        return f"a {type(value).__name__} of {len(value)}"
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested deeply, or an int of too many digits to print
        return f"a {type(value).__name__}"
    cut = text[:SHOWN_CHARACTERS]
    return f"{type(value).__name__} {cut}{'...' if len(cut) < len(text) else ''}"
