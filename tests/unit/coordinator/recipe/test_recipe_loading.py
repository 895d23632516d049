"""Layers of a recipe, and what is said about a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from rolemesh.coordinator.recipe.algorithm.algorithms import OnlineDpoAlgorithmSpec, PpoSpec
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import dump_recipe, load_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.stores import EmbeddedStoreSpec, RedisStoreSpec
from rolemesh.engine.specs import HfSpec, PpoPolicyLossSpec, SamplingSpec, VllmSpec

ROLES = "[actor, critic, reference, reward]"
MODEL = {"path": "models/tiny"}
SMALLEST: dict[str, Any] = {
    "run": {"name": "small", "steps": 2, "prompts_per_step": 4},
    "algorithm": {"type": "ppo"},
    "actor": {
        "model": MODEL,
        "rollout": {"type": "vllm", "kv_cache_gib": 2},
        "data": {"type": "reasoning_gym", "task": "chain_sum"},
    },
    "critic": {"model": MODEL},
    "reference": {"model": MODEL},
    "reward": {"source": {"type": "arithmetic"}},
}


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALLEST))
    return path


def refused(path: Path, *overrides: str, **environment: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe([path], overrides=overrides, environment=environment)
    return str(caught.value)


def test_defaults_fill_what_a_file_leaves_out(recipe_file: Path) -> None:
    recipe = load_recipe([recipe_file])
    assert recipe.run.seed == 0
    assert isinstance(recipe.store, EmbeddedStoreSpec)
    assert isinstance(recipe.actor.rollout, VllmSpec)
    assert recipe.actor.rollout.kv_cache_gib == 2


def test_each_layer_wins_over_the_one_before(recipe_file: Path, tmp_path: Path) -> None:
    second = tmp_path / "second.yaml"
    second.write_text("run: {steps: 3, seed: 1, prompts_per_step: 5}")
    environment = {"ROLEMESH_RUN__STEPS": "6", "ROLEMESH_RUN__SEED": "2"}
    recipe = load_recipe(
        [recipe_file, second], overrides=["run.steps=7", "run.steps=8"], environment=environment
    )
    assert recipe.run.steps == 8  # --set, the last one
    assert recipe.run.seed == 2  # environment
    assert recipe.run.prompts_per_step == 5  # second file
    assert recipe.run.name == "small"  # first file


def test_values_of_overrides_are_yaml(recipe_file: Path) -> None:
    recipe = load_recipe(
        [recipe_file],
        overrides=[
            "actor.optimizer.learning_rate=1e-5",
            "actor.optimizer.betas=[0.8, 0.9]",
            "actor.data.config={min_terms: 2, scale: 1e-3}",
            "algorithm.policy_loss.dual_clip=null",
        ],
    )
    assert recipe.actor.optimizer.learning_rate == 1e-5
    assert recipe.actor.optimizer.betas == (0.8, 0.9)
    # YAML 1.1 would read 1e-3 as a text.
    assert recipe.actor.data.model_dump()["config"] == {"min_terms": 2, "scale": 1e-3}


@pytest.mark.parametrize("is_type_first", [True, False])
def test_another_type_replaces_its_section_whole(recipe_file: Path, is_type_first: bool) -> None:
    overrides = ["actor.rollout.type=hf", "actor.rollout.max_num_seqs=3"]
    if not is_type_first:
        overrides.reverse()
    rollout = load_recipe([recipe_file], overrides=overrides).actor.rollout
    assert rollout == HfSpec(max_num_seqs=3)  # and no kv_cache_gib, which hf does not have


def test_store_can_be_set_from_the_command_line(recipe_file: Path) -> None:
    overrides = ["store.type=redis", "store.url=redis://store:6379/0"]
    store = load_recipe([recipe_file], overrides=overrides).store
    assert store == RedisStoreSpec(url="redis://store:6379/0")


def test_service_settings_in_the_environment_are_not_of_the_recipe(recipe_file: Path) -> None:
    environment = {"ROLEMESH_SERVICE__PORT": "50051", "ROLEMESH_MODELS": "/models"}
    assert load_recipe([recipe_file], environment=environment) == load_recipe([recipe_file])


def test_certificates_can_be_set_from_the_environment(recipe_file: Path) -> None:
    environment = {"ROLEMESH_CERTIFICATES": "/mesh/identity"}
    found = load_recipe([recipe_file], environment=environment).certificates
    assert found == Path("/mesh/identity")


def test_dump_loads_to_an_equal_recipe(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe([recipe_file], overrides=["run.seed=7", "services.actor.threads=1"])
    dumped = tmp_path / "config.yaml"
    dumped.write_text(dump_recipe(recipe))
    assert load_recipe([dumped]) == recipe
    assert Recipe.model_validate(yaml.safe_load(dumped.read_text())) == recipe


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.sede=1", "run.sede: unknown key (--set run.sede=1); did you mean run.seed?"),
        ("rnu.seed=1", "rnu: unknown key (--set rnu.seed=1); did you mean run?"),
        (
            "actor.rollout.kv_cache=1",
            "actor.rollout.kv_cache: unknown key (--set actor.rollout.kv_cache=1); "
            "did you mean actor.rollout.kv_cache_gib?",
        ),
        (
            "actor.learning_rate=1",
            "actor.learning_rate: unknown key (--set actor.learning_rate=1); "
            "did you mean actor.optimizer.learning_rate?",
        ),
        (
            "services.actor.adress=a:1",
            "services.actor.adress: unknown key (--set services.actor.adress=a:1); "
            "did you mean services.actor.address?",
        ),
        (
            "store={type: memory, kv_cache_gib: 1}",
            "store.kv_cache_gib: unknown key (--set store={type: memory, kv_cache_gib: 1}); "
            "keys of store are type; did you mean actor.rollout.kv_cache_gib or "
            "rollout.rollout.kv_cache_gib?",
        ),
        (
            "actor.environment={type: python, environment: 'a.py:B', target: 1}",
            "actor.environment.target: unknown key (--set actor.environment={type: python, "
            "environment: 'a.py:B', target: 1}); keys of actor.environment are max_turns, "
            "max_turn_tokens, max_observation_tokens, type, environment, config, timeout_s, "
            "memory_mib, max_output_bytes, variables, readable, network; did you mean "
            "algorithm.advantages.kl_in_reward.target?",
        ),
        (
            "actor.rollout.type=vlm",
            "actor.rollout.type is 'vlm' (--set actor.rollout.type=vlm): "
            "valid types are vllm, hf, vllm_server; did you mean 'vllm'?",
        ),
        (
            "store.type=redis",
            "store.url: required, but not given (URL of the server, e.g. redis://127.0.0.1:6379/0)",
        ),
        (
            "run.steps=many",
            "run.steps is 'many' (--set run.steps=many): give a whole number (Steps "
            "of the run: each samples, judges and trains once)",
        ),
        (
            "run.steps=0",
            "run.steps is 0 (--set run.steps=0): give 1 or more (Steps of the run: "
            "each samples, judges and trains once)",
        ),
        (
            "algorithm.policy_loss.type=my_loss",
            "algorithm.policy_loss.type is 'my_loss' (--set algorithm.policy_loss.type=my_loss): "
            "valid types are ppo_policy, python; a function of yours is "
            "python:path/to/file.py:name",
        ),
        (
            "algorithm.policy_loss=ppo",
            "algorithm.policy_loss.type is 'ppo' (--set algorithm.policy_loss=ppo): "
            "valid types are ppo_policy, python; a function of yours is "
            "python:path/to/file.py:name",
        ),
        (
            "algorithm.advantages=gea",
            "algorithm.advantages.type is 'gea' (--set algorithm.advantages=gea): "
            "valid types are gae, python; did you mean 'gae'?; a function of yours is "
            "python:path/to/file.py:name",
        ),
        (
            "algorithm.policy_loss={type: python, function: mine.py}",
            "algorithm.policy_loss.function is 'mine.py' (--set algorithm.policy_loss={type: "
            'python, function: mine.py}): this is not the form of it ("path/to/file.py:name", '
            '"module:name" or an entry point, as the actor\'s service finds it)',
        ),
        (
            "actor.model.compute_dtype=bfloat",
            "actor.model.compute_dtype is 'bfloat' (--set actor.model.compute_dtype=bfloat): "
            "valid are float32, bfloat16; did you mean 'bfloat16'?",
        ),
        (
            "run.name=My Run",
            "run.name is 'My Run' (--set run.name=My Run): this is not the form of it (Short name: "
            "lower-case letters, digits and hyphens)",
        ),
        (
            "trackers=wandb",
            "trackers is 'wandb' (--set trackers=wandb): give a list (Where scalars go beside "
            "metrics.jsonl and TensorBoard's files, which every run has)",
        ),
        (
            "pools.main.roles=[]",
            "pools.main.roles is [] (--set pools.main.roles=[]): give 1 or more of them (Roles "
            "that share the devices)",
        ),
        (
            "run.recovery.wait_s=.inf",
            "run.recovery.wait_s is inf (--set run.recovery.wait_s=.inf): give a finite number "
            "(Longest wait for a service that others start to come back, in seconds)",
        ),
        (
            "critic=3",
            "critic is 3 (--set critic=3): give a section with the keys numerics, model, "
            "optimizer, train",
        ),
        (
            "services.actr.threads=1",
            "services.actr: no such role; roles are actor, critic, reference, teacher, "
            "reward, cost, rollout",
        ),
        ("run.seed", "--set run.seed: give a field and a value, e.g. --set run.seed=7"),
        (".seed=1", "--set .seed=1: give a field and a value, e.g. --set run.seed=7"),
    ],
)
def test_wrong_override_is_explained(recipe_file: Path, override: str, message: str) -> None:
    assert refused(recipe_file, override) == message


def test_a_key_that_is_missing_in_the_section_at_hand_is_suggested_first(recipe_file: Path) -> None:
    override = "actor.environment={type: python, target: 'a.py:B'}"
    assert refused(recipe_file, override).endswith(
        "; did you mean actor.environment.environment, which is required?"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["actor.train.tp=0"],
            "actor.train.tp is 0 (--set actor.train.tp=0): give 1 or more (Tensor slices: each "
            "matrix is cut over so many ranks)",
        ),
        (
            ["critic.train.dp=4", "critic.train.fsdp=3"],
            "critic.train: fsdp 3 does not divide dp 4: give one of [1, 2, 4] "
            "(--set critic.train.fsdp=3)",
        ),
        (
            ["actor.train.dp=6", "actor.train.ep=4"],
            "actor.train: ep 4 does not divide dp 6: give one of [1, 2, 3, 6] "
            "(--set actor.train.ep=4)",
        ),
        (
            ["actor.train.dp=4", "actor.train.cp=3"],
            "actor.train: cp 3 does not divide dp 4: give one of [1, 2, 4] "
            "(--set actor.train.cp=3)",
        ),
        (
            ["actor.train.tp=4", "actor.generate.tp=3"],
            "actor: generate.tp 3 does not divide train.tp 4: give one of [1, 2, 4] "
            "(--set actor.generate.tp=3)",
        ),
        (
            ["reference.layout.zz=2"],
            "reference.layout.zz: unknown key (--set reference.layout.zz=2); keys of "
            "reference.layout are pp, tp, dp, fsdp, ep, cp, order",
        ),
        (
            [
                "critic.train.dp=3",
                "pools.main.devices=[cuda:0, cuda:1]",
                f"pools.main.roles={ROLES}",
            ],
            "pools.main.devices has 2 GPUs, but the layout of the critic has 3 ranks, each on a "
            "GPU of its own: give the pool more devices, or the role a smaller layout",
        ),
    ],
    ids=["size", "fsdp", "ep", "cp", "generate", "name", "devices"],
)
def test_a_layout_that_cannot_be_is_explained(
    recipe_file: Path, overrides: list[str], message: str
) -> None:
    assert refused(recipe_file, *overrides) == message


def test_conflicting_overrides_are_refused(recipe_file: Path) -> None:
    message = refused(recipe_file, "run=1", "run.seed=2")
    assert message.startswith("--set run.seed=2: run is already set to 1")


def test_every_mistake_is_named_at_once(recipe_file: Path) -> None:
    message = refused(recipe_file, "run.sede=1", "run.steps=-1")
    assert message.startswith("2 things are wrong")
    assert "run.seed?" in message
    assert "run.steps is -1" in message


def test_of_very_many_mistakes_the_first_are_named(recipe_file: Path) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe([recipe_file], overrides=[f"run.wrong_{number}=1" for number in range(80)])
    head, *named, rest = str(error.value).splitlines()
    assert (head, rest) == ("80 things are wrong with the recipe:", "- and 30 more")
    assert len(named) == 50


def test_a_file_nested_too_deep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("run: " + "[" * 3000 + "]" * 3000)
    with pytest.raises(RecipeError, match="nests more than 50 levels deep"):
        load_recipe([path])


def test_unknown_section_in_the_environment_is_refused(recipe_file: Path) -> None:
    message = refused(recipe_file, ROLEMESH_RUNN__SEED="1")
    assert "ROLEMESH_RUNN__SEED sets nothing" in message
    assert "did you mean ROLEMESH_RUN__SEED?" in message


def test_wrong_value_in_the_environment_names_the_variable(recipe_file: Path) -> None:
    assert "(ROLEMESH_RUN__SEED)" in refused(recipe_file, ROLEMESH_RUN__SEED="x")


def test_missing_file_names_its_neighbour(recipe_file: Path) -> None:
    message = refused(recipe_file.with_name("smal.yaml"))
    assert "no such recipe" in message
    assert f"did you mean {recipe_file}?" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: {name: x\nactor: 1\n", ":2:6: not valid YAML"),
        ("run: 1\nrun: 2\n", ":2:1: not valid YAML: the key 'run' is given twice"),
        ("", "a recipe is a YAML mapping with the sections run, algorithm"),
        ("- run\n", "this is a list"),
        ("run: !!python/name:os.system\n", ":1:6: not valid YAML"),
    ],
    ids=["syntax", "duplicate", "empty", "list", "python-object"],
)
def test_broken_file_is_explained(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    message = refused(path)
    assert message.startswith(str(path))
    assert expected in message


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}])
def test_training_samples_from_the_whole_distribution(cut):
    with pytest.raises(ValidationError, match="whole one"):
        PpoSpec(sampling=SamplingSpec(**cut))


@pytest.mark.parametrize("loss", [{}, {"type": "ppo_policy", "kl_in_loss": 0.1}])
def test_the_temperature_of_sampling_is_that_of_the_loss(loss: dict[str, Any]) -> None:
    given = {"policy_loss": loss} if loss else {}
    spec = PpoSpec.model_validate({"sampling": {"temperature": 0.7}, **given})
    assert spec.policy_loss.temperature == 0.7
    assert spec.policy_loss.logprob_temperature == spec.parts.policy_loss.logprob_temperature == 0.7
    # The default of the class is one object for all.
    assert PpoSpec().policy_loss.temperature == 1.0


def test_an_algorithm_without_a_temperature_in_its_loss_takes_any() -> None:
    spec = OnlineDpoAlgorithmSpec.model_validate(
        {"sampling": {"samples_per_prompt": 2, "temperature": 0.7}}
    )
    assert spec.sampling.temperature == 0.7


def test_two_temperatures_are_refused() -> None:
    with pytest.raises(ValidationError, match="leave the first one out"):
        PpoSpec.model_validate(
            {"sampling": {"temperature": 0.7}, "policy_loss": {"temperature": 1.0}}
        )


def test_a_function_of_the_user_is_written_short_or_long(recipe_file: Path) -> None:
    short = "algorithm.policy_loss=python:mine.py:f"
    long = "algorithm.policy_loss={type: python, function: mine.py:f}"
    one, other = (load_recipe([recipe_file], overrides=[each]) for each in (short, long))
    assert one == other
    assert load_recipe([recipe_file], overrides=["algorithm.policy_loss=ppo_policy"]) == (
        load_recipe([recipe_file])
    )
    # What a recipe gives to the only loss of ours needs no type, as before.
    clipped = load_recipe([recipe_file], overrides=["algorithm.policy_loss.clip_high=0.3"])
    assert clipped.algorithm == PpoSpec(policy_loss=PpoPolicyLossSpec(clip_high=0.3))


def test_the_actor_alone_is_given_the_functions_that_the_algorithm_names(
    recipe_file: Path,
) -> None:
    recipe = load_recipe(
        [recipe_file],
        overrides=[
            "algorithm.policy_loss={type: python, function: mine.py:f, config: {cap: 3}}",
            "algorithm.advantages=python:mine.py:g",
            "algorithm.sampling.temperature=0.5",
            "actor.own_functions={mine: {function: other.py:h}}",
        ],
    )
    loaded = recipe.sent_section("actor").model_dump(mode="json")["own_functions"]
    assert loaded == {
        "mine": {"function": "other.py:h", "config": {}},
        "algorithm.advantages": {"function": "mine.py:g", "config": {}},
        "algorithm.policy_loss": {"function": "mine.py:f", "config": {"cap": 3}},
    }
    assert recipe.sent_section("critic") == recipe.critic
    # It is a policy loss like the others: log-probs are taken at the temperature of sampling.
    assert recipe.algorithm.parts.policy_loss.logprob_temperature == 0.5
