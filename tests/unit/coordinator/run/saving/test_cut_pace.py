"""How often a run keeps its state in memory, by what that takes of its time."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_recipes import PPO_ROLES, fake_recipe, split_pools

from rolemesh.coordinator.run.saving.cut_pace import MOST_STEPS, CutPace

AHEAD = (*PPO_ROLES, "rollout")


def after(
    step_s: float, cut_s: float, share: float | None = 0.05, cuts: int = 4
) -> tuple[CutPace, list[str]]:
    """A pace that was told of so many equal cuts, and what it has said."""
    said: list[str] = []
    pace = CutPace(share, said.append)
    for _ in range(cuts):
        pace.made(step_s, cut_s)
    return pace, said


@pytest.mark.parametrize(
    ("step_s", "cut_s", "every"),
    [
        (20.0, 3.0, 3),  # 3 s of 60
        (20.0, 3.1, 4),
        (10.0, 2.4, 5),
        (60.0, 2.9, 1),  # below the share
        (1.0, 0.9, 1),  # below a second
        (0.5, 300.0, MOST_STEPS),
    ],
)
def test_cuts_take_no_more_than_their_share(step_s: float, cut_s: float, every: int) -> None:
    pace, said = after(step_s, cut_s)
    assert pace.every == every
    assert bool(said) == (every > 1)


def test_a_decision_says_its_reason_once() -> None:
    pace, said = after(20.0, 3.0, cuts=8)
    assert said == [
        "from here on the state of one step of 3 is kept in shared memory: that takes 3.0 s beside "
        "a step of 20.0 s, and run.recovery.cut_share gives it 5 % of the time"
    ]
    for _ in range(3):
        pace.made(20.0, 0.9)
    assert pace.every == 1
    assert said[1].startswith("from here on the state of each step is kept")


def test_first_cuts_decide_nothing_since_they_take_and_lock_their_memory() -> None:
    pace, _ = after(20.0, 50.0, cuts=1)
    for _ in range(3):
        pace.made(20.0, 0.4)
    assert pace.every == 1


def test_one_slow_cut_decides_nothing() -> None:
    pace, said = after(20.0, 0.4)
    pace.made(20.0, 50.0)
    assert (pace.every, said) == (1, [])


def test_it_does_not_go_to_and_fro_for_a_step_that_takes_a_little_longer() -> None:
    pace, said = after(20.0, 3.1)
    for _ in range(9):
        pace.made(21.0, 3.1)
    assert (pace.every, len(said)) == (4, 1)


def test_steps_between_cuts_are_counted_from_the_newest() -> None:
    pace, _ = after(20.0, 3.0)
    pace.saved(7)
    assert [step for step in range(8, 14) if pace.is_due(step)] == [10, 11, 12, 13]
    # A due checkpoint has a cut of its own.
    pace.saved(9)
    assert [step for step in range(10, 14) if pace.is_due(step)] == [12, 13]


@pytest.mark.parametrize(
    ("change", "thins"),
    [
        ({}, True),
        (
            {
                "roles": AHEAD,
                "sampler": {"type": "one_step_ahead"},
                "pools": split_pools(AHEAD),
            },
            False,
        ),
        ({"health": {"not_finite": {"do": "skip"}}}, False),
    ],
)
def test_what_takes_the_cut_of_each_step_has_it(change: dict[str, Any], thins: bool) -> None:
    pace = CutPace.of(fake_recipe(**change), lambda _: None)
    for _ in range(4):
        pace.made(20.0, 10.0)
    assert (pace.every > 1) == thins
