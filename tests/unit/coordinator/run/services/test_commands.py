"""Commands that start services: arguments and variables, as the recipe says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.fake_recipes import PPO
from support.fake_roles import fake_recipe

from rolemesh.coordinator.run.services.commands import service_commands, visible_devices


def test_command_says_what_the_recipe_says(tmp_path: Path) -> None:
    recipe = fake_recipe(
        services={"actor": {"threads": 2, "experience_capacity_mib": 3}},
        pools={
            "training": {"roles": ["actor", "critic"], "devices": ["cuda:1", "cuda:2"]},
            "judging": {"roles": ["reference", "reward"]},
        },
    )
    command = service_commands(recipe, tmp_path)("actor", tmp_path / "announce.json")
    assert command.arguments[:3] == [sys.executable, "-m", "rolemesh.services.actor"]
    words = [word for word in command.arguments[3:] if "=" not in word or word.startswith("pp=")]
    flags = dict(zip(words[::2], words[1::2], strict=True))
    assert flags["--threads"] == "2"
    assert flags["--experience-capacity-bytes"] == str(3 * 2**20)
    assert flags["--announce"] == str(tmp_path / "announce.json")
    assert flags["--parent-pid"] == str(os.getpid())
    assert command.environment["OMP_NUM_THREADS"] == "2"
    assert command.environment["HF_HUB_OFFLINE"] == "1"
    assert visible_devices(recipe, "actor") == "1,2"
    assert visible_devices(recipe, "actor", "GPU-a,GPU-b,GPU-c") == "GPU-b,GPU-c"
    assert visible_devices(recipe, "reward") == ""
    with pytest.raises(ValueError, match="shows 1 devices"):
        visible_devices(recipe, "critic", "3")


@pytest.mark.parametrize("name", ["ROLEMESH_API_TOKEN", "rolemesh_store", "A-B", ""])
def test_variables_of_rolemesh_itself_are_handed_to_none(name: str) -> None:
    with pytest.raises(ValueError, match="variables"):
        fake_recipe(services={"actor": {"variables": [name]}})


@pytest.mark.parametrize(
    ("given", "num_pools", "expected"),
    [
        ({}, 1, ("PASSIVE", "4000")),
        # Roles of two pools compute at once: a thread that waits gives its core away.
        ({}, 2, ("PASSIVE", None)),
        ({"GOMP_SPINCOUNT": "0"}, 1, ("PASSIVE", "0")),
        ({"OMP_WAIT_POLICY": "active"}, 1, ("active", None)),
    ],
)
def test_threads_wait_awake_only_where_roles_take_turns(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
    num_pools: int,
    expected: tuple[str, str | None],
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    split = {
        "training": {"roles": ["actor", "critic"]},
        "judging": {"roles": ["reference", "reward"]},
    }
    recipe = fake_recipe(pools=split if num_pools == 2 else None)
    environment = service_commands(recipe, tmp_path)("actor", tmp_path / "announce").environment
    found = (environment["OMP_WAIT_POLICY"], environment.get("GOMP_SPINCOUNT"))
    assert found == expected


@pytest.mark.parametrize(
    ("devices", "given", "expected"),
    [
        (["cpu"], {}, ("1", "0", str(2**30), "glibc.malloc.hugetlb=1")),
        (
            ["cpu"],
            {"MALLOC_MMAP_MAX_": "65536", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=1"},
            ("1", "65536", str(2**30), "glibc.malloc.tcache_count=1"),
        ),
        (["cuda:0"], {}, ("2", None, None, None)),
        (["cuda:0"], {"MALLOC_ARENA_MAX": "4"}, ("4", None, None, None)),
    ],
)
def test_a_service_on_a_cpu_keeps_what_it_freed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    devices: list[str],
    given: dict[str, str],
    expected: tuple[str | None, ...],
) -> None:
    names = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    roles = ["actor", "critic", "reference", "reward"]
    recipe = fake_recipe(pools={"all": {"devices": devices, "roles": roles}})
    environment = service_commands(recipe, tmp_path)("actor", tmp_path / "announce").environment
    # What is not said here the service has from the user's shell.
    assert tuple(environment.get(name) for name in names) == expected


def test_flags_are_those_that_services_know(tmp_path: Path) -> None:
    from rolemesh.services.runtime.server.config import load_config

    recipe = fake_recipe(services={"critic": {"threads": 1}})
    command = service_commands(recipe, tmp_path)("critic", tmp_path / "announce.json")
    config = load_config("critic", command.arguments[3:], {})
    assert (config.threads, config.announce, config.host) == (
        1,
        tmp_path / "announce.json",
        "127.0.0.1",
    )


def test_a_layout_in_the_environment_is_not_that_of_a_run(tmp_path: Path) -> None:
    from rolemesh.services.runtime.server.config import load_config

    command = service_commands(fake_recipe(), tmp_path)("critic", tmp_path / "announce.json")
    config = load_config("critic", command.arguments[3:], {"ROLEMESH_SERVICE__LAYOUT": "tp=2"})
    assert config.world_size == command.num_ranks == 1


def test_a_service_may_use_what_its_section_names_and_nothing_else(tmp_path: Path) -> None:
    from rolemesh.services.runtime.server.config import ServiceConfig, load_config

    everything = {
        f"ROLEMESH_SERVICE__{name}": "/" for name in ("FOLDERS", "CODE_ROOTS", "CODE_NAMES")
    } | {"ROLEMESH_SERVICE__VARIABLES": "HOME", "ROLEMESH_SERVICE__FUNCTION_NETWORK": "true"}
    recipe = fake_recipe(
        algorithm={
            **PPO,
            "policy_loss": {"type": "python", "function": "my/losses.py:soft"},
            "advantages": "python:my.estimators:centred",
        },
        reward={
            "source": [
                {
                    "source": {
                        "type": "python",
                        "function": "--port=1:judge",
                        "environment": ["MINE"],
                        "readable": ["words.txt"],
                        "network": True,
                    }
                },
                {"source": {"type": "slime", "urls": "https://h/r", "token_variable": "MY_TOKEN"}},
            ]
        },
    )

    def settings(role: str) -> ServiceConfig:
        command = service_commands(recipe, tmp_path / "run")(role, tmp_path / "announce.json")
        variables = everything | dict(command.environment)
        return load_config(role, command.arguments[3:], variables)

    actor, critic, reward = (settings(role) for role in ("actor", "critic", "reward"))
    names = ("my/losses.py:soft", "my.estimators:centred")
    assert (set(actor.code_names), critic.code_names) == (set(names), ())
    assert reward.code_names == ("--port=1:judge",)
    assert reward.variables == ("MINE", "MY_TOKEN")
    assert (actor.variables, critic.variables) == ((), ())
    assert actor.code_roots == reward.code_roots == ()
    run = tmp_path / "run"
    assert actor.folders == (run, Path("/models/none"), Path("/data/none.jsonl"))
    assert (critic.folders, reward.folders) == (
        (run, Path("/models/none")),
        (run, Path("words.txt")),
    )
    assert (critic.function_network, reward.function_network) == (False, True)
