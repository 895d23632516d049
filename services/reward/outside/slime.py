"""slime's remote reward form (0.3, `--rm-type remote_rm`)."""

from __future__ import annotations

from collections.abc import Sequence

from rolemesh.engine.specs import SlimeRewardSpec
from rolemesh.services.reward.outside.base import (
    Judgement,
    RewardAnswerInvalidError,
    RewardClient,
    RewardRow,
    checked_rewards,
    shown,
)
from rolemesh.services.reward.outside.http import JsonEndpoint, encoded


class SlimeClient(RewardClient):
    """POST {"prompt", "response", "label"} of one row -> a number, or a mapping that has it."""

    def __init__(self, url: str, spec: SlimeRewardSpec) -> None:
        self.endpoint = url
        self._spec = spec
        self._http = JsonEndpoint(url, spec)

    async def ask(self, rows: Sequence[RewardRow]) -> Judgement:
        """See `RewardClient.ask`; of one row."""
        (row,) = rows
        answer, _ = await self._http.post(self.sent(row))
        key = self._spec.reward_key
        if key is not None:
            if not isinstance(answer, dict) or key not in answer:
                raise self._invalid(f"a mapping with {key!r}, the reward_key", shown(answer))
            answer = answer[key]
        elif isinstance(answer, dict):
            raise self._invalid("a number, since reward_key is not given", shown(answer))
        return Judgement(
            rewards=checked_rewards(
                [answer], 1, self.endpoint, minimum=self._spec.minimum, maximum=self._spec.maximum
            )
        )

    def sent(self, row: RewardRow) -> bytes:
        """See `RewardClient.sent`."""
        return encoded(
            {"prompt": row.prompt, "response": row.completion, "label": row.answer or None}
        )

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.close()

    def _invalid(self, expected: str, found: str) -> RewardAnswerInvalidError:
        return RewardAnswerInvalidError(
            self.endpoint,
            expected=expected,
            found=found,
            remedy="give reward_key the name under which the reward stands, or leave it out",
        )
