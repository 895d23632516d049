"""A real NaN: a learning rate that no model survives, in real processes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.mesh_runs import CliRun, tiny_model, tiny_recipe
from support.rollout_services import Caller, rows_of
from support.run_results import learnt
from support.services import operation_key, serving

from rolemesh.services.actor.servicers import ActorRole
from rolemesh.v1 import rollout_pb2, rollout_pb2_grpc

END_S = 240
STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def recipe_of(model, **health):
    return tiny_recipe(
        model,
        run__steps=STEPS,
        run__evaluation={"num_prompts": 0},
        run__health=health,
        actor__optimizer={"learning_rate": 1e30},
    )


def ended(recipe, folder, code):
    run = CliRun(recipe, folder)
    try:
        assert run.wait(END_S) == code, run.output
        return run, json.loads((run.out / "summary.json").read_text())
    finally:
        run.close()


def weights_of(folder: Path):
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


@pytest.mark.slow
def test_steps_of_a_real_nan_are_skipped_and_leave_the_model_as_it_was(model, tmp_path):
    run, summary = ended(recipe_of(model, not_finite={"do": "skip"}), tmp_path, 0)
    assert (summary["state"], summary["steps"]) == ("succeeded", STEPS)
    records = learnt(run.out)
    assert [record["health/skipped"] for record in records] == [1.0] * STEPS
    assert [record["health/not_finite"] for record in records] == [1.0] * STEPS
    # Other prompts each time, so other lengths or rewards.
    assert len({json.dumps({**record, "step": 0}, sort_keys=True) for record in records}) > 1
    before, after = weights_of(model), weights_of(run.out / "model")
    assert after.keys() <= before.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name].to(tensor.dtype)), name
    assert run.stdout.count("run.health.not_finite struck") == STEPS


@pytest.mark.slow
def test_a_real_nan_that_comes_again_ends_a_run_that_goes_back(model, tmp_path):
    recipe = recipe_of(model, not_finite={"do": "roll_back"}, most_roll_backs=2)
    run, summary = ended(recipe, tmp_path, 1)
    assert summary["state"] == "failed"
    assert "it has gone back 2 times (run.health.most_roll_backs)" in summary["failure"]
    assert run.stdout.count("the run goes back to step 0, and samples anew") == 2


async def test_a_service_draws_by_the_lineage_of_the_key(model):
    sampling = rollout_pb2.Sampling(
        samples_per_prompt=2, temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=12
    )

    async def draw(caller, sequence, **lineage):
        key = operation_key("generate", step=3, sequence=sequence)
        key.MergeFrom(type(key)(**lineage))
        request = rollout_pb2.GenerateRequest(
            key=key,
            prompts=rollout_pb2.PromptSlice(split=rollout_pb2.SPLIT_TRAIN, count=4),
            sampling=sampling,
        )
        async for message in rollout_pb2_grpc.RolloutServiceStub(caller.channel).Generate(request):
            result = message.result
        return (await rows_of(result.experience))["completion_text"].strings()

    async with serving(ActorRole()) as server:
        caller = Caller(server.runtime.address)
        await caller.initialize(
            model={"path": str(model), "compute_dtype": "float32"},
            optimizer={"learning_rate": 1e-2},
            rollout={"type": "hf", "max_model_len": 256, "max_num_seqs": 16},
        )
        first, again = await draw(caller, 0), await draw(caller, 1, lineage=0)
        other, same = await draw(caller, 2, lineage=1), await draw(caller, 3, lineage=1)
        await caller.channel.close()
    assert first == again
    assert other == same
    assert all(one != another for one, another in zip(first, other, strict=True))
