"""Rewards of servers over HTTP that are asked without pauses between tries, and rows for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from support.fake_rewards import row

from rolemesh.engine.sandbox.host import find_sandbox
from rolemesh.engine.specs import RewardSpec
from rolemesh.services.reward.outside.base import RewardRow
from rolemesh.services.reward.outside.make import make_outside_reward

NO_SANDBOX = find_sandbox("off")
"""For rewards that run no function."""
ROWS = [row("abc", answer="3"), row("aab", answer=""), row("", prompt="q")]
SCORES = [3.0, 2.0, 0.0]


async def no_wait(seconds: float) -> None:
    """A sleep that only lets others go on."""
    await asyncio.sleep(0)


def made(urls: str | Sequence[str], **given: Any) -> Any:
    """The reward of a spec: of OpenRLHF's form, unless `given` has another type."""
    source = {"type": "openrlhf", "urls": urls, **given}
    reward: Any = make_outside_reward(
        "r", RewardSpec.model_validate({"source": source}).source, NO_SANDBOX
    )
    reward._sleep = no_wait
    return reward


async def judged(urls: str | Sequence[str], rows: Sequence[RewardRow] = ROWS, **given: Any) -> Any:
    """What a new reward says of the rows."""
    reward = made(urls, **given)
    try:
        return await reward.judge(rows)
    finally:
        await reward.close()
