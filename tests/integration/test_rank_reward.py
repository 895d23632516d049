"""A reward that learns on two ranks, each in a process of its own, against one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.layout_services import Start, layout_services
from support.reward_calls import NUM_PAIRS, RewardClient, trained, write_pairs
from support.tiny_models import write_tiny_llama

from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.errors import InvalidRequestError

STEP_TOLERANCE = 2e-5
"""Absolute, of a weight after two steps of 3e-3; see test_parallel_training."""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    with layout_services(tmp_path_factory) as begin:
        yield begin


@asynccontextmanager
async def client_of(address: str, spec: dict[str, Any]) -> AsyncIterator[RewardClient]:
    async with open_channel(address) as channel:
        client = RewardClient(channel)
        await client.initialize(spec)
        yield client


async def test_two_ranks_learn_what_one_learns(start: Start, tmp_path: Path) -> None:
    spec = trained(write_tiny_llama(tmp_path / "llama"), write_pairs(tmp_path / "pairs.jsonl"))
    found = {}
    for num_ranks in (2, 1):
        address = start("reward", f"dp={num_ranks}")
        async with client_of(address, {**spec, "layout": {"dp": num_ranks}}) as client:
            batch = await client.read()
            updated = await client.update(batch)
            judged = await client.judge(batch)
            directory = tmp_path / f"of {num_ranks}"
            await client.export(directory)
        found[num_ranks] = dict(updated.report.metrics), dict(judged.report.metrics), directory
        assert updated.policy_version == 2
        assert judged.experience.num_rows == 2 * NUM_PAIRS
    (metrics, judged_metrics, directory), (expected, expected_judged, other) = found.values()
    for name in ("loss", "preference_margin", "grad_norm"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6)
    for name, number in expected_judged.items():
        assert judged_metrics[name] == pytest.approx(number, rel=1e-2, abs=1e-4), name
    weights, expected_weights = (
        load_file(folder / "model.safetensors") for folder in (directory, other)
    )
    assert weights.keys() == expected_weights.keys()
    for name, weight in expected_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=STEP_TOLERANCE)


async def test_ranks_refuse_torn_pairs_together_and_stay_fit(start: Start, tmp_path: Path) -> None:
    spec = trained(
        write_tiny_llama(tmp_path / "llama"),
        write_pairs(tmp_path / "pairs.jsonl"),
        micro_batch_tokens=1,
    )
    # A cost is the same service under another name.
    async with client_of(start("cost", "dp=2"), {**spec, "layout": {"dp": 2}}) as client:
        batch = await client.read()
        with pytest.raises(InvalidRequestError, match="pair_ids has pair") as caught:
            await client.update(batch, rows_per_unit=1)
        assert caught.value.reason in ("PAIR_INCOMPLETE", "VALUE_INVALID")
        assert (await client.update(batch)).policy_version == 2
