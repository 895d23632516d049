"""`rolemesh render compose`: one GPU a rank, none idle, none for a role without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from support.compose_files import BASE_FILE, REPOSITORY, gpu_file, resolve
from typer.testing import CliRunner

from rolemesh.coordinator.commands.cli import app
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.recipe.schema import Recipe

PPO = "recipes/quickstart-ppo.yaml"
GRPO = "recipes/quickstart-grpo.yaml"
CLASSIFIER = "recipes/classifier-reward-ppo.yaml"


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def render(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["render", "compose", *arguments])


def rendered(*arguments: str) -> dict[str, Any]:
    result = render(*arguments)
    assert result.exit_code == 0, result.output
    services: dict[str, Any] = yaml.load(result.stdout, _Loader)["services"]
    return services


class _Loader(yaml.SafeLoader):
    """Reads !reset as None."""


_Loader.add_constructor("!reset", lambda loader, node: None)


def devices(services: dict[str, Any], role: str) -> list[str]:
    deploy = services[role].get("deploy")
    if deploy is None:
        return []
    (reservation,) = deploy["resources"]["reservations"]["devices"]
    assert (reservation["driver"], reservation["capabilities"]) == ("nvidia", ["gpu"])
    ids: list[str] = reservation["device_ids"]
    return ids


def trained(services: dict[str, Any]) -> Recipe:
    """The recipe that the coordinator's command means."""
    command, restartable, file, *flags = services["coordinator"]["command"]
    assert (command, restartable) == ("train", "--restartable")
    assert flags[::2] == ["--set"] * (len(flags) // 2)
    return load_recipe([Path(file)], overrides=flags[1::2])


@pytest.mark.parametrize(
    ("num_gpus", "expected"),
    [
        (1, {"actor": "0", "critic": "0", "reference": "0"}),
        (2, {"actor": "0", "critic": "1", "reference": "1"}),
        (3, {"actor": "0", "critic": "1", "reference": "2"}),
        (4, {"actor": "0 1", "critic": "2", "reference": "3"}),
        (8, {"actor": "0 1 2 3", "critic": "4 5", "reference": "6 7"}),
    ],
)
def test_roles_with_a_model_share_all_gpus_of_the_host(
    num_gpus: int, expected: dict[str, str]
) -> None:
    services = rendered(PPO, "--gpus", str(num_gpus))
    given = {role: devices(services, role) for role in ("actor", "critic", "reference", "reward")}
    assert given == {role: ids.split() for role, ids in expected.items()} | {"reward": []}


@pytest.mark.parametrize("recipe", [PPO, GRPO, CLASSIFIER, "recipes/sft.yaml", "recipes/dpo.yaml"])
@pytest.mark.parametrize("num_gpus", [1, 2, 4, 8])
def test_each_rank_has_a_gpu_and_coordinator_and_service_mean_the_same_layout(
    recipe: str, num_gpus: int
) -> None:
    services = rendered(recipe, "--gpus", str(num_gpus))
    means = trained(services)
    used = set()
    for role in means.roles:
        layout = means.layout(role)
        assert services[role]["environment"]["ROLEMESH_SERVICE__LAYOUT"] == layout.flag()
        assert len(devices(services, role)) in (0, layout.world_size)
        used |= set(devices(services, role))
    assert used == {str(index) for index in range(num_gpus)}
    # Roles of one pool take turns on its GPUs, and no GPU is in two pools.
    named = [device for pool in means.pools.values() for device in pool.devices if device != "cpu"]
    assert len(named) == len(set(named)) == num_gpus


def test_a_reward_gets_a_gpu_when_it_is_a_model() -> None:
    assert devices(rendered(PPO, "--gpus", "4"), "reward") == []
    assert devices(rendered(CLASSIFIER, "--gpus", "4"), "reward") == ["3"]
    mixed = "reward.source=[arithmetic, {source: {type: classifier, model: {path: m}}}]"
    mixed = mixed.replace("[arithmetic", "[{source: {type: arithmetic}}")
    assert devices(rendered(PPO, "--gpus", "4", "--set", mixed), "reward") == ["3"]


def test_a_reward_that_is_trained_is_one_of_the_trained_roles(tmp_path: Path) -> None:
    file = tmp_path / "trained.yaml"
    result = render("recipes/reward-model.yaml", "--out", str(file))
    assert result.exit_code == 0, result.output
    services = resolve(BASE_FILE, file)["services"]
    reward, critic = services["reward"], services["critic"]
    assert (reward["user"], reward["ipc"]) == ("10001:10001", critic["ipc"])
    assert "common" in reward["depends_on"]

    def runs(service: dict[str, Any]) -> dict[str, Any]:
        (mounted,) = [one for one in service["volumes"] if one["target"] == "/mesh/runs"]
        return dict(mounted)

    assert runs(reward) == runs(critic)
    assert not runs(reward).get("read_only", False)
    assert reward["environment"]["ROLEMESH_SERVICE__SHARED_MEMORY"] == "true"
    # Its identity is its user's, or it could not read it.
    assert services["certs"]["environment"]["REWARD_USER"] == "10001"
    assert "certs" not in rendered(PPO, "--gpus", "4")


def test_devices_are_named_as_the_host_counts_them() -> None:
    services = rendered(PPO, "--gpus", "3", "--devices", "5, 7,GPU-8a1e")
    assert [devices(services, role) for role in ("actor", "critic", "reference")] == [
        ["5"],
        ["7"],
        ["GPU-8a1e"],
    ]


def test_pools_of_the_recipe_are_taken_as_they_are() -> None:
    pools = (
        "pools={a: {devices: ['cuda:2', 'cuda:1'], roles: [actor]}, "
        "b: {devices: ['cuda:0'], roles: [reference, critic]}, c: {roles: [reward]}}"
    )
    services = rendered(PPO, "--set", pools, "--set", "actor.train.tp=2")
    assert devices(services, "actor") == ["2", "1"]
    assert devices(services, "critic") == devices(services, "reference") == ["0"]
    assert trained(services).pools["a"].devices == ("cuda:2", "cuda:1")


def test_layouts_of_the_recipe_stay() -> None:
    services = rendered(PPO, "--gpus", "8", "--set", "actor.train.tp=2")
    assert trained(services).layout("actor").tp == 2
    assert devices(services, "actor") == ["0", "1"]


def test_gpus_that_stay_idle_are_told() -> None:
    sizes = [f"--set={role}.tp=2" for role in ("actor.train", "critic.train", "reference.layout")]
    result = render(PPO, "--gpus", "8", *sizes)
    assert "2 of 8 GPUs are left idle" in result.stderr


def test_a_rollout_service_that_takes_weights_between_tokens_grows_too() -> None:
    model = REPOSITORY / ".models" / "SmolLM2-135M-Instruct"
    if not model.is_dir():
        pytest.skip("needs the quickstart's model: make model")
    services = rendered("recipes/async-grpo.yaml", "--gpus", "4")
    assert trained(services).layout("rollout").world_size == 2
    # Started without being asked for by a profile.
    assert services["rollout"]["profiles"] is None


def test_shared_memory_grows_with_the_batch_and_holds_what_all_ranks_may() -> None:
    large = [
        "--set=run.prompts_per_step=1024",
        "--set=algorithm.sampling={samples_per_prompt: 16, max_new_tokens: 2048}",
        "--set=actor.rollout.max_model_len=4096",
    ]
    services = rendered(PPO, "--gpus", "4", *large)
    # 1,024 prompts, 16 samples and a greedy one, 4,096 tokens of 64 bytes and 8 KiB beside.
    needed = 1024 * 17 * (4096 * 64 + 8192)
    capacity = int(services["actor"]["environment"]["ROLEMESH_SERVICE__EXPERIENCE_CAPACITY_BYTES"])
    assert needed <= capacity < needed + (64 << 20)
    num_ranks = 5
    size = int(services["common"]["shm_size"].removesuffix("mb")) << 20
    assert size >= num_ranks * capacity


def test_shared_memory_holds_two_cuts_of_each_trained_model(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(1 << 30)
    models = [f"--set={role}.model.path={tmp_path}" for role in ("actor", "critic")]
    result = render(PPO, "--gpus", "2", *models)
    size = yaml.load(result.stdout, _Loader)["services"]["common"]["shm_size"]
    # Weights and two moments in float32, twice, of two models of 1 GiB in bfloat16.
    assert 24 << 10 <= int(size.removesuffix("mb")) < 30 << 10
    assert "holds no *.safetensors" not in result.stderr

    weights.unlink()
    result = render(PPO, "--gpus", "2", *models)
    # What docker-compose.yml has by itself.
    assert yaml.load(result.stdout, _Loader)["services"]["common"]["shm_size"] == "12288mb"
    assert f"{tmp_path} holds no *.safetensors here" in result.stderr
    assert "12gb" in BASE_FILE.read_text()


@pytest.mark.parametrize("number", [1, 2, 4, 8])
def test_files_of_the_repository_are_what_the_command_writes(number: int, tmp_path: Path) -> None:
    out = tmp_path / "gpus.yaml"
    assert render(PPO, f"--gpus={number}", f"--out={out}").exit_code == 0
    assert out.read_text() == gpu_file(number).read_text()
    services = resolve(BASE_FILE, out)["services"]
    assert services["actor"]["cap_drop"] == ["ALL"]


def test_a_recipe_without_gpus_gets_layouts_and_memory_alone() -> None:
    services = rendered(GRPO)
    assert all("deploy" not in service for service in services.values())
    assert "ROLEMESH_SERVICE__LAYOUT" in services["actor"]["environment"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([PPO, "--gpus", "2", "--set", "actor.train.tp=4"], "--gpus is 2, but the recipe's layout"),
        ([PPO, "--gpus", "4", "--devices", "0,1"], "--devices names 2 devices, but --gpus is 4"),
        ([PPO, "--devices", "0,0"], "give each device once"),
        ([PPO, "--devices", "0"], "no pool of the recipe names a GPU: give --gpus"),
        (["recipes/no-such.yaml"], "no such recipe"),
        (
            [PPO, "--gpus", "2", "--set", "pools.laptop.devices=['cuda:0']"],
            "pools name GPUs already",
        ),
        (
            [PPO, "--devices", "3", "--set", "pools.laptop.devices=['cuda:1']"],
            "--devices names 1",
        ),
        ([PPO, "--set", "pools.laptop.devices=['tpu:1']"], "pools.laptop.devices has 'tpu:1'"),
        (
            ["recipes/async-grpo.yaml", "--set", "rollout.model.path=/nowhere"],
            "holds no *.safetensors here",
        ),
        (
            ["recipes/async-grpo.yaml", "--set", "services.rollout.replicas=2"],
            "one container a role",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[1:])[:40],
)
def test_bad_input_is_refused_with_field_value_and_remedy(
    arguments: list[str], message: str
) -> None:
    result = render(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_each_role_may_use_the_code_and_variables_that_its_section_names() -> None:
    source = (
        "{type: python, function: 'mine.rewards:judge', environment: [JUDGE, TOKEN], network: true}"
    )
    loss = "algorithm.policy_loss={type: python, function: 'my.losses:soft'}"
    services = rendered(PPO, "--gpus", "1", "--set", f"reward.source={source}", "--set", loss)
    granted = {
        role: {name: value for name, value in services[role]["environment"].items() if name in SET}
        for role in ("actor", "critic", "reward")
    }
    assert granted == {
        "actor": {"ROLEMESH_SERVICE__CODE_NAMES": "my.losses:soft"},
        "critic": {},
        "reward": {
            "ROLEMESH_SERVICE__CODE_NAMES": "mine.rewards:judge",
            "ROLEMESH_SERVICE__VARIABLES": "JUDGE,TOKEN",
            "ROLEMESH_SERVICE__FUNCTION_NETWORK": "true",
        },
    }


SET = tuple(f"ROLEMESH_SERVICE__{n}" for n in ("CODE_NAMES", "VARIABLES", "FUNCTION_NETWORK"))
