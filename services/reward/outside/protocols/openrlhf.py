"""OpenRLHF's remote reward form (0.11): the requests of its trainer, the answers of its servers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from rolemesh.engine.specs import OpenRlhfRewardSpec
from rolemesh.services.reward.outside.base import (
    Judgement,
    RewardRow,
    checked_rewards,
    shown,
)
from rolemesh.services.reward.outside.protocols.http import JsonClient, encoded

MAX_EXTRA_LOGS = 32
"""Most names in extra_logs, each of which becomes a curve of the run; more are refused."""

_METRIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


class OpenRlhfClient(JsonClient[OpenRlhfRewardSpec]):
    """POST {"query", "prompts", "labels", "images"?} -> {"rewards", "scores"?, "extra_logs"?}.

    Every field is a list with one entry for each row. OpenRLHF itself posts one row at a time, so
    its servers may answer a bare number for a list of one; this is accepted. The means of `scores`
    and `extra_logs` become metrics. `images`, which OpenRLHF does not have, is there if a row of
    the request has some: a list of data URLs for each row.
    """

    takes_images = True
    remedy = (
        "set batch_size to 1 if the server takes one row at a time; its form is in docs/rewards.md"
    )

    async def ask(self, rows: Sequence[RewardRow]) -> Judgement:
        """See `RewardClient.ask`."""
        payload: dict[str, Any] = {
            "query": [row.query for row in rows],
            "prompts": [row.prompt for row in rows],
            "labels": [row.answer or None for row in rows],
        }
        if any(row.images for row in rows):
            payload["images"] = [row.images or () for row in rows]
        answer, _ = await self._http.post(encoded(payload))
        if not isinstance(answer, dict) or "rewards" not in answer:
            raise self._invalid('a mapping with "rewards"', shown(answer))
        found = self._judged(self._listed(answer["rewards"], len(rows)), len(rows))
        return dataclasses.replace(found, metrics=self._metrics(answer, len(rows)))

    def sent(self, row: RewardRow) -> bytes:
        """See `RewardClient.sent`."""
        images = [row.images] if row.images else []
        return encoded([row.query, row.prompt, row.answer, *images])

    def _metrics(self, answer: dict[str, Any], num_rows: int) -> dict[str, float]:
        extra = answer.get("extra_logs") or {}
        if not isinstance(extra, dict) or len(extra) > MAX_EXTRA_LOGS:
            raise self._invalid(
                f'"extra_logs" with at most {MAX_EXTRA_LOGS} named lists', shown(extra)
            )
        lists = dict(extra)
        if answer.get("scores") is not None:
            lists["scores"] = answer["scores"]
        metrics = {}
        for name, values in lists.items():
            if not _METRIC.fullmatch(name):
                raise self._invalid(
                    'names in "extra_logs" of letters, digits, "_", "." and "-"', shown(name)
                )
            numbers = checked_rewards(self._listed(values, num_rows), num_rows, self.endpoint)
            metrics[name] = sum(number or 0.0 for number in numbers) / num_rows
        return metrics

    def _listed(self, values: Any, num_rows: int) -> Any:
        """Returns a bare number as a list if one row was sent."""
        is_bare = isinstance(values, int | float) and not isinstance(values, bool)
        if not is_bare:
            return values
        if num_rows > 1:
            raise self._invalid(f"a list of {num_rows} numbers", f"one number, {values}")
        return [values]
