"""The SDK's primitives against real services of a tiny model."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.learning_runs import service_processes
from support.learning_tasks import model_of, write_task
from support.tcp_proxy import TcpProxy

from rolemesh.coordinator.api.reads.logged_steps import check_step
from rolemesh.coordinator.sdk import (
    AsyncMesh,
    Auxiliary,
    ColumnData,
    Columns,
    Experience,
    Mesh,
    Prompt,
    PromptSlice,
    RetryPolicy,
    Trajectory,
    WorkerState,
)
from rolemesh.rpc.errors import (
    InvalidRequestError,
    PreconditionError,
    UnsupportedError,
)
from rolemesh.v1 import coordinator_pb2

REPOSITORY = Path(__file__).resolve().parents[2]
QUICK = RetryPolicy(budget_s=20.0, first_s=0.01, longest_s=0.05)
SAMPLING = {"samples_per_prompt": 2, "max_new_tokens": 6}

EPOCHS = 60
"""Optimizer steps of an update that lasts long enough to be cut in the middle."""

LEARNED = 0.75
"""Mean reward after the steps of the example; a policy that draws letters at will gets 0.05."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"), seed=1)


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    roles = ("actor", "critic", "reference", "reward", "rollout")
    with service_processes(tmp_path_factory.mktemp("services"), roles) as addresses:
        yield addresses


def specs(task: Path) -> dict[str, dict[str, Any]]:
    model, optimizer = model_of(task / "model"), {"learning_rate": 1e-2}
    sampling = {
        "model": model,
        "rollout": {"type": "hf", "max_model_len": 64},
        "data": {"type": "jsonl", "path": str(task / "prompts.jsonl")},
    }
    return {
        "actor": {**sampling, "optimizer": optimizer},
        "rollout": {**sampling, "model": {"path": model["path"]}},
        "critic": {"model": model, "optimizer": optimizer},
        "reference": {"model": model},
        "reward": {"source": {"type": "arithmetic"}},
    }


_RUN_NUMBERS = iter(range(1_000_000))


@pytest.fixture
async def mesh(addresses: dict[str, str], task: Path) -> AsyncIterator[AsyncMesh]:
    run_id = f"sdk-{next(_RUN_NUMBERS)}"
    async with AsyncMesh(addresses, run_id=run_id, retry=QUICK) as mesh:
        await asyncio.gather(
            *(mesh[role].initialize(spec, run_seed=3) for role, spec in specs(task).items())
        )
        yield mesh
        for role in mesh.values():
            await role.drain()


async def test_services_say_what_they_are_and_how(mesh: AsyncMesh) -> None:
    capabilities = await mesh["critic"].capabilities()
    assert capabilities.role == "critic"
    assert "rolemesh.v1.ValueService" in capabilities.services
    status = await mesh["actor"].status()
    assert (status.state, status.run_id, status.policy_version) == (
        WorkerState.READY,
        mesh.run_id,
        0,
    )
    await mesh["critic"].sleep()
    assert (await mesh["critic"].status()).state is WorkerState.ASLEEP
    await mesh["critic"].wake()
    assert (await mesh["critic"].status()).state is WorkerState.READY
    assert list(mesh) == ["actor", "critic", "reference", "reward", "rollout"]


async def test_a_stop_ends_a_completion_that_would_have_gone_on(mesh: AsyncMesh) -> None:
    actor, names = mesh["actor"], ["tokens", "prompt_lengths", "finished", "completion_text"]
    prompts = PromptSlice(start=0, count=4)
    free = await mesh.fetch(await actor.sample(prompts, **SAMPLING), names)

    def completions(columns: Columns) -> list[list[int]]:
        lengths = columns["prompt_lengths"].values.tolist()
        return [
            [int(token) for token in row[length:]]
            for row, length in zip(columns["tokens"].rows(), lengths, strict=True)
        ]

    whole = completions(free)
    token = next(row[1] for row in whole if len(row) > 2)
    text = next(one[1:2] for one in free["completion_text"].strings() if len(one) > 2)
    for stops in ({"stop_token_ids": [token]}, {"stop": [text]}):
        # The same draws, since the step is the same.
        cut = await mesh.fetch(await actor.sample(prompts, **SAMPLING, **stops), names)
        texts = cut["completion_text"].strings()
        some = False
        for number, (before, after) in enumerate(zip(whole, completions(cut), strict=True)):
            assert after == before[: len(after)]
            holds = token in after if "stop_token_ids" in stops else text in texts[number]
            if len(after) < len(before):
                some = True
                assert holds
                assert cut["finished"].values[number]
        assert some


