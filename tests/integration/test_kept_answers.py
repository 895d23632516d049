"""Answers of outside judges over kill -9 of the reward service, and over whole runs with kills."""

from __future__ import annotations

import json
import math
import os
import signal
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.kill_plans import COORDINATOR, Kill, Phase
from support.killed_runs import killed_run, kills_of
from support.mesh_runs import CliRun, tiny_model, tiny_recipe
from support.moody_judge import MoodyJudge
from support.reward_servers import on_a_thread
from support.rollout_services import process_of
from support.run_results import learnt, written
from support.saboteur import pids_of
from support.service_calls import pulled
from support.services import operation_key, serving
from support.warm_processes import forked

from rolemesh.engine.experience import Experience
from rolemesh.engine.transport.slots.shm_directory import SHM_DIRECTORY
from rolemesh.engine.transport.slots.slot_files import NUM_LOGS, SlotOwner
from rolemesh.engine.transport.slots.slots import remove_slots
from rolemesh.rpc.calls.service_client import ServiceClient
from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.errors import UnavailableError
from rolemesh.services.reward.servicers import RewardRole
from rolemesh.services.runtime.service_server import ServiceServer
from rolemesh.v1 import experience_pb2

START_S = 240
STEP = 3
PROMPT = "say"
FAILS = 2
"""Of seven answers of the judge."""
ROWS = ("1", "22", "333", "1", "55555", "1", "7", "88", "999", "0")
"""Completions; equal ones are equal rows."""

ASKED_OF_ATTEMPT = ("errors", "retries", "hedged", "cache_hits", "queue_peak", "_seconds")
"""Ends of names of metrics that say what asking took: an answer that is known takes nothing."""


def source(judge: MoodyJudge, **changes: Any) -> dict[str, Any]:
    return {
        "type": "openrlhf",
        "urls": [judge.url + "/get_reward"],
        "batch_size": 1,
        # One after another: equal rows get their answers in one order.
        "concurrency": 1,
        "on_failure": {"type": "drop_group"},
        **changes,
    }


@pytest.fixture
def run_id() -> Iterator[str]:
    run_id = f"answers-{uuid.uuid4().hex}"
    yield run_id
    remove_slots(run_id, "reward")


