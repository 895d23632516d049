"""Several rewards of all kinds in one list, summed by weight, in a service and in a whole run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.example_servers import EXAMPLES, INFERENCE_PROTO, OUTSIDER, compile_protos, script
from support.example_servers import ROOT as REPOSITORY
from support.learning_runs import service_processes
from support.mesh_runs import remove_cuts, tiny_model, tiny_recipe
from support.reward_calls import RewardClient, result_of
from support.services import operation_key, serving
from support.tiny_models import write_tiny_classifier
from support.worker_processes import worker_processes

from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState
from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.errors import RolemeshError
from rolemesh.services.reward.servicers import RewardRole
from rolemesh.v1 import reward_pb2, reward_pb2_grpc

ACCURACY = f"python:{EXAMPLES / 'reward_function_trl.py'}:accuracy"
USERS = Path(__file__).parents[1] / "support" / "trl_rewards.py"
SUM_TOLERANCE = 1e-6
"""Sums of a few float32 of size 1 to 10, made in float64."""

TRAJECTORIES = reward_pb2.TrajectoryBatch(
    trajectories=[
        reward_pb2.Trajectory(prompt="1+1=", completion="2", answer="2", prompt_tokens=[1]),
        reward_pb2.Trajectory(prompt="1+2=", completion="it is 33", answer="3", prompt_tokens=[1]),
    ]
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The outsider's servers and the examples, each a process."""
    folder = tmp_path_factory.mktemp("protos")
    (folder / "inference.proto").write_text(INFERENCE_PROTO)
    reward = compile_protos(REPOSITORY / "protos", folder / "reward.binpb")
    inference = compile_protos(folder, folder / "inference.binpb")
    with ExitStack() as stack:
        yield {
            "length": stack.enter_context(script(OUTSIDER, str(reward), "reward", "")),
            "inference": stack.enter_context(script(OUTSIDER, str(inference), "inference", "")),
            "exact": stack.enter_context(script(EXAMPLES / "reward_server.py", "0")),
            "openrlhf": stack.enter_context(script(EXAMPLES / "reward_http_openrlhf.py", "0")),
        }


async def rewards_of(source: Any, *, step: int = 1) -> tuple[list[float], dict[str, float]]:
    """What a service with this reward says of TRAJECTORIES."""
    async with serving(RewardRole()) as service, open_channel(service.runtime.address) as channel:
        await RewardClient(channel).initialize({"source": source})
        request = reward_pb2.ComputeRewardRequest(
            key=operation_key("judge", step=step), trajectories=TRAJECTORIES
        )
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        answer = await result_of(stub.ComputeReward(request))
        return list(answer.rewards), dict(answer.metrics)


async def test_a_classifier_is_a_member_of_a_list(tmp_path: Path, servers: dict[str, str]) -> None:
    folder = write_tiny_classifier(tmp_path / "classifier")
    classifier = {
        "type": "classifier",
        "model": {"path": str(folder), "compute_dtype": "float32"},
    }
    alone, _ = await rewards_of(classifier)
    assert alone[0] != alone[1]
    members = [
        {"source": classifier, "weight": 2.0},
        {"source": servers["exact"], "weight": 10.0},
        {"source": ACCURACY, "weight": -1.0},
    ]
    together, _ = await rewards_of({"type": "weighted_sum", "rewards": members})
    assert together == pytest.approx([2 * alone[0] + 10 - 1, 2 * alone[1]], abs=10 * SUM_TOLERANCE)


async def test_a_function_knows_the_step_of_the_run() -> None:
    function = {"type": "python", "function": f"{USERS}:reporting"}
    rewards, _ = await rewards_of(function, step=7)
    assert rewards == [7.0 + 1, 7.0 + 8]


async def test_a_function_that_cannot_be_imported_fails_initialize_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module\n")
    async with serving(RewardRole()) as service, open_channel(service.runtime.address) as channel:
        client = RewardClient(channel)
        sources = [ACCURACY, f"python:{broken}:f"]
        with pytest.raises(RolemeshError, match="No module named 'no_such_module'"):
            await client.initialize({"source": {"type": "weighted_sum", "rewards": sources}})
        assert worker_processes() == []
        # The service is as fit as before.
        await client.initialize({"source": ACCURACY})
    assert worker_processes() == []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    roles = ("actor", "reward")
    with service_processes(tmp_path_factory.mktemp("services"), roles) as started:
        yield started


def grpo_run(
    model: Path, addresses: dict[str, str], directory: Path, reward: Any
) -> tuple[TrainingRun, Path]:
    """A run of two steps of 8 rows, and the file of its metrics."""
    recipe = tiny_recipe(
        model,
        algorithm={
            "type": "grpo",
            "sampling": {"samples_per_prompt": 2, "max_new_tokens": 6},
            "mini_batch_rows": 8,
        },
        reward=reward,
        services={role: {"address": address} for role, address in addresses.items()},
        store={"type": "memory"},
        run__evaluation={"num_prompts": 0},
    )
    for role in ("critic", "reference"):
        del recipe[role]
    run = TrainingRun(
        Recipe.model_validate(recipe),
        directory=directory,
        addresses=addresses,
        store=MemoryStateStore(),
    )
    return run, directory / "metrics.jsonl"


async def test_one_run_learns_from_every_kind_of_reward_at_once(
    model: Path, addresses: dict[str, str], servers: dict[str, str], tmp_path: Path
) -> None:
    inference = {"type": "kserve", "urls": servers["inference"], "model": "judge"}
    weights = {
        "length": 0.5,
        "exact": 1.0,
        "openrlhf": 2.0,
        "inference": -0.25,
        "accuracy": 3.0,
        "tokens": 0.125,
        "arithmetic": 1.0,
    }
    sources = {
        **servers,
        "inference": inference,
        "accuracy": ACCURACY,
        "tokens": f"python:{USERS}:num_tokens",
        "arithmetic": {"type": "arithmetic"},
    }
    reward = [
        {"source": source, "weight": weights[name], "name": name}
        for name, source in sources.items()
    ]
    run, metrics = grpo_run(model, addresses, tmp_path, reward)
    assert (await run.execute()).state is RunState.SUCCEEDED
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        total = sum(weight * line[f"reward/{name}/mean"] for name, weight in weights.items())
        assert line["reward/mean"] == pytest.approx(total, abs=10 * SUM_TOLERANCE)
        # Two servers of other makes and protocols count the letters of the same completions.
        assert line["reward/length/mean"] == line["reward/inference/mean"] > 0
        assert line["reward/accuracy/answered"] == 1.0
        # A policy that is cut at 6 tokens has at most these.
        assert 0 < line["reward/tokens/mean"] <= 6
        assert line["reward/exact/errors"] == 0


async def test_a_function_that_raises_ends_the_run_with_the_users_own_traceback(
    model: Path, addresses: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(
        "def f(completions, trainer_state, **kwargs):\n"
        "    if trainer_state.global_step == 2:\n"
        "        raise LookupError('nothing for step 2')\n"
        "    return [0.0] * len(completions)\n"
    )
    run, metrics = grpo_run(model, addresses, tmp_path / "run", f"python:{file}:f")
    try:
        with pytest.raises(RunError) as failed:
            await run.execute()
    finally:
        remove_cuts(run.run_id)
    text = str(failed.value)
    assert "LookupError: nothing for step 2" in text
    assert 'rewards.py", line 3, in f' in text
    assert len(metrics.read_text().splitlines()) == 1