async def test_a_client_gives_weights_and_targets_token_by_token(mesh: AsyncMesh) -> None:
    actor = mesh["actor"]
    batch = await actor.sample(PromptSlice(start=0, count=2), **SAMPLING)
    logprobs = (await mesh.fetch(batch, ["logprobs"]))["logprobs"]
    lengths = logprobs.lengths().tolist()
    ids = [np.stack([np.arange(n) % 7, np.arange(n) % 5], 1).astype(np.int32) for n in lengths]
    weights = [np.ones((n, 2), dtype=np.float32) for n in lengths]
    given = Columns(
        {
            "target_ids": ColumnData.completion(ids, np.int32),
            "token_weights": ColumnData.completion(weights),
        }
    )
    batch |= await actor.put(given)
    gradient = await actor.forward_backward(batch, {"type": "token_sum", "targets": 2})
    told = (await mesh.fetch(gradient.outputs, ["choices"]))["choices"]
    assert told.width == 2
    assert gradient.report.metrics["loss"] == pytest.approx(-float(told.values.sum()), rel=1e-5)
    numbers = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 0.0}
    with pytest.raises(InvalidRequestError, match=r"adamw\.eps is -1"):
        await actor.optim_step(learning_rate=1e-3, adamw={**numbers, "eps": -1.0})
    await actor.optim_step(learning_rate=1e-2, adamw=numbers)
    again = await actor.forward_backward(
        batch, {"type": "token_sum", "targets": 2}, without_gradients=True
    )
    assert again.report.metrics["loss"] < gradient.report.metrics["loss"]


async def test_a_whole_step_of_ppo_is_written_with_primitives(mesh: AsyncMesh) -> None:
    actor, critic = mesh["actor"], mesh["critic"]
    batch = await actor.sample(PromptSlice(start=0, count=4), **SAMPLING)
    assert (batch.num_rows, batch.run_id, batch.step) == (8, mesh.run_id, 0)
    scored = await asyncio.gather(
        mesh["reference"].compute_logprobs(batch, "reference_logprobs"),
        critic.compute_values(batch),
        actor.compute_logprobs(batch, "own_logprobs", with_entropy=True),
    )
    for part in scored:
        batch |= part
    columns = await mesh.fetch(batch, ["logprobs", "own_logprobs", "own_logprobs_entropy"])
    # One model, held twice: what was sampled is scored alike.
    np.testing.assert_allclose(
        columns["logprobs"].values, columns["own_logprobs"].values, atol=1e-4
    )
    rewards = np.linspace(0, 1, 8, dtype=np.float32)
    batch |= await actor.put(Columns({"rewards": ColumnData.row(rewards)}))
    batch |= await actor.compute_advantages(batch, "gae")
    assert batch.columns[-2:] != ()
    fetched = await mesh.fetch(batch, ["rewards", "advantages"], rows=[7, 0])
    np.testing.assert_array_equal(fetched["rewards"].values, rewards[[7, 0]])

    before = await actor.get_checksums()
    gradient = await actor.forward_backward(batch, {"type": "ppo_policy"})
    assert gradient.outputs.num_rows == 8
    assert np.isfinite(gradient.report.metrics["loss"])
    assert await actor.get_checksums() == before
    assert (await actor.optim_step(learning_rate=1e-3)).policy_version == 1
    assert (await actor.get_checksums()).by_rank != before.by_rank
    updated = await critic.update(batch, "ppo_value", epochs=2, mini_batch_rows=4)
    assert updated.policy_version == critic.policy_version == 4
    assert await mesh.release([]) == 0
    assert await mesh.release() > 0
    with pytest.raises(Exception, match="not held here"):
        await mesh.fetch(batch)


async def test_prompts_of_the_caller_are_completed_and_told_apart(mesh: AsyncMesh) -> None:
    tokens = [5, 6, 7]
    batch = await mesh["actor"].sample(
        ["say a", tokens, Prompt(text="say b", prompt_id=40, answer="b")], **SAMPLING
    )
    columns = await mesh.fetch(batch)
    assert columns["prompt_ids"].values.tolist() == [0, 0, 1, 1, 40, 40]
    assert columns["answer"].strings() == ["", "", "", "", "b", "b"]
    assert [row[:3].tolist() for row in columns["tokens"].rows()[2:4]] == [tokens] * 2
    lengths = columns["tokens"].lengths() - columns["prompt_lengths"].values
    np.testing.assert_array_equal(columns["logprobs"].lengths(), lengths)
    mesh.begin_step()
    other = await mesh["actor"].sample(["say a"], **SAMPLING)
    assert other.step == 1


