"""What is told of lost services, and how long a run waits for them."""

from __future__ import annotations

import pytest
from support.fake_recipes import fake_recipe

from rolemesh.coordinator.dataflow.observer import QuietObserver
from rolemesh.coordinator.run.services.lost_services import MEET_AGAIN_DEADLINE_S, LostServices


async def restart(service: str) -> str:
    raise AssertionError


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["actor"], "; actor is started again"),
        (["critic", "actor"], "; actor, critic are started again"),
        (["actor", "reward"], "; actor is started again; reward is waited for"),
    ],
)
def test_one_service_is_and_several_are_started_again(names: list[str], told: str) -> None:
    recipe = fake_recipe(services={"reward": {"address": "127.0.0.1:1"}})
    lost = LostServices(recipe, {}, restart, QuietObserver(), 1.0)
    lost.names = dict.fromkeys(names, "was killed")
    assert lost.told() == told


START_S = 90.0
"""Longest wait for the first answer of a new process."""


async def test_a_process_that_was_started_and_not_met_is_given_the_time_of_a_start() -> None:
    addresses = {"actor": "127.0.0.1:1", "reward": "127.0.0.1:2"}

    async def again(service: str) -> str:
        return "127.0.0.1:3"

    lost = LostServices(fake_recipe(), addresses, again, QuietObserver(), START_S)
    assert lost.deadlines_s(addresses, is_first=True) == {"actor": START_S, "reward": START_S}
    # The run has begun.
    lost.new.clear()
    lost.names["reward"] = "reward was killed"
    assert await lost.start_one("reward") == ("127.0.0.1:3", START_S)
    # Its replacement is given up.
    assert lost.deadlines_s(addresses, is_first=False) == {
        "actor": MEET_AGAIN_DEADLINE_S,
        "reward": START_S,
    }
