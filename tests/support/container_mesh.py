"""The mesh in containers, driven with docker and Docker Compose as its users do.

Nothing here knows pids of the host: the engine may be on another machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.compose_program import compose_binary

REPOSITORY = Path(__file__).resolve().parents[2]
NAMES_FILE = REPOSITORY / ".env"
FILES = (
    REPOSITORY / "docker-compose.yml",
    REPOSITORY / "deploy" / "compose.outside.yaml",
    REPOSITORY / "tests" / "containers" / "compose.tests.yaml",
)
ROLES = ("actor", "critic", "reference", "reward")
RECIPE = "recipes/quickstart-ppo.yaml"
FIRST_RUN = "first"
"""Run of the coordinator that `up` starts, see compose.tests.yaml."""
SMALL_STEPS = (
    *("run.prompts_per_step=4", "algorithm.mini_batch_rows=16", "run.samples=16"),
    "run.evaluation.num_prompts=0",
)
"""Steps of 16 trajectories, all of which are kept as samples."""

KEPT_VARIABLES = (
    *("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_CERT_PATH"),
    *("DOCKER_TLS_VERIFY", "ROLEMESH_IMAGE", "ROLEMESH_COORDINATOR_IMAGE", "ROLEMESH_STORE_IMAGE"),
)
"""What of the caller's environment reaches Compose, where it goes before .env."""

COMMAND_TIMEOUT_S = 120.0
HEALTHY_TIMEOUT_S = 480.0
"""Four starts side by side take 45 s on 2 free cores, and writing the model as long."""
RUN_TIMEOUT_S = 600.0
"""A run of two steps takes 2 minutes on 2 free cores."""
POLL_S = 0.5

# A role is found by its module. A signal from within its container is no manual stop, after which
# the engine would not start it again.
_SIGNAL = """
import os, pathlib, sys
module, number = sys.argv[1].encode(), int(sys.argv[2])
found = []
for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        if file.read_bytes().split(b"\\0")[1:3] == [b"-m", module]:
            found.append(int(file.parent.name))
    except OSError:
        pass
for pid in found:
    os.kill(pid, number)
sys.exit(0 if found else f"there is no process of {sys.argv[1]}")
"""

_ASK = """
import os, pathlib, sys
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rolemesh.rpc.members.identity import CHANNEL_OPTIONS, Identity
own = Identity.read(pathlib.Path(os.environ["ROLEMESH_SERVICE__IDENTITY"]))
with grpc.secure_channel(sys.argv[1], own.channel_credentials(), CHANNEL_OPTIONS) as channel:
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=30
        )
        print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    except grpc.RpcError as error:
        print(error.code().name)
"""

Completed = subprocess.CompletedProcess[str]


class ContainersError(RuntimeError):
    """docker or Compose did not do what it was asked for."""


