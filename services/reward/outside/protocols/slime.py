"""slime's remote reward form (0.3, `--rm-type remote_rm`)."""

from __future__ import annotations

from collections.abc import Sequence

from rolemesh.engine.specs import SlimeRewardSpec
from rolemesh.services.reward.outside.base import (
    Judgement,
    RewardRow,
    shown,
)
from rolemesh.services.reward.outside.parts import SCORE
from rolemesh.services.reward.outside.protocols.http import JsonClient, encoded


class SlimeClient(JsonClient[SlimeRewardSpec]):
    """POST {"prompt", "response", "label"} of one row -> a number, or a mapping that has it.

    A row with images has "images" besides, a list of data URLs: no field of slime's own.
    """

    takes_images = True
    remedy = "give reward_key the name under which the reward stands, or leave it out"

    async def ask(self, rows: Sequence[RewardRow]) -> Judgement:
        """See `RewardClient.ask`; of one row."""
        (row,) = rows
        answer, _ = await self._http.post(self.sent(row))
        key = self._spec.reward_key
        if key is not None and (not isinstance(answer, dict) or key not in answer):
            raise self._invalid(f"a mapping with {key!r}, the reward_key", shown(answer))
        return self._judged([answer], 1, key or SCORE)

    def sent(self, row: RewardRow) -> bytes:
        """See `RewardClient.sent`."""
        images = {"images": row.images} if row.images else {}
        return encoded(
            {
                "prompt": row.prompt,
                "response": row.completion,
                "label": row.answer or None,
                **images,
            }
        )
