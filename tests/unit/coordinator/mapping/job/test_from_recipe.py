"""A recipe as a job: which tasks there are, of which rows, and what its models are."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.mapping_jobs import LLAMAS

from rolemesh.coordinator.mapping.job.from_recipe import job_of, one_call_a_role, work_of
from rolemesh.coordinator.mapping.job.job import Job
from rolemesh.coordinator.mapping.job.layouts import Layout
from rolemesh.coordinator.mapping.job.systems import ROLEMESH, ROLEMESH_FAST
from rolemesh.coordinator.mapping.job.tasks import TaskKind
from rolemesh.coordinator.mapping.machines.cluster import group_of
from rolemesh.coordinator.mapping.machines.devices import device_of
from rolemesh.coordinator.mapping.simulators.costs import RoleCosts
from rolemesh.coordinator.recipe.algorithm.algorithms import ExternalSpec
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.run.checks.planning import plan_step
from rolemesh.engine.layout.matrices import num_matrix_parameters

REPOSITORY = Path(__file__).resolve().parents[5]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMAS["tiny"]))
    return tmp_path


def job(model: Path, name: str, *settings: str, on_gpus: bool = True, **lengths: Any) -> Job:
    file = REPOSITORY / "recipes" / f"{name}.yaml"
    bare = load_recipe([file])
    models = [
        f"{role}.model.path={model}" for role in bare.roles if hasattr(bare.section(role), "model")
    ]
    recipe = one_call_a_role(load_recipe([file], overrides=[*models, *settings]))
    work = work_of(recipe, **lengths)
    return job_of(recipe, asyncio.run(plan_step(recipe)), work, on_gpus=on_gpus)


def shown(found: Job) -> list[tuple[str, tuple[int, ...]]]:
    return [(task.name, task.after) for task in found.step.tasks]


def test_the_graph_of_the_algorithm_is_the_step(model: Path) -> None:
    found = job(model, "quickstart-ppo")
    assert shown(found) == [
        ("actor.generate", ()),
        ("critic.compute_values", (0,)),
        ("reference.compute_logprobs", (0,)),
        ("reward.compute_reward", (0,)),
        ("actor.compute_advantages", (0, 1, 2, 3)),
        ("critic.update", (0, 1, 4)),
        ("actor.update", (0, 4)),
    ]
    # A reward by rules has no model to place.
    assert [role.name for role in found.roles] == ["actor", "critic", "reference"]
    actor, critic, reference = found.roles
    assert (actor.trains, actor.samples) == (True, True)
    assert (critic.trains, critic.samples) == (True, False)
    assert (reference.trains, reference.samples) == (False, False)
    assert critic.model.shape.head == "score"
    assert actor.model.shape.head == "lm_head"


def test_rows_are_the_recipes(model: Path) -> None:
    work = job(model, "quickstart-ppo").work
    assert (work.prompts, work.samples, work.rows) == (16, 4, 64)
    assert (work.mini_batch_rows, work.epochs, work.optimizer_steps) == (32, 1, 2)
    # max_model_len 128, of which completions may have 8 tokens.
    assert (work.prompt_tokens, work.completions.mean) == (120, 8)
    assert work.shares_prompts
    few = job(model, "quickstart-ppo", prompt_tokens=40, completion_tokens=3).work
    assert few.prompt_tokens == 40
    assert few.completions.mean == pytest.approx(3, rel=0.05)
    assert few.completions.longest <= 8


def test_a_critic_of_fewer_layers_is_smaller(model: Path) -> None:
    actor, critic, _ = job(model, "quickstart-ppo", "critic.model.num_layers=2").roles
    assert critic.model.shape.num_layers == 2
    assert actor.model.shape.num_layers == 4


def test_a_baseline_has_one_row_a_prompt(model: Path) -> None:
    found = job(model, "remax", "algorithm.sampling.samples_per_prompt=4")
    shares = [(task.method, task.share) for task in found.step.tasks]
    assert shares == [
        ("generate", 1.0),
        ("generate", 0.25),
        ("compute_reward", 1.0),
        ("compute_reward", 0.25),
        ("compute_advantages", 1.0),
        ("update", 1.0),
    ]


def test_dynamic_sampling_is_planned_as_one_round(model: Path) -> None:
    found = job(model, "dapo")
    assert [name for name, _ in shown(found)] == [
        "actor.generate",
        "reward.compute_reward",
        "actor.compute_advantages",
        "actor.update",
    ]
    assert [task.index for task in found.step.tasks] == [0, 1, 2, 3]
    assert all(before < index for index, (_, after) in enumerate(shown(found)) for before in after)


def test_a_sampler_apart_is_a_role_and_ahead_where_the_schedule_says_so(model: Path) -> None:
    found = job(model, "async-grpo")
    kinds = {task.name: task.kind for task in found.step.tasks}
    assert kinds["actor.publish_weights"] is TaskKind.PUBLISH
    assert kinds["rollout.update_weights"] is TaskKind.TAKE
    assert kinds["rollout.generate"] is TaskKind.GENERATE
    assert found.step.ahead == {"rollout"}
    rollout = found.role("rollout")
    assert rollout.only_samples
    assert not found.role("actor").samples
    assert found.wishes.apart == (("rollout", "actor"),)
    assert not job(model, "async-grpo", "schedule.sampler={type: sync}").step.ahead


def test_services_and_blocks_of_a_placement_change_no_task(model: Path) -> None:
    plain = job(model, "async-grpo")
    dealt = job(
        model,
        "async-grpo",
        "services.rollout.replicas=2",
        "schedule.sampler.batch_size=4",
        "schedule.sampler.block_rows=8",
    )
    assert dealt.step == plain.step


def test_passes_hold_a_row_at_least(model: Path) -> None:
    for role in job(model, "quickstart-ppo", "actor.rollout.max_model_len=9000").roles:
        assert min(role.freedom.micro_batch_tokens) == 9000


def test_the_sampler_decides_what_sampling_may_be(model: Path) -> None:
    vllm = job(model, "quickstart-ppo").role("actor")
    assert vllm.freedom.generate_slices
    assert not vllm.freedom.generate_stages
    assert vllm.most_rows == 1024
    plain = job(model, "quickstart-ppo", "actor.rollout={type: hf, max_num_seqs: 16}").role("actor")
    assert not plain.freedom.generate_slices
    assert plain.most_rows == 16


def test_numerics_decide_what_is_gathered(model: Path) -> None:
    assert job(model, "quickstart-ppo", "run.numerics=exact").system is ROLEMESH
    assert job(model, "quickstart-ppo", "run.numerics=fast").system is ROLEMESH_FAST


ADAPTER = "actor.model.adapter={rank: 4}"


def test_the_base_of_an_adapter_is_a_reference_without_a_role(model: Path) -> None:
    found = job(model, "quickstart-ppo", ADAPTER, "reference.model=null")
    assert [role.name for role in found.roles] == ["actor", "critic"]
    kinds = {task.name: task.kind for task in found.step.tasks}
    assert kinds["actor.compute_reference_logprobs"] is TaskKind.SCORE
    actor, critic = found.roles
    assert actor.model.trained_parameters == actor.model.factor_parameters > 0
    assert critic.model.trained_parameters == critic.model.num_parameters


def test_a_policy_that_teaches_itself_scores_and_keeps_its_average(model: Path) -> None:
    distilled = "algorithm={type: on_policy_distillation, sampling: {max_new_tokens: 64}}"
    own = "teacher={of: actor, average: 0.99}"
    apart = ("critic=null", "reference=null", "reward=null")
    pools = "pools={main: {roles: [actor]}}"
    found = job(model, "quickstart-ppo", distilled, own, pools, *apart)
    assert [role.name for role in found.roles] == ["actor"]
    kinds = {task.name: task.kind for task in found.step.tasks}
    assert kinds["actor.compute_teacher_logprobs"] is TaskKind.SCORE
    assert found.role("actor").averages
    assert not job(model, "quickstart-ppo").role("actor").averages


def test_a_rollout_service_samples_with_the_actors_adapter(model: Path) -> None:
    found = job(model, "async-grpo", ADAPTER)
    actor, rollout = found.role("actor"), found.role("rollout")
    assert rollout.model.factor_parameters == actor.model.factor_parameters > 0


def test_a_frozen_base_is_held_as_its_device_has_it(model: Path) -> None:
    actor, critic, reference = job(model, "quickstart-ppo", ADAPTER).roles
    assert (actor.frozen_bytes, critic.frozen_bytes, reference.frozen_bytes) == (2, None, 2)
    wide = job(model, "quickstart-ppo", ADAPTER, "actor.model.frozen_dtype=float32").role("actor")
    assert wide.frozen_bytes == 4
    on_cpu = job(model, "quickstart-ppo", ADAPTER, on_gpus=False).role("actor")
    assert on_cpu.frozen_bytes == 4


def test_steps_of_a_client_cannot_be_planned(model: Path) -> None:
    file = REPOSITORY / "recipes" / "quickstart-ppo.yaml"
    recipe = load_recipe([file])
    external = recipe.model_copy(update={"algorithm": ExternalSpec()})
    with pytest.raises(RecipeError, match="a client makes its steps"):
        work_of(external)


def test_a_matrix_that_muon_steps_has_a_moment_less(model: Path) -> None:
    by_adamw = job(model, "quickstart-ppo")
    by_muon = job(model, "quickstart-ppo", "actor.optimizer.type=muon")
    group = group_of(device_of("a100-80"), 2)
    held = []
    for found in (by_adamw, by_muon):
        actor, critic, _ = found.roles
        held += [
            RoleCosts(found, role, group).option(Layout()).bytes.rest for role in (actor, critic)
        ]
    # The plan takes norms for matrices.
    assert held[0] - held[2] == pytest.approx(4 * num_matrix_parameters(LLAMAS["tiny"]), rel=0.01)
    assert held[1] == held[3]