def batch(service: ServiceServer, run_id: str) -> experience_pb2.ExperienceRef:
    """Rows to judge, two of each prompt, held by a service that is not killed."""
    tokens = [[1, *map(ord, text)] for text in ROWS]
    columns = {
        "tokens": tokens,
        "prompt_lengths": [1] * len(ROWS),
        "loss_mask": [[True] * (len(row) - 1) for row in tokens],
        "prompt_ids": [row // 2 for row in range(len(ROWS))],
        "prompt_text": [PROMPT] * len(ROWS),
        "completion_text": list(ROWS),
        "answer": [""] * len(ROWS),
        "metadata": [""] * len(ROWS),
    }
    key = operation_key(run_id=run_id, step=STEP)
    return service.runtime.publish(key, Experience.of_rows(columns))


class Judging:
    """A coordinator of one epoch that has rows judged."""

    def __init__(self, address: str, run_id: str, epoch: int) -> None:
        self.channel = open_channel(address)
        self.client = ServiceClient(self.channel)
        self._run_id = run_id
        self._epoch = epoch

    def key(self, operation: str, step: int = STEP) -> Any:
        return operation_key(operation, run_id=self._run_id, epoch=self._epoch, step=step)

    async def initialize(self, spec: dict[str, Any]) -> None:
        await self.channel.channel_ready()
        await self.client.initialize(self.key("reward.initialize"), spec, 3)

    async def judge(self, rows: experience_pb2.ExperienceRef, step: int = STEP) -> Any:
        return await self.client.compute_reward(self.key("reward.compute_reward", step), rows)


@asynccontextmanager
async def judging(
    address: str, run_id: str, epoch: int, spec: dict[str, Any]
) -> AsyncIterator[Judging]:
    caller = Judging(address, run_id, epoch)
    async with caller.channel:
        await caller.initialize(spec)
        yield caller


def told(report: Any) -> dict[str, float]:
    """The metrics of a report, without what asking took."""
    found = dict(report.metrics)
    return {name: value for name, value in found.items() if not name.endswith(ASKED_OF_ATTEMPT)}


def expected_rewards() -> list[float]:
    """Of ROWS by a judge that answers each once; NaN for both rows of a prompt that lost one."""
    judge = MoodyJudge(FAILS)
    rewards = [judge.answer(PROMPT + text) for text in ROWS]
    groups = [rewards[row // 2 * 2 : row // 2 * 2 + 2] for row in range(len(ROWS))]
    given = [
        math.nan if reward is None or None in group else reward
        for reward, group in zip(rewards, groups, strict=True)
    ]
    return torch.tensor(given, dtype=torch.float32).tolist()


def new_folder(within: Path) -> Path:
    folder = within / uuid.uuid4().hex
    folder.mkdir()
    return folder


async def judged_by(
    address: str, run_id: str, epoch: int, judge: MoodyJudge, producer: ServiceServer
) -> tuple[str, dict[str, float]]:
    """The rewards of ROWS, with all their digits, and the metrics."""
    async with judging(address, run_id, epoch, {"source": source(judge)}) as caller:
        found = await caller.judge(batch(producer, run_id))
        columns = await pulled(producer.runtime, found.experience)
    return repr(columns["rewards"].values.tolist()), told(found.report)


async def test_a_reward_service_that_was_killed_asks_only_for_what_was_not_answered(
    run_id: str, tmp_path: Path
) -> None:
    once = Counter(PROMPT + text for text in ROWS)
    with on_a_thread(MoodyJudge(FAILS)) as judge:
        async with serving() as producer:
            with process_of("reward", new_folder(tmp_path)) as (address, process):

                def kill(number: int) -> bool:
                    if number == 6:
                        os.kill(forked(process.pid), signal.SIGKILL)
                    return number == 6

                judge.instead = kill
                with pytest.raises(UnavailableError):
                    await judged_by(address, run_id, 1, judge, producer)
                process.wait(30)
            assert judge.answered.total() == 5
            results = []
            for epoch in (2, 3):
                with process_of("reward", new_folder(tmp_path)) as (address, _):
                    results.append(await judged_by(address, run_id, epoch, judge, producer))
                # All rows but that of the request which died with the process.
                assert judge.asked == len(ROWS) + 1
                assert judge.answered == once
            assert results[0] == results[1]
            assert results[0][0] == repr(expected_rewards())
            assert results[0][1]["reward/openrlhf/failed_rows"] > 0
            assert "reward/openrlhf/mood" in results[0][1]

            with process_of("reward", new_folder(tmp_path)) as (address, _):
                async with open_channel(address) as channel:
                    await channel.channel_ready()
                    await ServiceClient(channel).drop_cuts(run_id, 4)
                    assert logs_of(run_id) == []
                await judged_by(address, run_id, 4, judge, producer)
            assert judge.answered == once + once


async def test_services_of_one_role_know_what_the_others_were_answered(run_id: str) -> None:
    with on_a_thread(MoodyJudge(FAILS)) as judge:
        async with (
            serving() as producer,
            serving(RewardRole()) as first,
            serving(RewardRole()) as second,
        ):
            results = [
                await judged_by(one.runtime.address, run_id, epoch, judge, producer)
                for epoch, one in enumerate((first, second, first), start=1)
            ]
            assert len(logs_of(run_id)) == 2
            # The next step is one that the second service judges first.
            async with judging(
                second.runtime.address, run_id, 4, {"source": source(judge)}
            ) as caller:
                await caller.judge(batch(producer, run_id), STEP + 1)
    assert judge.asked == 2 * len(ROWS)
    assert results[0] == results[1] == results[2]


@pytest.mark.slow
async def test_each_rank_keeps_the_answers_to_its_own_rows(run_id: str, tmp_path: Path) -> None:
    with on_a_thread(MoodyJudge(FAILS)) as judge:
        async with serving() as producer:
            results = []
            for epoch in (1, 2):
                with process_of("reward", new_folder(tmp_path), "--layout", "dp=2") as (
                    address,
                    process,
                ):
                    async with judging(
                        address, run_id, epoch, {"source": source(judge), "layout": {"dp": 2}}
                    ) as caller:
                        found = await caller.judge(batch(producer, run_id))
                        columns = await pulled(producer.runtime, found.experience)
                    results.append(repr(columns["rewards"].values.tolist()))
                    assert len(logs_of(run_id)) == 2
                    os.kill(forked(process.pid), signal.SIGKILL)
                    process.wait(30)
                assert judge.asked == len(ROWS)
            assert results[0] == results[1]


def logs_of(run_id: str) -> list[str]:
    """Logs of any rank of the reward."""
    pattern = SlotOwner(run_id, "reward", 0, 1).log_path(0).name.replace("0of1-log0", "*")
    return sorted(path.name for path in SHM_DIRECTORY.glob(pattern))


async def test_a_function_that_draws_its_rewards_is_not_called_again(
    run_id: str, tmp_path: Path
) -> None:
    file = tmp_path / "drawn.py"
    file.write_text(
        "import random\n"
        "def drawn(completions, **columns):\n"
        "    return [{'score': random.random(), 'part': random.random()} for _ in completions]\n"
    )
    spec = {"source": f"python:{file}:drawn"}
    results = []
    async with serving() as producer:
        # A service that is replaced while a step goes on has the epoch of the one before.
        for epoch, step in ((1, STEP), (1, STEP), (2, STEP), (3, STEP + 1), (4, STEP)):
            if epoch == 4:
                # As at the begin of a run, whatever had its name before.
                remove_slots(run_id, "reward")
            async with (
                serving(RewardRole()) as service,
                judging(service.runtime.address, run_id, epoch, spec) as caller,
            ):
                found = await caller.judge(batch(producer, run_id), step)
                columns = await pulled(producer.runtime, found.experience)
            parts = [json.loads(text) for text in columns["rewards/parts"].strings()]
            mean = sum(one["python/part"] for one in parts) / len(parts)
            assert found.report.metrics["reward/python/part"] == pytest.approx(mean)
            results.append(repr((columns["rewards"].values.tolist(), parts)))
    assert results[0] == results[1] == results[2] != results[3]
    assert results[4] not in results[:4]


async def test_a_run_that_takes_the_place_removes_the_answers_of_the_one_before(
    run_id: str,
) -> None:
    other = f"{run_id}-other"
    try:
        with on_a_thread(MoodyJudge()) as judge:
            async with serving() as producer, serving(RewardRole()) as service:
                address = service.runtime.address
                await judged_by(address, run_id, 1, judge, producer)
                assert len(logs_of(run_id)) == 1
                async with open_channel(address) as channel:
                    await ServiceClient(channel).drain(run_id, 1)
                assert len(logs_of(run_id)) == 1
                await judged_by(address, other, 1, judge, producer)
                assert (logs_of(run_id), len(logs_of(other))) == ([], 1)
    finally:
        remove_slots(other, "reward")


async def test_a_run_goes_on_where_answers_cannot_be_kept_and_says_so_once(
    run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    owner = SlotOwner(run_id, "reward", 0, 1)
    owner.log_path(STEP % NUM_LOGS).symlink_to("/dev/null")
    try:
        with on_a_thread(MoodyJudge()) as judge:
            async with serving() as producer, serving(RewardRole()) as service:
                address = service.runtime.address
                async with judging(address, run_id, 1, {"source": source(judge)}) as caller:
                    for step in (STEP, STEP + 1):
                        await caller.judge(batch(producer, run_id), step)
        assert judge.asked == 2 * len(ROWS)
    finally:
        owner.log_path(STEP % NUM_LOGS).unlink()
    (record,) = [one for one in caplog.records if "not kept from here on" in one.getMessage()]
    assert str(owner.log_path(STEP % NUM_LOGS)) in record.getMessage()


# --- whole runs -----------------------------------------------------------------------------

STEPS = 6
UPDATE = Phase("update of the actor", "actor", "update")
PLAN = (Kill("actor", UPDATE, 0.0, 3), Kill(COORDINATOR, UPDATE, 0.0, 4))
KILLED_REQUESTS = (4 + 8 + 3, 4 + 3 * 8 + 1 + 2)
"""The third row of step 2, and the second one of the evaluation after step 3."""


def recipe_of(model: Path, judge: MoodyJudge) -> dict[str, Any]:
    recipe = tiny_recipe(
        model,
        algorithm={
            "type": "grpo",
            "sampling": {"samples_per_prompt": 2, "max_new_tokens": 6},
            "mini_batch_rows": 4,
        },
        reward={"source": source(judge)},
        services={role: {"threads": 1} for role in ("actor", "reward")},
        run__steps=STEPS,
        run__evaluation={"num_prompts": 4, "every_steps": 3},
        run__checkpoint={"every_steps": 4},
        run__recovery={"pause_s": 0.0},
    )
    for role in ("critic", "reference"):
        del recipe[role]
    return recipe


def run_id_of(run: CliRun) -> str:
    return str(json.loads((run.out / "run.json").read_text())["run_id"])


def told_of(run: CliRun) -> list[dict[str, float]]:
    return [
        {name: value for name, value in record.items() if not name.endswith(ASKED_OF_ATTEMPT)}
        for record in learnt(run.out)
    ]


@pytest.mark.slow
def test_a_run_with_a_judge_of_moods_ends_with_the_same_bits_though_processes_are_killed(
    tmp_path: Path,
) -> None:
    model = tiny_model(tmp_path / "tiny")
    with on_a_thread(MoodyJudge(1)) as judge:
        (tmp_path / "undisturbed").mkdir()
        undisturbed = CliRun(recipe_of(model, judge), tmp_path / "undisturbed")
        try:
            assert undisturbed.wait(START_S) == 0, undisturbed.output
            assert logs_of(run_id_of(undisturbed)) == []
        finally:
            undisturbed.close()
        answered, asked = judge.answered, judge.asked
        judge.forget()

        def kill(number: int) -> bool:
            if number in KILLED_REQUESTS:
                family = psutil.Process().children(recursive=True)
                (pid,) = pids_of("reward", family)
                os.kill(forked(pid), signal.SIGKILL)
            return number in KILLED_REQUESTS

        judge.instead = kill
        (tmp_path / "killed").mkdir()
        killed = killed_run(recipe_of(model, judge), tmp_path / "killed", PLAN, START_S)
        assert [kill["was_found"] for kill in kills_of(tmp_path / "killed")] == [True, True]
        # Each row was answered as often as in the run that was left alone.
        assert judge.asked == asked + len(KILLED_REQUESTS)
        assert judge.answered == answered
    records = told_of(undisturbed)
    assert told_of(killed) == records
    assert written(killed.out) == written(undisturbed.out)
    # What was compared has groups that were dropped, and others.
    dropped = [record["reward/dropped_rows"] for record in records]
    assert 0 < sum(dropped) < 8 * STEPS
    assert "recovered in" in killed.stdout