async def test_data_of_the_caller_trains_and_is_selected(mesh: AsyncMesh) -> None:
    actor = mesh["actor"]
    rows = [[5, 6, 65, 66], [5, 6, 67, 68]]
    texts = await actor.put(
        Columns(
            {
                "tokens": ColumnData.sequence(rows),
                "prompt_lengths": ColumnData.row([2, 2], np.int64),
                "loss_mask": ColumnData.completion([[True] * 2] * 2, bool),
                "prompt_ids": ColumnData.row([0, 1], np.int64),
                "rewards": ColumnData.row([1.0, 1.0], np.float32),
            }
        )
    )
    alone = await actor.forward_backward(texts, "sft", without_gradients=True)
    with pytest.raises(PreconditionError, match="no gradient was accumulated"):
        await actor.optim_step()
    losses = []
    for _ in range(4):
        gradient = await actor.forward_backward(texts, "sft")
        losses.append(gradient.report.metrics["loss"])
        await actor.optim_step()
    assert losses[-1] < losses[0] == pytest.approx(alone.report.metrics["loss"])
    auxiliary = [Auxiliary(experience=texts, loss="sft", weight=0.5)]
    assert (await actor.update(texts, "sft", auxiliary=auxiliary)).policy_version == 5

    nothing = await actor.select_groups(texts, "reward_spread")
    assert (nothing.experience, nothing.num_groups) == (None, 0)
    both = Experience.concat([texts, texts])
    assert (await mesh.fetch(both, ["tokens"]))["tokens"].rows()[3].tolist() == rows[1]


async def test_a_reward_judges_references_and_what_is_sent_along(mesh: AsyncMesh) -> None:
    batch = await mesh["actor"].sample([Prompt(text="2 + 3?", answer="5")], **SAMPLING)
    judged = await mesh["reward"].compute_reward(batch, pass_at=[1])
    assert judged.columns == ("rewards",)
    assert judged.report is not None
    assert "pass@1" in judged.report.metrics
    rewards = await mesh["reward"].judge(
        [Trajectory(prompt="2 + 3?", completion=text, answer="5") for text in ("5", "6")]
    )
    assert rewards.values[0] > rewards.values[1]


async def test_weights_are_published_fetched_saved_loaded_and_exported(
    mesh: AsyncMesh, tmp_path: Path
) -> None:
    actor = mesh["actor"]
    manifest = await actor.get_manifest()
    published = await actor.publish_weights("float32")
    assert published.parameters == manifest.parameters
    name = manifest.parameters[0].name
    weights = await actor.fetch_weights(published, [name])
    assert weights[name].shape == manifest.parameters[0].shape
    everything = await actor.fetch_weights(published)
    np.testing.assert_array_equal(everything[name], weights[name])

    saved = await actor.save_state(str(tmp_path / "state"))
    assert saved.policy_version == 0
    before = await actor.get_checksums()
    batch = await actor.sample(["say a"], **SAMPLING)
    await actor.update(batch, "sft")
    assert (await actor.get_checksums()).by_rank != before.by_rank
    assert (await actor.load_state(str(tmp_path / "state"))).policy_version == 0
    assert (await actor.get_checksums()).by_rank == before.by_rank
    assert (await actor.export(str(tmp_path / "model"))).num_bytes > 0
    assert (tmp_path / "model" / "config.json").exists()


async def test_a_cut_comes_back_and_a_later_epoch_attaches(
    mesh: AsyncMesh, addresses: dict[str, str], task: Path
) -> None:
    actor = mesh["actor"]
    assert "rolemesh.v1.CutService" in (await actor.capabilities()).services
    batch = await actor.sample(["say a"], **SAMPLING)
    await actor.update(batch, "sft")
    saved = await actor.save_cut()
    assert (saved.step, saved.policy_version) == (0, 1)
    assert saved.num_bytes > 0
    before = await actor.get_checksums()
    await actor.update(batch, "sft")
    assert await actor.list_cuts() == (saved,)
    async with AsyncMesh(addresses, run_id=mesh.run_id, epoch=mesh.epoch + 1) as later:
        attached = await later["actor"].attach(specs(task)["actor"], run_seed=3)
        assert attached.policy_version == 2
        assert attached.num_parameters > 0
        with pytest.raises(PreconditionError) as fenced:
            await actor.update(batch, "sft")
        assert fenced.value.reason == "STALE_EPOCH"
        with pytest.raises(Exception, match="not held here"):
            await later.fetch(batch)
        assert await later["actor"].restore_cut(0) == saved
        assert later["actor"].policy_version == 1
        assert (await later["actor"].get_checksums()).by_rank == before.by_rank
        await later["actor"].drop_cuts()
        assert await later["actor"].list_cuts() == ()
    mesh.epoch += 2  # drained by the fixture


