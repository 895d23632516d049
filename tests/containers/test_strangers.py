"""Tests of who cannot reach what: strangers in the mesh's network, and the reward's own container.

The reward runs functions of users, so what its container cannot do, they cannot do either.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from support.container_mesh import (
    HEALTHY_TIMEOUT_S,
    ROLES,
    SMALL_STEPS,
    ContainerMesh,
    docker,
    wait_until,
)

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1200)]

PLANTED = "/dev/shm/rolemesh-planted"
OTHERS = tuple(role for role in ROLES if role != "reward")

# Tries a role in clear and with a certificate: a member's own, or one of an authority that the
# stranger made. Then it does not ask who serves, and counts what the server says to the beginning
# of a connection: gRPC's servers answer with their settings.
_STRANGER = """
import json, os, pathlib, socket, ssl, sys, tempfile
import grpc
from rolemesh.rpc.members.authority import Authority
from rolemesh.rpc.members.identity import CHANNEL_OPTIONS, Identity
from rolemesh.v1 import worker_pb2, worker_pb2_grpc

own = os.environ.get("ROLEMESH_SERVICE__IDENTITY")
shown = Authority.make().issue("coordinator") if own is None else Identity.read(pathlib.Path(own))

def status(channel):
    with channel:
        try:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            stub.GetCapabilities(worker_pb2.GetCapabilitiesRequest(), timeout=20)
            return "OK"
        except grpc.RpcError as error:
            return error.code().name

def answered(role, with_certificate):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if with_certificate:
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            pathlib.Path(file.name).write_bytes(shown.key + shown.certificate)
            context.load_cert_chain(file.name)
    with socket.create_connection((role, 50051), 20) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="rolemesh") as channel:
                channel.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes(9))
                return len(channel.recv(100))
        except OSError:
            return 0

def reaches(host, port):
    try:
        socket.create_connection((host, port), 5).close()
    except OSError:
        return False
    return True

found = {"store": reaches("store", 6379)}
for role in sys.argv[1:]:
    found[role] = {
        "in clear": status(grpc.insecure_channel(f"{role}:50051")),
        "with a certificate": status(
            grpc.secure_channel(f"{role}:50051", shown.channel_credentials(), CHANNEL_OPTIONS)
        ),
        "bytes without one": answered(role, False),
        "bytes with it": answered(role, True),
    }
print(json.dumps(found))
"""

_REWARD = """
import json, os, pathlib, socket, sys
import grpc
from rolemesh.engine.granted.grants import Grant, NotGrantedError
from rolemesh.rpc.members.identity import CHANNEL_OPTIONS, Identity
from rolemesh.v1 import worker_pb2, worker_pb2_grpc

def can(action):
    try:
        action()
    except OSError:
        return False
    return True

def holds_key(path):
    try:
        return b"PRIVATE KEY" in path.read_bytes()
    except OSError:
        return False

found = {"user": os.getuid(), "groups": sorted({os.getgid(), *os.getgroups()})}
lines = pathlib.Path("/proc/self/status").read_text().splitlines()
found["status"] = dict(line.split(":\\t") for line in lines if line.startswith(("CapEff", "NoNew")))
found["modules"] = sorted(
    words[2].decode()
    for file in pathlib.Path("/proc").glob("[0-9]*/cmdline")
    for words in [file.read_bytes().split(b"\\0")]
    if words[1:2] == [b"-m"]
)
found["shared memory"] = sorted(os.listdir("/dev/shm"))
found["keys"] = sorted(
    os.path.join(folder, name)
    for top in ("/mesh", "/run", "/etc", "/tmp", "/var", "/authority", "/identities")
    for folder, _, names in os.walk(top)
    for name in names
    if holds_key(pathlib.Path(folder, name))
)
found["secrets"] = can(lambda: os.listdir("/run/secrets")) and os.listdir("/run/secrets")
found["variables"] = sorted(name for name in os.environ if "PASSWORD" in name or "TOKEN" in name)
found["written"] = [
    folder
    for folder in sys.argv[1].split(",")
    if can(lambda: pathlib.Path(folder, "planted").write_text("x"))
]
found["reads runs"] = can(lambda: os.listdir("/mesh/runs"))
try:
    Grant(folders=(pathlib.Path("/mesh/runs"),)).folder("/mesh/runs/a/b", "directory", writes=True)
    found["granted"] = ""
except NotGrantedError as error:
    found["granted"] = str(error)
try:
    socket.create_connection(("store", 6379), 5)
    found["store"] = True
except OSError:
    found["store"] = False
own = Identity.read(pathlib.Path(os.environ["ROLEMESH_SERVICE__IDENTITY"]))
for role in sys.argv[2:]:
    address = f"{role}:50051"
    with grpc.secure_channel(address, own.channel_credentials(), CHANNEL_OPTIONS) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            stub.Drain(worker_pb2.DrainRequest(), timeout=20)
            found[role] = "OK"
        except grpc.RpcError as error:
            found[role] = error.code().name
