"""Contract of outside rewards: what they are given, what they return, how they fail."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar

current_step: ContextVar[int | None] = ContextVar("rolemesh_reward_step", default=None)
"""Step of the run for which rows are judged. The caller sets it; None if it did not."""

SHOWN_CHARACTERS = 200
"""Most characters of a foreign answer that a message shows."""

MAX_FLOAT32 = 3.4028234663852886e38
"""Largest float32. Rewards are float32, so a larger number would become infinite."""

MAX_METRICS = 32
"""Most scalars of one reward; more are refused."""

_METRIC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRow:
    """One trajectory, as plain Python."""

    prompt: str
    """Prompt as rendered for the policy."""
    completion: str
    """Completion without special tokens."""
    query: str
    """Prompt and completion, with special tokens where the policy's tokenizer is known."""
    prompt_tokens: tuple[int, ...] = ()
    completion_tokens: tuple[int, ...] = ()
    """Token ids exactly as sampled."""
    answer: str = ""
    """Expected answer; empty if the data has none, JSON if it is no text."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Row of the data set; an answer that is no text stands in it as it is."""
    images: tuple[str, ...] | None = None
    """Images of the prompt in its order, as data URLs. None: the data has none, or nobody asked."""


class OutsideRewardError(RuntimeError):
    """An outside reward gave no reward for some rows."""

    may_pass: bool = False
    """Whether the same request may succeed a little later."""

    def __init__(self, endpoint: str, *, expected: str, found: str, remedy: str) -> None:
        """Takes the facts that a person needs to repair it.

        Args:
            endpoint: Place that was asked.
            expected: Description of a right answer.
            found: Description of the actual answer.
            remedy: Advice to the user.
        """
        super().__init__(f"reward {endpoint}: expected {expected}, found {found}; {remedy}")
        self.endpoint = endpoint
        self.expected = expected
        self.found = found
        self.remedy = remedy


class RewardUnavailableError(OutsideRewardError):
    """It does not answer, or cannot answer now: the same request may succeed later."""

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
        """Takes the base's arguments, and the pause that the endpoint asks for, if any."""
        super().__init__(endpoint, expected=expected, found=found, remedy=remedy)
        self.retry_after_s = retry_after_s


class RewardTimeoutError(RewardUnavailableError):
    """No answer in time."""


class RewardRefusedError(OutsideRewardError):
    """It answers that it will never take this request."""


class RewardAnswerInvalidError(OutsideRewardError):
    """Its answer cannot be a reward. It is not asked again: the next answer could be wrong, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Rewards of some rows.

    Example: of three rows the second is not applicable and the third failed:
    Judgement(rewards=[1.0, None, None], failures={2: RewardTimeoutError(...)}).
    """

    rewards: list[float | None]
    """One finite number for each row; None: does not apply to the row, or failed."""
    failures: Mapping[int, OutsideRewardError] = field(default_factory=dict)
    """Errors of rows that should have a reward but have none, by position."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Scalars over these rows."""
    parts: Sequence[Mapping[str, float]] = field(default_factory=list)
    """Numbers beside the reward of each row, by name; empty where no row has any."""

    def parts_of(self, row: int) -> Mapping[str, float]:
        """The parts of a row."""
        return self.parts[row] if self.parts else {}


class OutsideReward(ABC):
    """Judges rows, and gives an error for each row that it cannot judge.

    Owner: the loop on which it is first used. An error that concerns all rows may be raised; it
    then counts for each of them.
    """

    @property
    def takes_images(self) -> bool:
        """Whether it looks at the images of a prompt; known once it is open."""
        return False

    async def open(self) -> None:  # noqa: B027  (most have nothing to prepare)
        """Prepares for the first rows, so that a lasting fault shows before a run's first step.

        Raises:
            OutsideRewardError: It cannot work.
        """

    @abstractmethod
    async def judge(self, rows: Sequence[RewardRow]) -> Judgement:
        """Judges at least one row. Cancelling it ends all requests that it began.

        Raises:
            OutsideRewardError: No row could be judged.
        """

    def trouble(self) -> str:
        """What keeps it from an answer right now, e.g. "does not answer, try 4, for 12 s".

        Empty where nothing does. May be called from any thread.
        """
        return ""

    @abstractmethod
    async def close(self) -> None:
        """Frees connections and processes."""


class RewardClient(ABC):
    """Speaks one protocol to one place. It sends each request once.

    `rolemesh.services.reward.outside.endpoints` adds batches, tries, hedging and all the rest.
    """

    endpoint: str
    """Place that it asks, for messages."""
    takes_images: ClassVar[bool] = False
    """Whether its protocol has a place for the images of a prompt."""

    @abstractmethod
    async def ask(self, rows: Sequence[RewardRow]) -> Judgement:
        """Sends one request for at least one row. It limits the size of the answer by itself.

        Raises:
            OutsideRewardError: The request failed; `may_pass` says whether it may succeed later.
        """

    @abstractmethod
    def sent(self, row: RewardRow) -> bytes:
        """All that is sent of a row, as bytes of about that length.

        Equal bytes mean an equal reward: they are the key of the cache and of the answers that are
        kept. The length decides how many rows a request holds.
        """

    @abstractmethod
    async def close(self) -> None:
        """Closes its connections."""


def checked_rewards(
    values: object,
    num_rows: int,
    endpoint: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    takes_none: bool = False,
) -> list[float | None]:
    """Checks that a foreign list has one finite number for each row, and returns it.

    Args:
        values: The answer.
        num_rows: Number of rewards that it must have.
        endpoint: Place that gave it.
        minimum: Lowest allowed reward; None: no bound.
        maximum: Highest allowed reward; None: no bound.
        takes_none: Whether None is allowed, for "does not apply".

    Raises:
        RewardAnswerInvalidError: Names the first row that is wrong.
    """

    def invalid(expected: str, found: str) -> RewardAnswerInvalidError:
        return RewardAnswerInvalidError(
            endpoint,
            expected=expected,
            found=found,
            remedy="fix the reward, or see docs/rewards.md for the form",
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
        # bool is an int in Python. Some judges answer it, but it may also be a mistake.
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
    """Checks foreign scalars, each of which becomes a curve: few, with plain names, finite.

    Raises:
        RewardAnswerInvalidError: One of them is wrong; the text names it.
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
                remedy="fix the reward, or leave the metric out",
            )
    return dict(metrics)


def _bound(bound: float | None) -> str:
    return "anything" if bound is None else f"{bound:g}"


def shown(value: object) -> str:
    """Describes a foreign value for a message: its type and its beginning."""
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
