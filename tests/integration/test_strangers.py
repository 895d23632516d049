"""What a stranger who reaches a service may not do with it: run code, leave its folders.

The caller of these tests has no credential, as whoever reaches the port of a service without one.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.learning_runs import service_processes
from support.mesh_runs import CliRun, tiny_model, tiny_recipe
from support.reward_calls import RewardClient, result_of, trained, write_pairs
from support.services import operation_key, serving
from support.tiny_models import write_tiny_llama

from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import (
    DataLossError,
    ForbiddenError,
    RolemeshError,
)
from rolemesh.services.reward.servicers import RewardRole
from rolemesh.v1 import reward_pb2, reward_pb2_grpc, worker_pb2, worker_pb2_grpc

RUN_S = 300.0
"""Longest a tiny run may take on a busy machine."""

MINE = """
from subprocess import getoutput

def judge(completions, cmd, **columns):
    return [float(len(text)) for text in cmd]
"""


async def judged(channel: MeshChannel, sequence: int, completion: str = "2", **row: Any) -> Any:
    """Rewards of one row that is sent along."""
    row_json = json.dumps(row)
    rows = [reward_pb2.Trajectory(prompt="1+1=", completion=completion, metadata_json=row_json)]
    request = reward_pb2.ComputeRewardRequest(
        key=operation_key("judge", sequence=sequence),
        trajectories=reward_pb2.TrajectoryBatch(trajectories=rows),
    )
    return await result_of(reward_pb2_grpc.RewardServiceStub(channel).ComputeReward(request))


async def test_a_stranger_runs_no_command_on_the_host_of_a_reward(tmp_path: Path) -> None:
    """Drain, Initialize with a function that takes a command, a row with a column of its name."""
    (tmp_path / "mine.py").write_text(MINE)
    planted = tmp_path / "planted"
    command = f"touch {planted}"
    own = {"source": f"python:{tmp_path}/mine.py:judge"}
    with service_processes(tmp_path, ("reward",), "--code-root", str(tmp_path)) as addresses:
        async with open_channel(addresses["reward"]) as channel:
            client = RewardClient(channel)
            await client.initialize(own)
            assert (await judged(channel, 1, cmd=command)).rewards == [len(command)]
            drain = worker_pb2.DrainRequest()
            await worker_pb2_grpc.WorkerServiceStub(channel).Drain(drain, timeout=30)
            for number, name in enumerate(
                ("subprocess:getoutput", f"{tmp_path}/mine.py:getoutput", "os:system"), start=2
            ):
                function = {"type": "python", "function": name, "form": "trl"}
                with pytest.raises(ForbiddenError) as refused:
                    await client.initialize({"source": function})
                assert refused.value.reason == "NOT_GRANTED"
                for part in ("reward.source.function", repr(name), "--code-"):
                    assert part in refused.value.message
                with pytest.raises(RolemeshError):
                    await judged(channel, number, cmd=command)
            # Unharmed: its owner's function judges on.
            await client.initialize(own)
            assert (await judged(channel, 9, cmd=command)).rewards == [len(command)]
    assert not planted.exists()


def test_a_run_s_own_services_use_what_its_recipe_names_without_a_flag(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def judge(completions, **columns):\n    return [1.0 for _ in completions]\n"
    )
    recipe = tiny_recipe(
        tiny_model(tmp_path / "model"),
        run__steps=1,
        run__evaluation__num_prompts=0,
        reward__source=f"python:{tmp_path}/mine.py:judge",
    )
    # What the services of others may use on this host is not what those of a run may.
    nothing = {f"ROLEMESH_SERVICE__{name}": "" for name in ("FOLDERS", "CODE_ROOTS")}
    run = CliRun(recipe, tmp_path, variables=nothing)
    try:
        assert run.wait(RUN_S) == 0, run.output
    finally:
        run.close()
    assert (tmp_path / "run" / "model" / "rolemesh-export.json").is_file()


async def test_a_stranger_runs_no_code_through_a_scorer_of_the_library(tmp_path: Path) -> None:
    """Some evaluate the completion, others a text of the row: both come from the caller."""
    code = f"open({str(tmp_path / 'planted')!r}, 'w')"
    queens = {"source_dataset": "n_queens", "valid_answers": []}
    bits = {"source_dataset": "bitwise_arithmetic", "problem": code}
    async with serving(RewardRole()) as server, open_channel(server.runtime.address) as channel:
        await RewardClient(channel).initialize({"source": {"type": "reasoning_gym"}})
        assert (await judged(channel, 1, f"[{code}]", metadata=queens)).rewards == [0.0]
        with pytest.raises(RolemeshError, match="as the task made it"):
            await judged(channel, 2, "1", metadata=bits)
    assert not (tmp_path / "planted").exists()


# --- folders ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), seed=4)


@asynccontextmanager
async def client_in(*folders: Path) -> AsyncIterator[RewardClient]:
    """Of a reward whose owner granted these folders."""
    async with (
        serving(RewardRole(), folders=folders) as server,
        open_channel(server.runtime.address) as channel,
    ):
        yield RewardClient(channel)


async def test_models_and_data_are_read_in_granted_folders_alone(
    llama: Path, tmp_path: Path
) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    async with client_in(llama) as reward:
        with pytest.raises(ForbiddenError, match=r"reward\.data\.path is .*pairs.jsonl"):
            await reward.initialize(trained(llama, pairs))
    async with client_in(tmp_path) as reward:
        with pytest.raises(ForbiddenError, match=r"reward\.source\.model\.path is"):
            await reward.initialize(trained(llama, pairs))
    async with client_in(tmp_path, llama) as reward:
        await reward.initialize(trained(llama, pairs))


async def test_state_is_written_and_read_in_granted_folders_alone(
    llama: Path, tmp_path: Path
) -> None:
    data, runs, outside = (tmp_path / name for name in ("data", "runs", "outside"))
    for folder in (data, runs, outside):
        folder.mkdir()
    (runs / "link").symlink_to(outside)
    async with client_in(llama, data, runs) as reward:
        await reward.initialize(trained(llama, write_pairs(data / "pairs.jsonl")))
        client = reward._client
        for directory in (outside / "new", runs / "../outside/new", runs / "link/new", runs):
            for call in (client.export, client.save_checkpoint):
                with pytest.raises(ForbiddenError, match="directory is") as refused:
                    await call(reward.key(), str(directory))
                assert refused.value.reason == "NOT_GRANTED"
        assert [*outside.iterdir()] == []
        await client.save_checkpoint(reward.key(), str(runs / "state"))
        (runs / "state").rename(outside / "state")
        for directory in (outside / "state", runs / "../outside/state", runs / "link/state"):
            with pytest.raises(ForbiddenError, match="directory is"):
                await client.load_checkpoint(reward.key(), str(directory))
        (outside / "state").rename(runs / "state")
        await client.load_checkpoint(reward.key(), str(runs / "state"))
        # A file of the checkpoint that is a link out of it is none of the checkpoint.
        state = runs / "state" / "state.json"
        state.rename(outside / "state.json")
        state.symlink_to(outside / "state.json")
        with pytest.raises(DataLossError, match="leads out of the folder"):
            await client.load_checkpoint(reward.key(), str(runs / "state"))