print(json.dumps(found))
"""

_PLANT = "import os, pathlib; pathlib.Path('{0}').write_text('x'); os.chmod('{0}', 0o600)"
_READ = "import pathlib; print(pathlib.Path('{0}').read_text())"
_REMOVE = "import pathlib; pathlib.Path('{0}').unlink()"
_IDENTITY = """
import os, pathlib
print(pathlib.Path(os.environ["ROLEMESH_SERVICE__IDENTITY"]).read_text())
"""


def asked(mesh: ContainerMesh, service: str, program: str, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(mesh.python(service, program, *arguments).stdout)
    return found


@pytest.fixture
def stranger(mesh: ContainerMesh) -> str:
    """A container in the mesh's network that has no identity."""
    mesh.compose("up", "--detach", "--no-deps", "judge")
    return "judge"


@pytest.fixture
def planted(mesh: ContainerMesh) -> Iterator[str]:
    """Shared memory of the actor, which the critic can read."""
    mesh.python("actor", _PLANT.format(PLANTED))
    try:
        assert mesh.python("critic", _READ.format(PLANTED)).stdout == "x\n"
        yield PLANTED
    finally:
        mesh.python("actor", _REMOVE.format(PLANTED))


@pytest.fixture
def reward(mesh: ContainerMesh, planted: str) -> dict[str, Any]:
    """What the reward's container can do."""
    places = ("/mesh/runs", "/mesh/recipes", "/mesh/.models", "/mesh/identity", "/etc", "/opt")
    return asked(mesh, "reward", _REWARD, ",".join((*places, "/tmp")), *OTHERS)


def test_a_stranger_in_the_mesh_s_network_gets_nothing(mesh: ContainerMesh, stranger: str) -> None:
    found = asked(mesh, stranger, _STRANGER, *ROLES)
    assert not found.pop("store")
    refused = {
        "in clear": "UNAVAILABLE",
        "with a certificate": "UNAVAILABLE",
        "bytes without one": 0,
        "bytes with it": 0,
    }
    assert found == dict.fromkeys(ROLES, refused)
    for role in ROLES:
        assert mesh.answer_of_health(role) == "SERVING"
    # A member is heard, by the same program.
    heard = asked(mesh, "reward", _STRANGER, "actor")["actor"]
    assert heard["in clear"] == "UNAVAILABLE"
    assert heard["with a certificate"] in ("OK", "PERMISSION_DENIED")
    assert heard["bytes without one"] == 0
    assert heard["bytes with it"] > 0


def test_the_reward_reaches_nothing_of_the_other_roles(
    mesh: ContainerMesh, reward: dict[str, Any]
) -> None:
    assert (reward["user"], reward["groups"]) == (10002, [10002])
    assert (int(reward["status"]["CapEff"], 16), reward["status"]["NoNewPrivs"]) == (0, "1")
    assert reward["modules"] == ["rolemesh.services.reward"]
    # Answers of judges of its own runs, at most.
    assert [name for name in reward["shared memory"] if "-reward-" not in name] == []
    assert reward["keys"] == ["/mesh/identity/reward.pem"]
    assert not reward["secrets"]
    assert reward["variables"] == []
    assert not reward["store"]
    # What it may say to them is what its role may.
    assert {role: reward[role] for role in OTHERS} == dict.fromkeys(OTHERS, "PERMISSION_DENIED")


def test_the_reward_reads_runs_and_writes_none(reward: dict[str, Any]) -> None:
    assert reward["reads runs"]
    assert reward["written"] == ["/tmp"]
    assert "where this process may not write" in reward["granted"]
    assert "let user 10002 write into /mesh/runs" in reward["granted"]


def test_what_judges_answered_outlives_the_reward_s_container(mesh: ContainerMesh) -> None:
    mesh.python("reward", _PLANT.format(PLANTED))
    try:
        mesh.signal("reward", signal.SIGKILL)
        wait_until(
            lambda: (
                docker(
                    "inspect", "--format", "{{.RestartCount}}", mesh.container("reward")
                ).stdout.strip()
                != "0"
            ),
            "the reward is started again",
            HEALTHY_TIMEOUT_S,
        )
        mesh.wait_healthy("reward")
        assert mesh.python("reward", _READ.format(PLANTED)).stdout == "x\n"
    finally:
        mesh.python("reward", _REMOVE.format(PLANTED))


def test_certificates_are_renewed_beside_a_run_that_a_stranger_calls(
    mesh: ContainerMesh, stranger: str
) -> None:
    before = {role: mesh.python(role, _IDENTITY).stdout for role in ROLES}
    try:
        mesh.begin("renewed", *SMALL_STEPS, "run.steps=3")
        mesh.wait_for_line("renewed", "step 1 reward")
        mesh.compose("run", "--rm", "--no-TTY", "certs")
        after = {role: mesh.python(role, _IDENTITY).stdout for role in ROLES}
        assert all(before[role] != after[role] for role in ROLES)
        # Both sides of these connections have the new ones.
        assert {role: mesh.answer_of_health(role) for role in ROLES} == dict.fromkeys(
            ROLES, "SERVING"
        )
        found = asked(mesh, stranger, _STRANGER, "actor")["actor"]
        assert found["in clear"] == found["with a certificate"] == "UNAVAILABLE"
        ended = mesh.finish("renewed")
    finally:
        mesh.end("renewed")
    assert ended.exit_status == 0, ended.log
    assert "recovering" not in ended.log
    assert "step 3 reward" in ended.log