async def test_a_sampler_apart_samples_with_weights_that_were_published(mesh: AsyncMesh) -> None:
    actor, rollout = mesh["actor"], mesh["rollout"]
    with pytest.raises(PreconditionError) as stale:
        await rollout.sample(["say a"], **SAMPLING)
    assert stale.value.reason == "WEIGHTS_STALE"
    await actor.update(await actor.sample(["say a"], **SAMPLING), "sft")
    updated = await rollout.update_weights(await actor.publish_weights("float32"))
    assert updated.policy_version == actor.policy_version == 1
    mesh.begin_step()
    apart, own = await asyncio.gather(
        *(role.sample(["say a", "say b"], **SAMPLING) for role in (rollout, actor))
    )
    columns, expected = await mesh.fetch(apart), await mesh.fetch(own)
    np.testing.assert_array_equal(columns["tokens"].values, expected["tokens"].values)
    assert set(columns["policy_versions"].values) == {1}


async def test_what_a_service_refuses_is_one_error_with_its_reason(mesh: AsyncMesh) -> None:
    actor, batch = mesh["actor"], await mesh["actor"].sample(["say a"], **SAMPLING)
    with pytest.raises(InvalidRequestError) as missing:
        await actor.forward_backward(batch, "ppo_policy")
    assert missing.value.reason == "COLUMN_MISSING"
    with pytest.raises(InvalidRequestError) as spec:
        await actor.forward_backward(batch, {"type": "sft", "colour": 1})
    assert spec.value.reason == "SPEC_INVALID"
    with pytest.raises(PreconditionError) as version:
        await actor.update(batch, "sft", expected_policy_version=9)
    assert version.value.reason == "VERSION_MISMATCH"
    with pytest.raises(InvalidRequestError) as data:
        await actor.read(PromptSlice(start=0, count=1))
    assert data.value.reason == "DATA_INVALID"
    with pytest.raises(UnsupportedError):
        await mesh["critic"].sample(["say a"])
    with pytest.raises(UnsupportedError):
        await mesh["actor"].update_weights(await actor.publish_weights("float32"))
    for call, says in (
        (actor.read(PromptSlice(start=0, count=1), "poem"), "kind is 'poem'"),
        (actor.read(PromptSlice(start=0, count=1, split="all")), "split is 'all'"),
        (actor.get_checksums("me"), "holder is 'me'"),
        (actor.forward_backward(batch, {"clip": 1}), '"type"'),
        (actor.publish_weights("complex64"), "complex64"),
    ):
        with pytest.raises(ValueError, match=says):
            await call


async def test_a_mesh_that_came_later_takes_over(
    mesh: AsyncMesh, addresses: dict[str, str]
) -> None:
    async with AsyncMesh(addresses, run_id=mesh.run_id, epoch=mesh.epoch + 1) as later:
        await later["actor"].sample(["say a"], **SAMPLING)
        with pytest.raises(PreconditionError) as fenced:
            await mesh["actor"].sample(["say a"], **SAMPLING)
    assert fenced.value.reason == "STALE_EPOCH"
    mesh.epoch += 2  # drained by the fixture


async def test_a_step_whose_connection_is_cut_is_made_once(
    mesh: AsyncMesh, addresses: dict[str, str]
) -> None:
    batch = await mesh["actor"].sample([f"say {letter}" for letter in "abcdefgh"], **SAMPLING)
    proxy = TcpProxy(int(addresses["actor"].rpartition(":")[2]))
    await proxy.start()
    async with AsyncMesh(
        {"actor": proxy.address}, run_id=mesh.run_id, epoch=mesh.epoch + 1, retry=QUICK
    ) as cut:
        for number in (1, 2, 3):
            updating = asyncio.create_task(cut["actor"].update(batch, "sft", epochs=EPOCHS))
            await asyncio.sleep(0.1)
            assert not updating.done()
            await proxy.cut()
            await asyncio.sleep(0.05)
            await proxy.start()
            assert (await updating).policy_version == number * EPOCHS
        await proxy.cut()
    assert (await mesh["actor"].status()).policy_version == 3 * EPOCHS
    mesh.epoch += 2  # drained by the fixture


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_example_of_an_own_loop_raises_the_reward(
    addresses: dict[str, str], task: Path
) -> None:
    with Mesh({"actor": addresses["actor"]}, run_id="own-loop", step=1, retry=QUICK) as mesh:
        mesh["actor"].initialize(specs(task)["actor"], run_seed=1)
        logged: list[coordinator_pb2.LogStepRequest] = []

        async def log_step(request: coordinator_pb2.LogStepRequest) -> None:
            logged.append(request)

        mesh._mesh.logs_through(log_step)
        curve = example("own_loop").train(mesh, num_steps=40)
        mesh["actor"].drain()
    assert [step.metrics["reward/mean"] for step in logged] == curve
    for step in logged:
        check_step(1, step.step, step.metrics, step.samples)
        assert len(step.samples) == 4
    assert sum(curve[:3]) / 3 < LEARNED / 2
    assert sum(curve[-3:]) / 3 > LEARNED, curve
