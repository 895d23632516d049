"""Runs whose generations come in blocks, over gRPC: what overlaps, and what stays the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.fake_models import expected_weight
from support.fake_recipes import GRPO, PPO, PPO_ROLES, fake_recipe, split_pools
from support.fake_roles import FakeMesh, fake_mesh, until
from support.fake_runs import Recorder, make_run, read_lines

from rolemesh.coordinator.dataflow.errors import NodeFailedError, RunError
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.rpc.errors import PreconditionError

BLOCKS = {"type": "sync", "block_rows": 2}
NO_EVALUATION: dict[str, Any] = {"steps": 1, "evaluation": {"num_prompts": 0}}
JUDGES = {
    "critic": "ComputeValues",
    "reference": "ComputeLogprobs",
    "reward": "ComputeReward",
}


async def test_roles_work_on_a_block_while_the_others_still_decode(tmp_path: Path) -> None:
    async with fake_mesh() as mesh:
        gates = {index: asyncio.Event() for index in range(3)}
        mesh.roles["actor"].block_gates = gates
        recipe = fake_recipe(sampler=BLOCKS, pools=split_pools(PPO_ROLES), **NO_EVALUATION)
        task = asyncio.create_task(make_run(mesh, tmp_path, recipe, MemoryStateStore()).execute())
        for number, gate in enumerate(gates.values(), start=1):
            gate.set()
            # All three have judged this block, and generation still runs.
            await until(
                lambda: all(
                    sum(call.state == "done" for call in mesh.of(f"{r}.{m}")) == number  # noqa: B023
                    for r, m in JUDGES.items()
                )
            )
            assert mesh.of("actor.ComputeAdvantages") == [] or number == 3
        await task
        assert mesh.roles["actor"].weight == expected_weight(1)
    log = mesh.log
    assert log.index("reward.ComputeReward begins") < log.index("actor.Generate sends block 1")
    nodes = read_lines(tmp_path / "dataflow.jsonl")[0]["nodes"]
    blocks = [(n["role"], n["block"]) for n in nodes if n["block"] is not None]
    assert sorted(blocks) == [(role, block) for role in sorted(JUDGES) for block in range(3)]
    (generated,) = [n for n in nodes if n["method"] == "generate"]
    first = next(n for n in nodes if (n["role"], n["block"]) == ("reward", 0))
    assert first["ended_at"] < generated["ended_at"]
    (record,) = read_lines(tmp_path / "metrics.jsonl")
    assert record["tokens"] == 6 * 12


@pytest.mark.parametrize("order", [[2, 0, 1], [1, 2, 0], [0, 1, 2]], ids=str)
async def test_updates_get_all_rows_in_their_order_whatever_block_is_first(
    order: list[int], tmp_path: Path
) -> None:
    async with fake_mesh(block_order=lambda number: order[:number]) as mesh:
        recipe = fake_recipe(sampler=BLOCKS, pools=split_pools(PPO_ROLES), **NO_EVALUATION)
        await make_run(mesh, tmp_path, recipe, MemoryStateStore()).execute()
        for name in ("actor.Update", "critic.Update", "actor.ComputeAdvantages"):
            (call,) = mesh.of(name)
            experience = call.request.experience  # type: ignore[attr-defined]
            assert mesh.values(experience, "prompt_ids") == [0, 0, 1, 1, 2, 2]
            assert mesh.values(experience, "sample_indexes") == [0, 1] * 3
            # What judges answered lies beside the row that it is about.
            numbers = mesh.values(experience, "tokens")
            if name == "actor.ComputeAdvantages":
                rewards = mesh.values(experience, "rewards")
                assert rewards == [1 - abs(1 - number) for number in numbers]


async def test_an_estimator_waits_for_the_whole_batch(tmp_path: Path) -> None:
    async with fake_mesh(("actor", "reward")) as mesh:
        recipe = fake_recipe(
            roles=("actor", "reward"), algorithm=GRPO, sampler=BLOCKS,
            pools=split_pools(("actor", "reward")), **NO_EVALUATION,
        )  # fmt: skip
        await make_run(mesh, tmp_path, recipe, MemoryStateStore()).execute()
        assert len(mesh.of("reward.ComputeReward")) == 3
        (estimate,) = mesh.of("actor.ComputeAdvantages")
        assert estimate.request.experience.num_rows == 6  # type: ignore[attr-defined]


def asked(mesh: FakeMesh) -> list[tuple[Any, ...]]:
    """Every call with its key and the rows that it was given."""
    calls = []
    for call in mesh.calls:
        request: Any = call.request
        experience = getattr(request, "experience", None)
        shards = [] if experience is None else [
            (shard.experience_id, shard.row_start, shard.num_rows)
            for group in experience.groups
            for shard in group.shards
        ]  # fmt: skip
        calls.append((call.name, call.key[1:], shards))
    return sorted(calls)


async def test_placement_changes_no_call(tmp_path: Path) -> None:
    pools = {
        "split": split_pools(PPO_ROLES),
        "shared": {"all": {"roles": PPO_ROLES}},
        "mixed": {"a": {"roles": ["actor", "reward"]}, "b": {"roles": ["critic", "reference"]}},
        "asleep": {"all": {"roles": PPO_ROLES, "sleep": "always"}},
    }
    calls, weights, logs = {}, {}, {}
    for name, placed in pools.items():
        async with fake_mesh(block_order=lambda number: list(range(number))[::-1]) as mesh:
            recipe = fake_recipe(sampler=BLOCKS, pools=placed, steps=2)
            await make_run(mesh, tmp_path / name, recipe, MemoryStateStore()).execute()
            calls[name], logs[name] = asked(mesh), mesh.log
            weights[name] = {r: (f.weight, f.policy_version) for r, f in mesh.roles.items()}
    assert calls["split"] == calls["shared"] == calls["mixed"] == calls["asleep"]
    assert weights["split"] == weights["shared"] == weights["mixed"] == weights["asleep"]
    for name in ("shared", "asleep"):
        # Nothing else is done in the pool while the actor decodes.
        log = [event for event in logs[name] if not event.endswith((".Sleep", ".Wake"))]
        for place, event in enumerate(log):
            if event.startswith("actor.Generate sends"):
                assert log[place + 1].startswith("actor.Generate")


async def test_a_group_that_never_completes_ends_the_run_with_a_clear_error(
    tmp_path: Path,
) -> None:
    recorder = Recorder()
    async with fake_mesh(withheld_blocks=frozenset([1])) as mesh:
        recipe = fake_recipe(sampler=BLOCKS, pools=split_pools(PPO_ROLES), **NO_EVALUATION)
        run = make_run(mesh, tmp_path, recipe, MemoryStateStore(), observer=recorder)
        with pytest.raises(RunError) as failed:
            await run.execute()
        assert mesh.of("actor.Update") == []
    assert str(failed.value) == (
        "step 1: actor.generate ended, but block 1 of 3 (1 such blocks) never came: a group of it "
        "is not whole; see the log of the actor"
    )


@pytest.mark.parametrize("pools", [None, split_pools(PPO_ROLES)], ids=["shared", "split"])
async def test_a_reward_of_the_wrong_length_names_the_role(
    pools: dict[str, Any] | None, tmp_path: Path
) -> None:
    async with fake_mesh() as mesh:
        mesh.roles["reward"].rows_dropped = 1
        run = make_run(
            mesh, tmp_path, fake_recipe(pools=pools, **NO_EVALUATION), MemoryStateStore()
        )
        with pytest.raises(RunError) as failed:
            await run.execute()
        assert mesh.of("actor.ComputeAdvantages") == []
    assert str(failed.value) == (
        "step 1: reward.compute_reward was given 6 rows and answered with 5: the reward must "
        "answer with one value for each row"
    )


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (
            {"type": "sync"},
            "step 1: actor.generate answered with 5 trajectories, not the 6 that were asked for; "
            "see the log of the actor",
        ),
        (
            BLOCKS,
            "step 1: actor.generate sent a block 2 of 1 rows, not 2: a block holds block_rows "
            "trajectories in the order of prompts, as rollout.proto says",
        ),
    ],
    ids=["whole", "blocks"],
)
async def test_a_generation_of_the_wrong_length_is_refused(
    sampler: dict[str, Any], message: str, tmp_path: Path
) -> None:
    async with fake_mesh() as mesh:
        mesh.roles["actor"].rows_dropped = 1
        recipe = fake_recipe(sampler=sampler, **NO_EVALUATION)
        with pytest.raises(RunError) as failed:
            await make_run(mesh, tmp_path, recipe, MemoryStateStore()).execute()
        assert mesh.of("actor.Update") == []
    assert str(failed.value) == message


async def test_blocks_go_to_the_judges_of_every_call(tmp_path: Path) -> None:
    roles = (*PPO_ROLES, "rollout")
    async with fake_mesh(roles, replicas=2) as mesh:
        recipe = fake_recipe(
            roles=roles,
            algorithm=PPO,
            sampler={**BLOCKS, "batch_size": 2},
            pools=split_pools(roles),
            services={"rollout": {"replicas": 2}},
            prompts_per_step=5,
            **NO_EVALUATION,
        )
        await make_run(mesh, tmp_path, recipe, MemoryStateStore()).execute()
        # Prompts 0 and 1, 2 and 3 make two blocks each, prompt 4 alone is one.
        assert len(mesh.of("rollout.Generate")) == 3
        assert len(mesh.of("reward.ComputeReward")) == 5
        (update,) = mesh.of("actor.Update")
        rows = mesh.values(update.request.experience, "prompt_ids")  # type: ignore[attr-defined]
        assert rows == [prompt for prompt in range(5) for _ in range(2)]
    (record,) = read_lines(tmp_path / "metrics.jsonl")
    assert record["tokens"] == 10 * 12
    assert record["time/publish_weights"] >= 0
    assert record["time/weight_sync"] >= 0


async def test_a_failing_replica_is_named(tmp_path: Path) -> None:
    roles = (*PPO_ROLES, "rollout")
    async with fake_mesh(roles, replicas=2) as mesh:
        mesh.roles["rollout-1"].failures["Generate"] = PreconditionError(
            "the sampler has no weights", reason="WEIGHTS_STALE"
        )
        recipe = fake_recipe(
            roles=roles, sampler=BLOCKS, pools=split_pools(roles),
            services={"rollout": {"replicas": 2}}, **NO_EVALUATION,
        )  # fmt: skip
        with pytest.raises(NodeFailedError) as failed:
            await make_run(mesh, tmp_path, recipe, MemoryStateStore()).execute()
    assert str(failed.value) == (
        "step 1: rollout-1.generate failed on rollout rank 0 [WEIGHTS_STALE]: the sampler has no "
        "weights"
    )


async def test_a_section_without_use_is_told(tmp_path: Path) -> None:
    recorder = Recorder()
    async with fake_mesh(("actor", "reward")) as mesh:
        recipe = fake_recipe(roles=("actor", "critic", "reward"), algorithm=GRPO, **NO_EVALUATION)
        run = make_run(mesh, tmp_path, recipe, MemoryStateStore(), observer=recorder)
        await run.execute()
    assert "the recipe has a section critic, which algorithm 'grpo' does not use" in recorder.events
