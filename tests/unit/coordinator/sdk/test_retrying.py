"""Repeats: when, how often, how long."""

from __future__ import annotations

import pytest

from rolemesh.coordinator.sdk import RetryPolicy
from rolemesh.coordinator.sdk.retrying import Contact, Retries, repeated
from rolemesh.rpc.errors import (
    DeadlineError,
    PreconditionError,
    RolemeshError,
    UnavailableError,
)


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def policy(self, draw: float = 1.0, **settings: float) -> RetryPolicy:
        return RetryPolicy(**settings, sleep=self.sleep, draw=lambda: draw, clock=lambda: self.now)


class Failing:
    """Fails with each of the errors once, then answers."""

    def __init__(self, *errors: RolemeshError) -> None:
        self.errors = list(errors)
        self.calls = 0

    async def __call__(self) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return 7


async def test_pauses_double_up_to_the_longest_and_are_drawn_from_zero_on() -> None:
    gone = [UnavailableError("gone")] * 5
    clock = Clock()
    assert await repeated(clock.policy(first_s=1.0, longest_s=5.0), Failing(*gone)) == 7
    assert clock.pauses == [1.0, 2.0, 4.0, 5.0, 5.0]
    clock = Clock()
    assert await repeated(clock.policy(0.25, first_s=1.0, longest_s=5.0), Failing(*gone)) == 7
    assert clock.pauses == [0.25, 0.5, 1.0, 1.25, 1.25]


async def test_a_call_is_given_up_once_its_budget_is_used_up() -> None:
    call, clock = Failing(*[UnavailableError("gone")] * 50), Clock()
    with pytest.raises(UnavailableError, match="gone"):
        await repeated(clock.policy(budget_s=10.0, first_s=1.0, longest_s=4.0), call)
    # 1 + 2 + 4 s; another 4 s would be beyond 10.
    assert clock.pauses == [1.0, 2.0, 4.0]
    assert call.calls == 4


async def test_a_peer_that_has_never_answered_is_given_up_soon() -> None:
    contact, clock = Contact("host:1"), Clock()
    policy = clock.policy(budget_s=60.0, first_contact_s=5.0, first_s=1.0, longest_s=4.0)
    call = Failing(*[UnavailableError("gone")] * 3, PreconditionError("no", reason="REFUSED"))
    with pytest.raises(UnavailableError, match="gone; nothing has answered at host:1 within 5 s"):
        await repeated(policy, call, contact)
    assert clock.pauses == [1.0, 2.0]
    # A refusal is an answer, too.
    with pytest.raises(PreconditionError):
        await repeated(policy, call, contact)
    clock.pauses.clear()
    assert await repeated(policy, Failing(*[UnavailableError("gone")] * 6), contact) == 7
    assert sum(clock.pauses) > 5.0


async def test_a_wait_is_told_once_where_no_logging_is_set_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await repeated(Clock().policy(), Failing(*[UnavailableError("host:1 is gone")] * 3))
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "host:1 is gone; it is asked again for up to 60 s"
    ]


async def test_without_a_budget_nothing_is_repeated() -> None:
    call = Failing(UnavailableError("gone"))
    with pytest.raises(UnavailableError):
        await repeated(Clock().policy(budget_s=0.0), call)
    assert call.calls == 1


@pytest.mark.parametrize(
    "error",
    [
        PreconditionError("epoch 1 is old", reason="STALE_EPOCH"),
        DeadlineError("too long"),
        UnavailableError("the ranks differ", reason="RANKS_DIVERGED", retryable=False),
    ],
    ids=lambda error: error.reason,
)
async def test_what_a_repeat_cannot_help_is_raised_at_once(error: RolemeshError) -> None:
    call = Failing(error)
    with pytest.raises(type(error)) as raised:
        await repeated(Clock().policy(), call)
    assert raised.value is error
    assert call.calls == 1


async def test_a_sign_of_life_renews_the_budget_and_success_the_pauses_too() -> None:
    clock, error = Clock(), UnavailableError("gone")
    retries = Retries(clock.policy(budget_s=4.0, first_s=1.0, longest_s=2.0))
    for _ in range(5):
        await retries.pause(error)
        retries.is_back()
    assert clock.pauses == [1.0, 2.0, 2.0, 2.0, 2.0]
    retries.succeeded()
    await retries.pause(error)
    assert clock.pauses[-1] == 1.0


@pytest.mark.parametrize(
    "settings", [{"budget_s": -1.0}, {"first_s": 0.0}, {"first_s": 2.0, "longest_s": 1.0}]
)
def test_a_policy_out_of_range_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="budget_s >= 0"):
        RetryPolicy(**settings)
