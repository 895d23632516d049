"""What is told of lost services."""

from __future__ import annotations

import pytest
from support.fake_recipes import fake_recipe

from rolemesh.coordinator.dataflow.observer import QuietObserver
from rolemesh.coordinator.run.lost_services import LostServices


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
