"""Runs whose rewards come from servers of other people's forms, and what their failures leave."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.learning_runs import service_processes
from support.mesh_runs import tiny_model, tiny_recipe
from support.reward_servers import RewardServer, reward_server

from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState

NUM_ROWS = 8
"""Of a step: 4 prompts of 2 completions."""

GRPO = {
    "type": "grpo",
    "sampling": {"samples_per_prompt": 2, "max_new_tokens": 6},
    "mini_batch_rows": NUM_ROWS,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    roles = ("actor", "reward")
    with service_processes(tmp_path_factory.mktemp("services"), roles) as started:
        yield started


@pytest.fixture
def server() -> Iterator[RewardServer]:
    with reward_server() as served:
        yield served


class Run:
    """A run of two steps of GRPO, and what it leaves in its folder."""

    def __init__(
        self, model: Path, addresses: dict[str, str], directory: Path, reward: Any, **changes: Any
    ) -> None:
        recipe = tiny_recipe(
            model,
            reward=reward,
            services={role: {"address": address} for role, address in addresses.items()},
            store={"type": "memory"},
            **{"algorithm": GRPO, "run__evaluation": {"num_prompts": 0}, **changes},
        )
        for role in ("critic", "reference"):
            del recipe[role]
        self.directory = directory
        self.store = MemoryStateStore()
        self.run = TrainingRun(
            Recipe.model_validate(recipe),
            directory=directory,
            addresses=addresses,
            store=self.store,
        )

    @property
    def metrics(self) -> list[dict[str, float]]:
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


async def test_an_openrlhf_server_and_a_reward_of_ours_train_together(
    model: Path, addresses: dict[str, str], server: RewardServer, tmp_path: Path
) -> None:
    source = {
        "type": "openrlhf",
        "urls": server.url + "/get_reward",
        "tokenizer": str(model),
        "batch_size": 3,
    }
    reward = [
        {"source": source, "weight": 0.5, "name": "distinct"},
        {"source": {"type": "arithmetic"}},
    ]
    run = Run(model, addresses, tmp_path, reward, run__evaluation={"num_prompts": 4})
    summary = await run.run.execute()
    assert summary.state is RunState.SUCCEEDED
    for record in run.metrics:
        assert record["reward/mean"] == pytest.approx(
            0.5 * record["reward/distinct/mean"] + record["reward/arithmetic/mean"], abs=1e-6
        )
        assert record["reward/distinct/errors"] == 0
        assert record["reward/distinct/latency_p99_seconds"] > 0
    # Each step has 3 requests of at most 3 rows; the evaluations before and after have 2 each.
    rows = [len(given["query"]) for _, given in server.requests]
    assert sum(rows) == 2 * NUM_ROWS + 2 * 4
    assert max(rows) == 3
    for _, given in server.requests:
        for query, prompt, label in zip(*given.values(), strict=True):
            assert query.startswith(prompt)
            assert int(label) is not None


async def test_a_slime_server_named_by_its_form_trains(
    model: Path, addresses: dict[str, str], server: RewardServer, tmp_path: Path
) -> None:
    reward = {"source": {"type": "slime", "urls": [server.url + "/slime"]}}
    run = Run(model, addresses, tmp_path, reward)
    assert (await run.run.execute()).state is RunState.SUCCEEDED
    assert len(server.requests) == 2 * NUM_ROWS
    assert run.metrics[-1]["reward/slime/mean"] == pytest.approx(run.metrics[-1]["reward/mean"])


async def test_an_endpoint_that_fails_ends_the_run_with_its_reason_and_the_state_intact(
    model: Path, addresses: dict[str, str], server: RewardServer, tmp_path: Path
) -> None:
    # The first step is one request; then it lies.
    server.faults = [None]
    server.always = "nan"
    run = Run(
        model,
        addresses,
        tmp_path / "run",
        server.url + "/get_reward",
        run__checkpoint={"every_steps": 1},
    )
    with pytest.raises(RunError) as failed:
        await run.run.execute()
    message = str(failed.value)
    assert message.startswith("step 2: reward.compute_reward failed on reward")
    assert "REWARD_ANSWER_INVALID" in message
    assert server.url in message
    assert "finite" in message
    record = await run.store.get_run(run.run.run_id)
    assert (record.state, record.failure) == (RunState.FAILED, message)
    assert json.loads((run.directory / "summary.json").read_text())["failure"] == message
    assert [line["step"] for line in run.metrics] == [1]
    checkpoints = sorted(path.name for path in (run.directory / "checkpoints").iterdir())
    assert len(checkpoints) == 1
    # The services are as fit as before.
    server.always = None
    again = Run(model, addresses, tmp_path / "again", server.url + "/get_reward")
    assert (await again.run.execute()).state is RunState.SUCCEEDED


ONE_BY_ONE = {"batch_size": 1, "concurrency": 1}


def dropping(server: RewardServer, path: str = "/get_reward", **more: Any) -> dict[str, Any]:
    """A source that leaves out the group of a row that it cannot judge."""
    return {
        "type": "openrlhf",
        "urls": server.url + path,
        "on_failure": {"type": "drop_group"},
        **more,
    }


async def test_a_lost_group_is_left_out_and_the_run_goes_on(
    model: Path, addresses: dict[str, str], server: RewardServer, tmp_path: Path
) -> None:
    source = dropping(server, **ONE_BY_ONE)
    # One row of eight is lied about in the first step: its prompt's two rows are left out.
    server.faults = [None, None, "nan"]
    algorithm = {**GRPO, "mini_batch_rows": 2}
    run = Run(model, addresses, tmp_path, {"source": source}, algorithm=algorithm)
    assert (await run.run.execute()).state is RunState.SUCCEEDED
    first, second = run.metrics
    # Rows that are left out fill no mini-batch: an empty one would still move weights by momentum.
    assert (first["optimizer_steps"], second["optimizer_steps"]) == (3, 4)
    assert (first["reward/dropped_rows"], second["reward/dropped_rows"]) == (2, 0)
    assert (first["groups/count"], second["groups/count"]) == (3, 4)
    assert first["reward/openrlhf/failed_rows"] == 1


async def test_a_step_of_which_nothing_is_left_fails_and_says_so(
    model: Path, addresses: dict[str, str], server: RewardServer, tmp_path: Path
) -> None:
    server.always = 404
    source = dropping(server)
    run = Run(model, addresses, tmp_path / "steps", {"source": source})
    with pytest.raises(RunError, match="nothing is left to learn from"):
        await run.run.execute()
    events = [event async for event in StoreOperations(run.store).watch_run(run.run.run_id)]
    notes = [event.note.text for event in events if event.HasField("note")]
    (told,) = [note for note in notes if note.startswith("step 1: reward openrlhf: ")]
    assert f"{NUM_ROWS} of {NUM_ROWS} rows could not be judged (drop_group)" in told
    assert "status 404" in told


async def test_an_evaluation_of_which_nothing_is_left_says_why(
    model: Path, addresses: dict[str, str], server: RewardServer, tmp_path: Path
) -> None:
    server.always = 404
    source = dropping(server)
    evaluation = {"num_prompts": 4}
    run = Run(model, addresses, tmp_path, {"source": source}, run__evaluation=evaluation)
    with pytest.raises(RunError, match=r"4 of 4 rows could not be judged.*status 404"):
        await run.run.execute()


async def test_a_stated_value_stands_for_what_failed(
    model: Path, addresses: dict[str, str], server: RewardServer, tmp_path: Path
) -> None:
    server.always = 404
    source = dropping(server, on_failure={"type": "value", "value": -2.5})
    run = Run(model, addresses, tmp_path, {"source": source})
    assert (await run.run.execute()).state is RunState.SUCCEEDED
    assert [record["reward/mean"] for record in run.metrics] == [-2.5, -2.5]
    assert run.metrics[0]["reward/openrlhf/failed_rows"] == NUM_ROWS


async def test_two_ranks_judge_whole_groups_each_and_leave_out_the_same_rows(
    model: Path,
    addresses: dict[str, str],
    server: RewardServer,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    source = dropping(server, **ONE_BY_ONE)
    server.faults = [None, None, "nan"]
    folder = tmp_path_factory.mktemp("wide")
    with service_processes(folder, ("reward",), "--layout", "dp=2") as wide:

        def judged_by(judge: dict[str, Any], name: str) -> Run:
            reward = {"source": judge, "layout": {"dp": 2}}
            return Run(model, {**addresses, **wide}, tmp_path / name, reward, run__steps=1)

        run = judged_by(source, "run")
        assert (await run.run.execute()).state is RunState.SUCCEEDED
        # What fails on one rank alone is told by all, and leaves the service as fit as before.
        server.faults = [None, None, "nan"]
        broken = judged_by({**source, "on_failure": {"type": "fail"}}, "broken")
        with pytest.raises(RunError, match=r"reward\.compute_reward failed.*a finite number"):
            await broken.run.execute()
        again = judged_by(source, "again")
        assert (await again.run.execute()).state is RunState.SUCCEEDED
    (record,) = run.metrics
    assert record["reward/dropped_rows"] == 2
    assert record["groups/count"] == 3
    # The first failure of the run in the middle ends the asking of its rank.
    assert len(server.requests) >= 2 * NUM_ROWS + 3


async def test_what_reward_or_cost_drop_is_left_out_by_actor_and_critic_alike(
    model: Path, addresses: dict[str, str], server: RewardServer, tmp_path: Path
) -> None:
    # Rows come in the order of prompts; the first prompt fails the reward, the second one the cost.
    server.faults = ["nan"] + [None] * (NUM_ROWS - 1) + [None, None, 404]
    services = tmp_path / "services"
    services.mkdir()
    with service_processes(services, ("critic", "reference", "cost")) as started:
        everybody = {**addresses, **started}
        recipe = tiny_recipe(
            model,
            run__steps=1,
            run__evaluation={"num_prompts": 0},
            algorithm={
                "type": "safe_rlhf",
                "sampling": {"samples_per_prompt": 2, "max_new_tokens": 6},
                "mini_batch_rows": 2,
            },
            reward={"source": dropping(server, **ONE_BY_ONE)},
            cost={"source": dropping(server, "/slime", type="slime", **ONE_BY_ONE)},
            services={role: {"address": address} for role, address in everybody.items()},
            store={"type": "memory"},
        )
        directory = tmp_path / "run"
        run = TrainingRun(
            Recipe.model_validate(recipe),
            directory=directory,
            addresses=everybody,
            store=MemoryStateStore(),
        )
        assert (await run.execute()).state is RunState.SUCCEEDED
    (record,) = [
        json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()
    ]
    assert record["reward/dropped_rows"] == 2
    assert record["cost/dropped_rows"] == 4
    assert record["actor/optimizer_steps"] == record["critic/optimizer_steps"] == 2
