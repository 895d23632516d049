"""A NeMo-Gym resources server, asked to verify a trajectory of one turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urljoin

from rolemesh.engine.specs import NemoGymRewardSpec
from rolemesh.services.reward.outside.base import (
    Judgement,
    OutsideRewardError,
    RewardRow,
    shown,
)
from rolemesh.services.reward.outside.protocols.http import JsonClient, encoded

FAILURE_KEY = "_ng_failure_class"
"""Key that a verifier adds to reward 0.0 if it could not judge: a failure, not a reward."""


class NemoGymClient(JsonClient[NemoGymRewardSpec]):
    """POST /verify {responses_create_params, response, fields of the data row} -> {"reward"}.

    Fields of the data row are its metadata. If they lack "answer", the row's answer is added.
    """

    takes_images = True
    remedy = "give the URL of /verify of a resources server"

    async def ask(self, rows: Sequence[RewardRow]) -> Judgement:
        """See `RewardClient.ask`; of one row."""
        (row,) = rows
        cookies: dict[str, str] = {}
        if self._spec.seeds_session:
            seed = encoded(_fields(row))
            _, cookies = await self._http.post(seed, url=urljoin(self.endpoint, "seed_session"))
        answer, _ = await self._http.post(self.sent(row), cookies=cookies)
        if not isinstance(answer, dict) or "reward" not in answer:
            raise self._invalid('a mapping with "reward"', shown(answer))
        if answer.get(FAILURE_KEY):
            raise OutsideRewardError(
                self.endpoint,
                expected="a judged row",
                found=f"{FAILURE_KEY} {shown(answer[FAILURE_KEY])}",
                remedy="look into the log of the resources server",
            )
        return Judgement(rewards=self._rewards([answer["reward"]], 1))

    def sent(self, row: RewardRow) -> bytes:
        """See `RewardClient.sent`."""
        return encoded({**_fields(row), "response": _response(row.completion)})


def _fields(row: RewardRow) -> dict[str, Any]:
    """The data row, with the request that its prompt would have been.

    Images stand in front of the text, as parts of OpenAI's Responses form.
    """
    content: Any = row.prompt
    if row.images:
        shown = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in row.images]
        content = [*shown, {"type": "input_text", "text": row.prompt}]
    params = {"input": [{"role": "user", "content": content}]}
    answer = {"answer": row.answer} if row.answer else {}
    return {"responses_create_params": params, **answer, **row.metadata}


def _response(completion: str) -> dict[str, Any]:
    """A completion as the OpenAI Response object of a policy server."""
    text = {"type": "output_text", "text": completion, "annotations": []}
    message = {
        "id": "msg_0",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [text],
    }
    return {
        "id": "resp_0",
        "object": "response",
        "created_at": 0,
        "model": "policy",
        "status": "completed",
        "output": [message],
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "tools": [],
    }
