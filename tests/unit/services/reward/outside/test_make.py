"""Every spec of an outside endpoint has a client."""

from __future__ import annotations

from typing import get_args

import pytest

from rolemesh.engine.specs.scores.outside_rewards import AnyOutsideRewardSpec, EndpointRewardSpec
from rolemesh.services.reward.outside.base import RewardClient
from rolemesh.services.reward.outside.make import make_client

ENDPOINTS = [one for one in get_args(AnyOutsideRewardSpec) if issubclass(one, EndpointRewardSpec)]
OTHER_FIELDS = {"openai_judge": {"model": "m", "rubric": "Right?"}, "kserve": {"model": "m"}}


@pytest.mark.parametrize("kind", ENDPOINTS)
async def test_every_endpoint_has_a_client(kind: type[EndpointRewardSpec]) -> None:
    name = kind.model_fields["type"].default
    url = f"{kind.schemes()[0]}://127.0.0.1:1/reward"
    if kind.schemes()[0] == "grpc":
        url = "grpc://127.0.0.1:1"
    client = make_client(url, kind.model_validate({"urls": [url], **OTHER_FIELDS.get(name, {})}))
    assert isinstance(client, RewardClient)
    await client.close()
