"""`rolemesh render compose --hosts`: each service on its hosts, and everyone knows where."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.compose_files import BASE_FILE, IMAGES, REPOSITORY, compose, mounts, resolve
from typer.testing import CliRunner

from rolemesh.coordinator.commands.cli import app
from rolemesh.coordinator.recipe.loading import load_recipe

PPO = "recipes/quickstart-ppo.yaml"
ADDRESSES = ("10.0.0.1", "10.0.0.2")
ROLES = ("actor", "critic", "reference", "teacher", "reward", "cost", "rollout")
TWO_REWARDS = (
    "--set=services.reward.replicas=2",
    "--set=schedule.sampler={type: sync, batch_size: 4}",
    "--set=pools={judges: {roles: [reward]}, others: {roles: [actor, critic, reference]}}",
)
POOLS = (
    "{critic: {roles: [critic], devices: ['cuda:1']}, others: {roles: [actor, reference, reward]}}"
)
SHARED = {"ROLEMESH_RUNS": "/shared/runs", "ROLEMESH_IDENTITIES": "/home/me/identities"}


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def render(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["render", "compose", PPO, *arguments])


def hosts(folder: Path, *arguments: str, number: int = 2) -> list[dict[str, Any]]:
    """The services that each host starts, without a profile."""
    out = folder / "mesh.yaml"
    addresses = ",".join(f"10.0.0.{index + 1}" for index in range(number))
    result = render(f"--hosts={addresses}", f"--out={out}", *arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    return [
        resolve(BASE_FILE, folder / f"mesh.{index}.yaml", variables=SHARED, profiles=())["services"]
        for index in range(number)
    ]


def listens(service: dict[str, Any]) -> str:
    environment = service["environment"]
    return f"{environment['ROLEMESH_SERVICE__HOST']}:{environment['ROLEMESH_SERVICE__PORT']}"


def test_each_role_is_on_its_host_and_the_coordinator_calls_it_there(tmp_path: Path) -> None:
    first, second = hosts(tmp_path, "--on=critic=1", "--on=reference=1")
    assert {name for name in first if name in ROLES} == {"actor", "reward"}
    assert {name for name in second if name in ROLES} == {"critic", "reference"}
    assert set(second) == {"critic", "reference", "certs", "models", "common", "answers"}
    assert {"coordinator", "store"} <= set(first)
    called = first["coordinator"]["environment"]
    for role, service in (first | second).items():
        if role in ROLES:
            assert service["network_mode"] == "host"
            assert not service.get("networks")
            assert "hostname" not in service
            assert called[f"ROLEMESH_SERVICES__{role.upper()}__ADDRESS"] == listens(service)
            assert service["healthcheck"]["test"][-1] == listens(service)
    assert listens(second["critic"]).startswith("10.0.0.2:")
    ports = [
        service["environment"][name]
        for role, service in first.items()
        for name in ("ROLEMESH_SERVICE__PORT", "ROLEMESH_SERVICE__METRICS_PORT")
        if role in ROLES
    ]
    assert len(ports) == len(set(ports))
    # The coordinator waits for the roles of its own host alone; the others' hosts it cannot ask.
    waits = first["coordinator"]["depends_on"]
    assert {name for name in waits if waits[name]["required"]} == {"actor", "reward", "store"}


def test_the_store_is_reached_from_the_first_host_alone(tmp_path: Path) -> None:
    first, _ = hosts(tmp_path, "--on=critic=1")
    (port,) = first["store"]["ports"]
    assert (port["host_ip"], port["published"]) == ("127.0.0.1", "6379")
    assert first["coordinator"]["network_mode"] == "host"
    url = first["coordinator"]["environment"]["ROLEMESH_STORE__URL"]
    assert url == "redis://rolemesh@127.0.0.1:6379/0"


def test_one_authority_signs_and_each_host_gets_the_identities_of_its_roles(
    tmp_path: Path,
) -> None:
    first, second = hosts(tmp_path, "--on=critic=1", "--on=reward=1")
    assert "certs issue" in first["certs"]["command"][0]
    assert second["certs"]["command"] == [
        "cd /given && cp critic.pem /identities/critic/.critic.pem"
        " && chown 10001:10001 /identities/critic/.critic.pem"
        " && mv -f /identities/critic/.critic.pem /identities/critic/critic.pem"
        " && cp reward.pem /identities/reward/.reward.pem"
        " && chown 10002:10002 /identities/reward/.reward.pem"
        " && mv -f /identities/reward/.reward.pem /identities/reward/reward.pem"
    ]
    assert mounts(second["certs"])["/given"] == ("/home/me/identities", False)
    header = (tmp_path / "mesh.0.yaml").read_text()
    assert "-C /authority -c critic.pem reward.pem > identities.1.tar" in header


def test_the_ranks_of_a_role_on_two_hosts_meet_at_the_first(tmp_path: Path) -> None:
    first, second = hosts(
        tmp_path, "--on=actor=0,1", "--on=critic=2", "--on=reference=2", "--gpus=2", number=3
    )[:2]
    for number, host in enumerate((first, second)):
        environment = host["actor"]["environment"]
        given = {
            name: environment[f"ROLEMESH_SERVICE__{name}"]
            for name in ("HOST", "HOSTS", "HOST_RANK", "MEET")
        }
        assert given == {
            "HOST": ADDRESSES[number],
            "HOSTS": "2",
            "HOST_RANK": str(number),
            "MEET": "10.0.0.1:29400",
        }
        assert "dp=4" in environment["ROLEMESH_SERVICE__LAYOUT"]
        (devices,) = host["actor"]["deploy"]["resources"]["reservations"]["devices"]
        assert devices["device_ids"] == ["0", "1"]
    # The coordinator calls the first host of a service.
    assert first["actor"]["healthcheck"]["test"][-1] == listens(first["actor"])
    assert second["actor"]["healthcheck"]["disable"] is True


def test_several_services_of_a_role_are_each_on_a_host(tmp_path: Path) -> None:
    first, second = hosts(tmp_path, "--on=reward=0,1", *TWO_REWARDS)
    named = first["coordinator"]["environment"]["ROLEMESH_SERVICES__REWARD__ADDRESSES"]
    assert named == str([listens(host["reward"]) for host in (first, second)])
    command = first["coordinator"]["command"]
    settings = [word for flag, word in itertools.pairwise(command) if flag == "--set"]
    addresses = f"services.reward.addresses={named}"
    meant = load_recipe([Path(PPO)], overrides=[*settings, addresses])
    assert meant.services_of("reward") == ("reward-0", "reward-1")


@pytest.mark.parametrize("role", ["reference", "critic"])
def test_runs_are_on_a_shared_disk_where_checkpoints_are_written_on_several_hosts(
    tmp_path: Path, role: str
) -> None:
    first, second = hosts(tmp_path, f"--on={role}=1")
    is_trained = role == "critic"
    assert mounts(second[role])["/mesh/runs"] == (
        ("/shared/runs", True) if is_trained else ("runs", False)
    )
    for name in ("coordinator", "actor"):
        folder = "/shared/runs" if is_trained else "runs"
        assert mounts(first[name])["/mesh/runs"] == (folder, True)
    asks = "export ROLEMESH_RUNS=" in (tmp_path / "mesh.1.yaml").read_text()
    assert asks == is_trained
    without = {name: value for name, value in SHARED.items() if name != "ROLEMESH_RUNS"}
    asked = compose(BASE_FILE, tmp_path / "mesh.0.yaml", variables=IMAGES | without, profiles=())
    assert (asked.returncode != 0) == is_trained
    assert ("name a folder of a disk that all hosts share" in asked.stderr) == is_trained


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts=10.0.0.1,10.0.0.2"], "give --hosts and --on together"),
        (["--on=critic=1", "--out=mesh.yaml"], "give --hosts and --on together"),
        (["--hosts=10.0.0.1,10.0.0.2", "--on=critic=1"], "give --out, e.g. mesh.yaml"),
        (["--hosts=10.0.0.1", "--on=critic=1"], "--on puts roles on 2 hosts"),
        (["--hosts=10.0.0.1,10.0.0.1", "--on=critic=1"], "give each host's address once"),
        (["--hosts=10.0.0.1,gpu-2", "--on=critic=1"], "--hosts has 'gpu-2': give the IPv4"),
        (["--hosts=127.0.0.1,10.0.0.2", "--on=critic=1"], "--hosts has '127.0.0.1'"),
        (["--hosts=10.0.0.1,10.0.0.2", "--on=critic=2"], "--on leaves host 1 without a role"),
        (["--hosts=10.0.0.1,10.0.0.2", "--on=critic=x"], "give a host, counted from 0"),
        (
            ["--hosts=10.0.0.1,10.0.0.2", "--on=critic=1", *TWO_REWARDS],
            "--on puts 2 services of the reward on host 0",
        ),
        (["--hosts=10.0.0.1,10.0.0.2", "--on=actor=0,1"], "each host gets as many ranks"),
        (
            [
                "--hosts=10.0.0.1,10.0.0.2",
                "--on=critic=1",
                "--gpus=2",
                "--devices=0,1",
                "--set=actor.train.tp=4",
            ],
            "--gpus is 2, but the recipe's layouts want",
        ),
        (
            ["--hosts=10.0.0.1,10.0.0.2", "--on=critic=1", "--devices=0", f"--set=pools={POOLS}"],
            "critic wants GPU 1 of a host, counted from 0, but --devices names 1",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value)[:60],
)
def test_bad_input_is_refused_with_field_value_and_remedy(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    if not any(one.startswith("--out") for one in arguments) and "--out" not in message:
        arguments = [*arguments, f"--out={tmp_path / 'mesh.yaml'}"]
    result = render(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []
