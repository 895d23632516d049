"""The compose files, resolved by the real Docker Compose. No engine is needed for that."""

from __future__ import annotations

import ipaddress
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.compose_files import (
    BASE_FILE,
    IMAGES,
    OUTSIDE_FILE,
    REPOSITORY,
    compose,
    gpu_file,
    mounts,
    resolve,
)
from typer.testing import CliRunner

from rolemesh.coordinator.api.doors.doors import check_doors
from rolemesh.coordinator.commands.cli import app
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.recipe.role_names import ROLES
from rolemesh.coordinator.recipe.sections.api_section import TokenFiles
from rolemesh.coordinator.recipe.sections.stores import RedisStoreSpec
from rolemesh.coordinator.run.services.commands import service_commands
from rolemesh.services.runtime.server.config import load_config

OPTIONAL_ROLES = ("teacher", "cost", "rollout")
"""Roles that most recipes lack: each has a profile of its own name."""

GPU_FILE = gpu_file(4)
DOCKERFILE = REPOSITORY / "deploy" / "Dockerfile"
SHORTEST_DRAIN_S = 60


@pytest.fixture(scope="module")
def cpu() -> dict[str, Any]:
    return resolve(BASE_FILE)


@pytest.fixture(scope="module", params=["cpu", "gpu-4"])
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return resolve(BASE_FILE, *([] if request.param == "cpu" else [GPU_FILE]))


def seconds(duration: str) -> float:
    """Compose prints Go durations: 2m10s."""
    total, number = 0.0, ""
    for character in duration:
        if character in "hms":
            total += float(number) * {"h": 3600, "m": 60, "s": 1}[character]
            number = ""
        else:
            number += character
    return total


# --- what every variant keeps ---------------------------------------------------------------


def test_mesh_is_a_store_a_coordinator_and_one_container_a_role(config: dict[str, Any]) -> None:
    expected = {"certs", "common", "answers", "store", "models", "coordinator", *ROLES}
    assert set(config["services"]) == expected | {"prometheus", "grafana"}
    for role in ROLES:
        assert config["services"][role]["command"] == ["serve", role]


@pytest.mark.parametrize("profiles", [(), ("cost",), ("rollout",), OPTIONAL_ROLES])
def test_roles_that_most_recipes_lack_are_started_by_their_profile(
    profiles: tuple[str, ...],
) -> None:
    for files in ((BASE_FILE,), (BASE_FILE, GPU_FILE)):
        services = resolve(*files, profiles=profiles)["services"]
        started = {role for role in ROLES if role in services}
        assert started == set(ROLES) - set(OPTIONAL_ROLES) | set(profiles)


def test_the_coordinator_waits_for_every_role_that_is_started(config: dict[str, Any]) -> None:
    waits = config["services"]["coordinator"]["depends_on"]
    for role in ROLES:
        assert waits[role]["condition"] == "service_healthy"
        assert waits[role]["required"] == (role not in OPTIONAL_ROLES)


def test_every_lasting_container_has_a_health_check(config: dict[str, Any]) -> None:
    for name in ("store", "prometheus", "grafana", *ROLES):
        assert config["services"][name]["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL"), name


def test_roles_ask_grpc_health_at_the_port_they_listen_on(config: dict[str, Any]) -> None:
    for role in ROLES:
        service = config["services"][role]
        port = service["environment"]["ROLEMESH_SERVICE__PORT"]
        script = "/mesh/deploy/health_check.py"
        assert service["healthcheck"]["test"] == ["CMD", "python", script, f"127.0.0.1:{port}"]
        assert f"COPY deploy/health_check.py {Path(script).parent}/" in DOCKERFILE.read_text()


def test_services_accept_the_settings_they_are_given(config: dict[str, Any]) -> None:
    for role in ROLES:
        service = config["services"][role]
        settings = load_config(role, [], service["environment"])
        assert settings.host == "0.0.0.0"
        # Encrypted, to members alone.
        assert settings.identity is not None
        assert not settings.allow_remote
        assert settings.drain_timeout_s >= SHORTEST_DRAIN_S
        assert settings.drain_timeout_s < seconds(service["stop_grace_period"])


