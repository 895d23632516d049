"""Losses and estimators of the user, in a run and in a service, which loads them at its start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.learning_runs import LearnedRun, learn, service_processes
from support.learning_tasks import sampled_recipe, write_task
from support.service_calls import initialize, last, pulled
from support.services import operation_key, serving
from support.tiny_models import write_tiny_llama

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.checks.planning import plan_step
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.rpc.calls.service_client import to_algorithm_part
from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.services.actor.servicers import ActorRole
from rolemesh.v1 import trainer_pb2, trainer_pb2_grpc

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_losses.py"
OWN_LOSS = {
    "type": "python",
    "function": f"{EXAMPLE}:clipped",
    "config": {"low": 0.2, "high": 0.3},
    "aggregation": "seq_mean_token_mean",
}
OWN = {
    "type": "grpo",
    "advantages": f"python:{EXAMPLE}:group_relative",
    "policy_loss": OWN_LOSS,
}
OURS = {
    "type": "grpo",
    "policy_loss": {"clip_high": 0.3, "aggregation": "seq_mean_token_mean"},
}
STEPS = 2
WORTH = {"ABCDEFGHIJKLMNOPQRSTUVWXYZ": 1.0}


# --- a run ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with service_processes(tmp_path_factory.mktemp("services"), ("actor", "reward")) as found:
        yield found


def new(folder: Path) -> Path:
    folder.mkdir()
    return folder


async def run(algorithm: Mapping[str, Any], folder: Path, addresses: Any) -> LearnedRun:
    task = write_task(new(folder / "task"), seed=1)
    recipe = sampled_recipe(task, algorithm, seed=1, steps=STEPS, worth=WORTH)
    return await learn(recipe, addresses, folder)


async def test_a_run_with_copies_of_loss_and_estimator_is_that_with_ours_to_the_last_bit(
    addresses: dict[str, str], tmp_path: Path
) -> None:
    ours = await run(OURS, new(tmp_path / "ours"), addresses)
    own = await run(OWN, new(tmp_path / "own"), addresses)
    for name in ("reward/mean", "advantages/std", "loss", "grad_norm", "clip_fraction_low"):
        assert own.curve(name) == ours.curve(name)
    first, second = ((one.model / "model.safetensors").read_bytes() for one in (ours, own))
    assert first == second
    other = {**OWN, "policy_loss": {**OWN_LOSS, "config": {"high": 0.001}}}
    changed = await run(other, new(tmp_path / "other"), addresses)
    assert (changed.model / "model.safetensors").read_bytes() != first


async def test_a_critic_needs_returns_of_the_estimator(tmp_path: Path) -> None:
    write_task(tmp_path, seed=1)
    algorithm = {"type": "ppo", "advantages": f"python:{EXAMPLE}:group_relative"}
    values = sampled_recipe(tmp_path, algorithm, seed=1, steps=1, worth=WORTH)
    with pytest.raises(ValueError, match="'returns'"):
        await plan_step(Recipe.model_validate(values))
    estimator = {"type": "python", "function": f"{EXAMPLE}:f", "makes_returns": True}
    values["algorithm"]["advantages"] = estimator
    names = [node.name for node in await plan_step(Recipe.model_validate(values))]
    assert "actor.compute_advantages" in names


# --- a service ------------------------------------------------------------------------------


def actor_spec(folder: Path, functions: Mapping[str, Any]) -> dict[str, Any]:
    (folder / "rows.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    return {
        "model": {"path": str(folder / "model"), "compute_dtype": "float32"},
        "data": {"type": "jsonl", "path": str(folder / "rows.jsonl")},
        "own_functions": functions,
    }


@pytest.mark.parametrize(
    ("function", "config", "message"),
    [
        ("{example}:no_such", {}, r"algorithm\.policy_loss\.function is .*has no 'no_such'"),
        ("{folder}/gone.py:f", {}, r"algorithm\.policy_loss\.function is .*is no file"),
        ("{example}:clipped", {"lo": 1}, r"algorithm\.policy_loss\.config is \{'lo': 1\}"),
    ],
)
async def test_a_function_that_cannot_be_used_is_told_before_a_model_is_looked_at(
    tmp_path: Path, function: str, config: dict[str, Any], message: str
) -> None:
    named = {"function": function.format(example=EXAMPLE, folder=tmp_path), "config": config}
    spec = actor_spec(tmp_path, {"algorithm.policy_loss": named})
    # There is no model in the folder: that would be the next error.
    async with serving(ActorRole()) as server, open_channel(server.runtime.address) as channel:
        with pytest.raises(InvalidRequestError, match=message) as caught:
            await initialize(channel, **spec)
        assert caught.value.reason == "USER_CODE_INVALID"


def judged() -> Experience:
    """Two rows of one prompt."""
    mask = Column.ragged(ColumnKind.COMPLETION, [[True, True], [False, True]], torch.bool)
    rows = {"rewards": torch.tensor([1.0, 0.0]), "prompt_ids": torch.tensor([4, 4])}
    columns = {name: Column(ColumnKind.ROW, values) for name, values in rows.items()}
    return Experience({"loss_mask": mask, **columns})


async def test_calls_name_known_parts_and_code_that_was_loaded_at_the_start(
    tmp_path: Path,
) -> None:
    write_tiny_llama(tmp_path / "model", seed=4)
    loaded = {"mine": {"function": f"{EXAMPLE}:group_relative", "config": {"divide": False}}}
    async with serving(ActorRole()) as server, open_channel(server.runtime.address) as channel:
        await initialize(channel, **actor_spec(tmp_path, loaded))
        trainer = trainer_pb2_grpc.TrainerServiceStub(channel)
        batch = server.runtime.publish(operation_key("produce"), judged())

        async def estimate(sequence: int, **part: Any) -> Any:
            request = trainer_pb2.ComputeAdvantagesRequest(
                key=operation_key("estimate", sequence=sequence),
                estimator=to_algorithm_part(part),
                experience=batch,
            )
            return await last(trainer.ComputeAdvantages(request))

        async def update(**part: Any) -> Any:
            request = trainer_pb2.UpdateRequest(
                key=operation_key("update"),
                loss=to_algorithm_part(part),
                experience=batch,
                epochs=1,
                mini_batch_rows=1,
            )
            return await last(trainer.Update(request))

        result = await estimate(1, type="python", **loaded["mine"])
        found = await pulled(server.runtime, result.experience)
        assert found["advantages"].values.tolist() == [0.5, 0.5, 0.0, -0.5]
        with pytest.raises(InvalidRequestError, match="has not loaded: name it in") as caught:
            await estimate(2, type="python", function=f"{EXAMPLE}:clipped")
        assert caught.value.reason == "USER_CODE_INVALID"
        with pytest.raises(InvalidRequestError, match="type is 'grop': valid are gae, "):
            await estimate(3, type="grop")
        with pytest.raises(InvalidRequestError) as caught:
            await update(type="ppo")
        assert caught.value.reason == "SPEC_INVALID"
        message = str(caught.value)
        assert "type is 'ppo': valid are ppo_policy, " in message
        assert "; python, with function 'path/to/file.py:name', is one of yours" in message