def execute(
    command: Sequence[str],
    *,
    timeout_s: float = COMMAND_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
    check: bool = True,
) -> Completed:
    """Runs a program at the repository's root; raises ContainersError with all that it said."""
    completed = subprocess.run(
        list(command),
        cwd=REPOSITORY,
        env=None if environment is None else dict(environment),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if check and completed.returncode != 0:
        raise ContainersError(
            f"{' '.join(command)} ended with {completed.returncode}:\n"
            f"{completed.stdout}{completed.stderr}"
        )
    return completed


def docker(*arguments: str, timeout_s: float = COMMAND_TIMEOUT_S, check: bool = True) -> Completed:
    """Runs docker."""
    return execute(["docker", *arguments], timeout_s=timeout_s, check=check)


def wait_until(
    condition: Callable[[], bool], what: str, timeout_s: float, detail: Callable[[], str] = str
) -> None:
    """Waits for a condition; raises ContainersError, with `detail`, when it stays untrue."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise ContainersError(f"not within {timeout_s:.0f} s: {what}\n{detail()}")
        time.sleep(POLL_S)


def caller_environment() -> dict[str, str]:
    """What of this process's environment Compose gets."""
    return {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}


def compose_command(project: str) -> list[str]:
    """Compose with the files of this mesh, and the images' names where `make images` put them."""
    names = NAMES_FILE if NAMES_FILE.is_file() else Path(os.devnull)
    command = [compose_binary(), "--project-name", project, "--env-file", str(names)]
    for file in FILES:
        command += ["--file", str(file)]
    return command


@dataclass(frozen=True, kw_only=True)
class Images:
    """Names of the images that this mesh is made of."""

    role: str
    coordinator: str
    store: str


def resolve_images(variables: Mapping[str, str] | None = None) -> Images:
    """The images that Compose would start; raises ContainersError when one is not there."""
    environment = {
        "ROLEMESH_API_TOKEN_FILE": os.devnull,
        "ROLEMESH_STORE_PASSWORD_FILE": os.devnull,
        **caller_environment(),
    }
    completed = execute(
        [*compose_command("rolemesh-images"), "config", "--format", "json"],
        environment=environment | dict(variables or {}),
    )
    services = json.loads(completed.stdout)["services"]
    images = Images(
        role=services["actor"]["image"],
        coordinator=services["coordinator"]["image"],
        store=services["store"]["image"],
    )
    for name in (images.role, images.coordinator):
        if docker("image", "inspect", name, check=False).returncode != 0:
            raise ContainersError(
                f"the engine has no image {name!r}: build it with `make images`, or name another "
                "with ROLEMESH_IMAGE and ROLEMESH_COORDINATOR_IMAGE"
            )
    return images


def left_overs(project: str) -> list[str]:
    """Containers, networks and volumes that carry the label of a project."""
    chosen = ("--quiet", "--filter", f"label=com.docker.compose.project={project}")
    return [
        f"{kind} {name}"
        for kind, listing in (
            ("container", ("ps", "--all")),
            ("network", ("network", "ls")),
            ("volume", ("volume", "ls")),
        )
        for name in docker(*listing, *chosen).stdout.split()
    ]


@dataclass(frozen=True, kw_only=True)
class ContainerRun:
    """A run in a coordinator's container that does not go when the run ends."""

    run_id: str
    container: str
    log: str
    exit_status: int


class ContainerMesh:
    """One Compose project. Made by `container_mesh`, which also takes it down."""

    def __init__(self, project: str, token_file: Path, password_file: Path) -> None:
        self.project = project
        self.token = token_file.read_text().strip()
        # Any free port of the host: other meshes may be there.
        ports = {"ROLEMESH_HTTP_PORT": "0", "ROLEMESH_GRPC_PORT": "0"}
        self._environment = {
            **caller_environment(),
            **ports,
            "ROLEMESH_API_TOKEN_FILE": str(token_file),
            "ROLEMESH_STORE_PASSWORD_FILE": str(password_file),
        }

    def compose(
        self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S, check: bool = True
    ) -> Completed:
        """Runs Compose on this project."""
        command = [*compose_command(self.project), *arguments]
        return execute(command, timeout_s=timeout_s, environment=self._environment, check=check)

    def start(self) -> None:
        """Starts the store and all roles, and waits until each is healthy."""
        started = ("store", *ROLES)
        try:
            self.compose("up", "--detach", "--wait", *started, timeout_s=HEALTHY_TIMEOUT_S)
        except (ContainersError, subprocess.TimeoutExpired) as error:
            logs = self.compose("logs", "--tail", "20", check=False)
            states = self.compose("ps", "--all", check=False)
            raise ContainersError(f"{error}\n{states.stdout}\n{logs.stdout}") from error

    def container(self, service: str) -> str:
        """Id of a service's container: the one of `up`, not one of `run`."""
        labels = {"project": self.project, "service": service, "oneoff": "False"}
        filters = [
            word
            for name, value in labels.items()
            for word in ("--filter", f"label=com.docker.compose.{name}={value}")
        ]
        return docker("ps", "--all", "--quiet", *filters).stdout.strip()

    def state(self, service: str) -> dict[str, Any]:
        """What the engine says of a service's container."""
        text = docker("inspect", "--format", "{{json .State}}", self.container(service)).stdout
        state: dict[str, Any] = json.loads(text)
        return state

    def health(self, service: str) -> str:
        """starting, healthy or unhealthy."""
        return str(self.state(service)["Health"]["Status"])

    def wait_healthy(self, service: str) -> None:
        """Waits until a service is healthy."""
        wait_until(
            lambda: self.health(service) == "healthy",
            f"{service} is healthy",
            HEALTHY_TIMEOUT_S,
            lambda: json.dumps(self.state(service), indent=2),
        )

    def signal(self, role: str, number: int) -> None:
        """Sends a signal to a role's process."""
        arguments = (f"rolemesh.services.{role}", str(int(number)))
        # A container that has just started may not have come to that process yet.
        said: list[str] = []

        def sent() -> bool:
            completed = self.python(role, _SIGNAL, *arguments, check=False)
            said.append(completed.stderr)
            # What is killed may take its container, and so the sender, along.
            return completed.returncode in (0, 128 + signal.SIGKILL)

        wait_until(sent, f"signal {number} reaches {role}", COMMAND_TIMEOUT_S, lambda: said[-1])

    def answer_of_health(self, role: str) -> str:
        """What a role says of its health to a neighbour, without the containers' own check."""
        return self.python(_neighbour(role), _ASK, f"{role}:50051").stdout.strip()

    def python(self, service: str, program: str, *arguments: str, check: bool = True) -> Completed:
        """Runs a program of Python in a service's container, as its user."""
        command = ("exec", "--no-TTY", service, "python", "-c", program, *arguments)
        return self.compose(*command, check=check)

    def begin(self, run_id: str, *overrides: str) -> str:
        """Starts a run in a container of its own; returns the container's name."""
        container = f"{self.project}-{run_id}"
        options = [part for override in overrides for part in ("--set", override)]
        self.compose(
            # Roles are there already. Compose would also look for the model again, 20 s a run.
            *("run", "--detach", "--no-deps", "--service-ports", "--name", container),
            *("coordinator", "train", "--restartable", RECIPE),
            *("--run-id", run_id, "--out", f"runs/{run_id}", *options),
        )
        return container

    def finish(self, run_id: str) -> ContainerRun:
        """Waits until a run has ended, however it ended."""
        container = f"{self.project}-{run_id}"
        status = int(docker("wait", container, timeout_s=RUN_TIMEOUT_S).stdout)
        return ContainerRun(
            run_id=run_id, container=container, log=container_log(container), exit_status=status
        )

    def wait_for_line(self, run_id: str, text: str) -> None:
        """Waits until a run in a container of its own says something; fails when it ended."""
        container = f"{self.project}-{run_id}"

        def said() -> bool:
            is_over = not is_running(container)
            if text in container_log(container):
                return True
            if is_over:
                raise ContainersError(f"{container} ended:\n{container_log(container)}")
            return False

        wait_until(said, f"{run_id}: {text!r}", RUN_TIMEOUT_S, lambda: container_log(container))

    def end(self, run_id: str) -> None:
        """Ends a run that may still go on, so that roles are free, and removes its container."""
        container = f"{self.project}-{run_id}"
        # After SIGTERM the step in progress is finished and all is saved.
        docker("stop", "--time", "60", container, check=False)
        docker("rm", "--force", container, check=False)

    def train(self, run_id: str, *overrides: str) -> ContainerRun:
        """Makes a run and waits for its end."""
        self.begin(run_id, *overrides)
        return self.finish(run_id)


def _neighbour(role: str) -> str:
    """A role beside another one."""
    return "reward" if role != "reward" else "actor"


def container_log(container: str) -> str:
    """All that a container said."""
    completed = docker("logs", container)
    return completed.stdout + completed.stderr


def is_running(container: str) -> bool:
    """Whether a container runs."""
    return docker("inspect", "--format", "{{.State.Running}}", container).stdout.strip() == "true"


def published_port(container: str, port: int) -> str:
    """Where on this host a container's port is: host:port."""
    return docker("port", container, str(port)).stdout.split()[0]


@contextlib.contextmanager
def container_mesh(project: str, folder: Path) -> Iterator[ContainerMesh]:
    """A project with a token of its own; whatever happens, nothing of it stays.

    Raises:
        ContainersError: Something did stay.
    """
    token_file, password_file = folder / "token", folder / "store-password"
    for file in (token_file, password_file):
        file.write_text(secrets.token_hex(32))
        # Containers have other users than the one who runs the tests.
        file.chmod(0o644)
    mesh = ContainerMesh(project, token_file, password_file)
    try:
        yield mesh
    finally:
        completed = mesh.compose(
            # What is broken need not end by itself.
            *("down", "--volumes", "--remove-orphans", "--timeout", "20"),
            timeout_s=300.0,
            check=False,
        )
        rest = left_overs(project)
        if rest:
            text = f"down left {rest}:\n{completed.stdout}{completed.stderr}"
            print(text, file=sys.stderr)
            raise ContainersError(text)