@pytest.mark.parametrize("role", ROLES)
def test_a_role_takes_its_layout_from_its_variable(role: str) -> None:
    variables = {f"ROLEMESH_{role.upper()}_LAYOUT": "tp=2,dp=2,fsdp=1"}
    services = resolve(BASE_FILE, variables=variables)["services"]
    ranks = {one: load_config(one, [], services[one]["environment"]).world_size for one in ROLES}
    assert ranks == {one: 4 if one == role else 1 for one in ROLES}


def test_prometheus_scrapes_every_role_at_its_metrics_port(config: dict[str, Any]) -> None:
    scrape = yaml.safe_load((REPOSITORY / "deploy" / "prometheus.yml").read_text())
    targets = {
        entry["labels"]["role"]: entry["targets"]
        for job in scrape["scrape_configs"]
        if job["job_name"] == "rolemesh"
        for entry in job["static_configs"]
    }
    expected = {
        role: [
            f"{role}:{config['services'][role]['environment']['ROLEMESH_SERVICE__METRICS_PORT']}"
        ]
        for role in ROLES
    }
    assert targets == expected


@pytest.mark.parametrize(
    "recipe", sorted((REPOSITORY / "recipes").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_recipe_runs_on_the_mesh_of_the_containers(
    config: dict[str, Any], recipe: Path
) -> None:
    coordinator = config["services"]["coordinator"]
    resolved = load_recipe([recipe], environment=coordinator["environment"])
    for role in ROLES:
        port = config["services"][role]["environment"]["ROLEMESH_SERVICE__PORT"]
        assert resolved.service(role).address == f"{role}:{port}"
        assert config["services"][role]["hostname"] == role
    assert isinstance(resolved.store, RedisStoreSpec)
    assert resolved.store.url.startswith("redis://rolemesh@store:")
    assert coordinator["depends_on"]["store"]["condition"] == "service_healthy"


def test_coordinator_trains_a_recipe_of_the_repository(config: dict[str, Any]) -> None:
    command, flag, recipe, *_ = config["services"]["coordinator"]["command"]
    assert (command, flag) == ("train", "--restartable")
    assert (REPOSITORY / recipe).is_file()
    assert (REPOSITORY / recipe).parent.name == "recipes"


def test_the_quickstart_s_model_is_written_where_its_recipe_looks(config: dict[str, Any]) -> None:
    recipe = load_recipe([REPOSITORY / "recipes" / "quickstart-ppo.yaml"])
    flag, written = config["services"]["models"]["command"][-2:]
    assert flag == "--out"
    # Containers start in /mesh, and a recipe's paths are relative to the current directory.
    assert Path(written) == Path("/mesh") / recipe.actor.model.path
    assert "WORKDIR /mesh" in DOCKERFILE.read_text()


def test_a_folder_of_models_that_belongs_to_the_user_does_not_hold_the_mesh_up() -> None:
    variables = {"ROLEMESH_MODELS": "./.models"}
    config = resolve(BASE_FILE, variables=variables)
    # Every role waits for this container to end well, so it must not fail where it may not write.
    assert "--if-writable" in config["services"]["models"]["command"]
    assert config["services"]["models"]["user"] == "10001:10001"
    owner = resolve(BASE_FILE, variables=variables | {"ROLEMESH_MODELS_USER": "1000:1000"})
    assert owner["services"]["models"]["user"] == "1000:1000"
    assert mounts(owner["services"]["models"])["/mesh/.models"][1]


def test_no_port_is_published_beyond_loopback(config: dict[str, Any]) -> None:
    published = [
        (name, port)
        for name, service in config["services"].items()
        for port in service.get("ports", [])
    ]
    for name, port in published:
        assert ipaddress.ip_address(port.get("host_ip", "0.0.0.0")).is_loopback, (name, port)
    assert {name for name, _ in published} <= {"prometheus", "grafana"}


@pytest.fixture(scope="module")
def outside() -> dict[str, Any]:
    variables = {"ROLEMESH_API_TOKEN_FILE": "/tmp/token"}
    return resolve(BASE_FILE, OUTSIDE_FILE, variables=variables)


def test_judges_alone_of_all_roles_get_a_way_out(outside: dict[str, Any]) -> None:
    services = outside["services"]
    open_ones = {name for name in ROLES if "outside" in services[name]["networks"]}
    assert open_ones == {"reward", "cost"}
    assert not outside["networks"]["outside"].get("internal", False)
    assert services["reward"]["extra_hosts"] == ["host.docker.internal=host-gateway"]


def test_the_coordinator_s_doors_open_to_this_host_alone_and_with_a_token(
    outside: dict[str, Any],
) -> None:
    coordinator = outside["services"]["coordinator"]
    ports = {port["target"]: port["host_ip"] for port in coordinator["ports"]}
    environment = coordinator["environment"]
    assert ports == {
        int(environment["ROLEMESH_API__HTTP_PORT"]): "127.0.0.1",
        int(environment["ROLEMESH_API__GRPC_PORT"]): "127.0.0.1",
    }
    assert environment["ROLEMESH_API__HOST"] == "0.0.0.0"
    assert environment["ROLEMESH_API__TOKEN_FILE"] == "/run/secrets/rolemesh_api_token"
    recipe = REPOSITORY / "recipes" / "quickstart-ppo.yaml"
    names = {name: value for name, value in environment.items() if name.startswith("ROLEMESH_")}
    loaded = load_recipe([recipe], environment=names)
    assert loaded.api.grpc_port == 50050
    # In clear within the mesh, and with the token: otherwise it would not start.
    without_file = loaded.api.model_copy(update={"token_file": None, "tokens": TokenFiles()})
    check_doors(without_file, loaded.certificates, {"ROLEMESH_API_TOKEN": "of-the-file"})


@pytest.mark.parametrize(
    ("variable", "image"),
    [("ROLEMESH_IMAGE", "of the roles"), ("ROLEMESH_COORDINATOR_IMAGE", "of the coordinator")],
)
def test_a_missing_image_is_named_with_the_remedy(variable: str, image: str) -> None:
    named = {name: value for name, value in IMAGES.items() if name != variable}
    completed = compose(BASE_FILE, variables=named)
    assert completed.returncode != 0
    assert f"{variable} is missing a value: there is no image {image} yet" in completed.stderr
    assert 'Build one with "make images"' in completed.stderr


def test_a_missing_password_is_told_with_the_remedy(tmp_path: Path) -> None:
    named = {name: value for name, value in IMAGES.items() if "PASSWORD" not in name}
    completed = compose(BASE_FILE, variables=named)
    assert completed.returncode != 0
    assert 'Make one with "deploy/store_password.sh"' in completed.stderr
    script = tmp_path / "deploy" / "store_password.sh"
    script.parent.mkdir()
    script.write_text((REPOSITORY / "deploy" / "store_password.sh").read_text())
    (tmp_path / ".env").write_text("ROLEMESH_IMAGE=mine\n")
    passwords = []
    for _ in range(2):
        subprocess.run(["sh", script], check=True)
        names = [line.split("=", 1) for line in (tmp_path / ".env").read_text().splitlines()]
        assert names[0] == ["ROLEMESH_IMAGE", "mine"]
        ((variable, place),) = names[1:]
        assert variable == "ROLEMESH_STORE_PASSWORD_FILE"
        file = Path(place)
        passwords.append(file.read_text())
    assert passwords[0] == passwords[1]
    assert len(passwords[0]) == 64
    # Users of two containers read it; on the host nobody else gets as far.
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_nothing_is_asked_of_an_engine_that_20_10_does_not_know() -> None:
    """healthcheck.start_interval wants 25, and Debian 12 has 20.10."""
    for file in (BASE_FILE, OUTSIDE_FILE, *(gpu_file(number) for number in (1, 2, 4, 8))):
        assert "start_interval" not in file.read_text()


def test_doors_without_a_token_are_refused() -> None:
    completed = compose(BASE_FILE, OUTSIDE_FILE)
    assert completed.returncode != 0
    assert "name a file that holds a token" in completed.stderr


def test_a_dead_role_comes_back_and_a_finished_run_does_not(config: dict[str, Any]) -> None:
    for name in ("common", "answers", "store", *ROLES):
        assert config["services"][name]["restart"] == "unless-stopped"
    for name in ("certs", "models"):
        assert config["services"][name]["restart"] == "no"
    # It ends with 0 when its run is made. One that is killed goes on with it.
    assert config["services"]["coordinator"]["restart"] == "on-failure:3"


# --- negative checks: the tool that we trust does refuse ------------------------------------


@pytest.mark.parametrize(
    ("source", "key", "misspelt"),
    [
        (BASE_FILE, "healthcheck:", "healthchek:"),
        (BASE_FILE, "shm_size:", "shmsize:"),
        (BASE_FILE, "condition:", "conditon:"),
        (GPU_FILE, "device_ids:", "device_id:"),
        (GPU_FILE, "capabilities:", "capability:"),
    ],
)
def test_a_misspelt_key_is_refused(tmp_path: Path, source: Path, key: str, misspelt: str) -> None:
    text = source.read_text()
    assert f" {key}" in text
    broken = tmp_path / source.name
    broken.write_text(text.replace(f" {key}", f" {misspelt}", 1))
    files = [broken] if source == BASE_FILE else [BASE_FILE, broken]
    completed = compose(*files)
    assert completed.returncode != 0
    assert misspelt.rstrip(":") in completed.stderr


def test_a_misspelt_setting_of_a_service_is_refused(cpu: dict[str, Any]) -> None:
    environment = dict(cpu["services"]["actor"]["environment"])
    environment["ROLEMESH_SERVICE__DRAIN_TIMEOUT"] = "1"
    with pytest.raises(ValueError, match="did you mean ROLEMESH_SERVICE__DRAIN_TIMEOUT_S"):
        load_config("actor", [], environment)


# --- the image ------------------------------------------------------------------------------


def test_dockerfile_copies_only_what_is_there_and_not_ignored() -> None:
    allowed = {
        line[1:].rstrip("/")
        for line in (REPOSITORY / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    for line in DOCKERFILE.read_text().replace("\\\n", " ").splitlines():
        if not line.startswith("COPY ") or "--from=" in line:
            continue
        for source in map(Path, line.split()[1:-1]):
            assert (REPOSITORY / source).exists(), source
            assert allowed & {str(source), *map(str, source.parents)}, source


def test_images_run_as_a_user_without_rights() -> None:
    stages = DOCKERFILE.read_text().split("\nFROM ")
    for target in ("coordinator", "role"):
        (stage,) = [text for text in stages if text.partition("\n")[0].endswith(f" AS {target}")]
        assert "USER 10001:10001\nENTRYPOINT" in stage


def test_services_start_with_the_same_environment_in_and_outside_of_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("PYTHONFAULTHANDLER", "OMP_WAIT_POLICY")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    recipe = load_recipe([REPOSITORY / "recipes" / "quickstart-ppo.yaml"])
    launched = service_commands(recipe, tmp_path)("actor", tmp_path / "announce").environment
    base = DOCKERFILE.read_text().partition(" AS base\n")[2].partition("\nFROM ")[0]
    served: dict[str, str] = {}

    def execute(path: str, arguments: list[str]) -> None:
        served.update({name: os.environ[name] for name in names})
        assert "ROLEMESH_API_TOKEN" not in os.environ

    monkeypatch.setattr(os, "execv", execute)
    # So that what serve sets is taken back afterwards.
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ["ROLEMESH_API_TOKEN"] = "of a coordinator"
    assert CliRunner().invoke(app, ["serve", "actor"]).exit_code == 0
    for name in names:
        assert f" {name}={launched[name]} " in base
        assert served[name] == launched[name]


@pytest.mark.parametrize("role", ["actor", "critic", "reference", "reward"])
def test_a_role_uses_and_runs_what_lies_beside_the_recipes(cpu: dict[str, Any], role: str) -> None:
    grant = load_config(role, [], cpu["services"][role]["environment"]).grant
    mesh = Path("/mesh")
    assert grant.folders == (mesh / ".models", mesh / "recipes", mesh / "runs")
    assert grant.code_roots == (mesh / "recipes",)
    assert (grant.code_names, grant.variables) == ((), ())
