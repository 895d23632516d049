"""Sandboxes of reward functions: what a function tries to reach, in each kind and without one."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.mesh_runs import CliRun, tiny_model, tiny_recipe
from support.outside_rows import reward_rows
from support.services import serving

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.sandbox.bubblewrap import bubblewrap, why_not
from rolemesh.engine.sandbox.host import Sandbox, find_sandbox
from rolemesh.engine.sandbox.landlock import PORTS_ABI, SCOPES_ABI, landlock_abi
from rolemesh.engine.sessions.programs import run_program
from rolemesh.engine.sessions.results import AgentWork
from rolemesh.engine.specs import ProgramAgentSpec, PythonRewardSpec
from rolemesh.services.reward.outside.base import Judgement
from rolemesh.services.reward.outside.functions.reward import FunctionReward
from rolemesh.services.runtime.service_server import ServiceStartError

ESCAPING = Path(__file__).parents[1] / "support" / "escaping_rewards.py"
ABI = landlock_abi()
NONE = Sandbox(kind="none", lacks="the control of these tests")
RUN_S = 300.0
"""Longest a tiny run may take on a busy machine."""
EXPERIENCE = b"of another run"
_READ_AND_WRITE, _CREATE = 0o600, 0o1000
"""Of a shared memory with a number."""


def _bubblewrap() -> str:
    program = bubblewrap()
    return "bwrap is not installed" if program is None else why_not(program)


KINDS = [
    pytest.param(
        Sandbox(kind="landlock", abi=ABI),
        id="landlock",
        marks=pytest.mark.skipif(ABI == 0, reason="this kernel has no Landlock"),
    ),
    pytest.param(
        # As in Linux 5.13.
        Sandbox(kind="landlock", abi=1),
        id="first-landlock",
        marks=pytest.mark.skipif(ABI == 0, reason="this kernel has no Landlock"),
    ),
    pytest.param(
        Sandbox(kind="bubblewrap", program=bubblewrap() or ""),
        id="bubblewrap",
        marks=pytest.mark.skipif(bool(_bubblewrap()), reason=_bubblewrap()),
    ),
]


async def judged(name: str, sandbox: Sandbox, *completions: str, **spec: Any) -> Judgement:
    """What the function says of completions."""
    reward = FunctionReward("it", PythonRewardSpec(function=name, **spec), sandbox)
    try:
        return await reward.judge(reward_rows(*completions))
    finally:
        await reward.close()


# --- escapes ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Victim:
    """What a function must not reach: each is made anew for each kind of sandbox."""

    attempts: dict[str, tuple[Any, ...]]
    """Name of the attempt, and arguments, by what is tried."""
    process: subprocess.Popen[bytes]
    secret: Path
    segment: Path
    folder: Path


@contextmanager
def victim(folder: Path) -> Iterator[Victim]:
    with ExitStack() as stack:
        identity = folder / "identity"
        identity.mkdir(mode=0o700)
        secret = identity / "reward.pem"
        secret.write_text("a key")
        secret.chmod(0o600)
        (code := folder / "code").mkdir()
        function = code / ESCAPING.name
        shutil.copy(ESCAPING, function)
        (code / "key.pem").write_text("a key")
        for name in ("emptied", "emptied-by-reading", "opened", "moved", "removed"):
            (folder / name).write_text("content")
        segment = Path(f"/dev/shm/rolemesh-test-{uuid.uuid4().hex}")
        segment.write_bytes(EXPERIENCE)
        stack.callback(segment.unlink)
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        stack.callback(process.wait)
        stack.callback(process.kill)
        libc = ctypes.CDLL(None)
        key = int(uuid.uuid4().int & 0x7FFFFFFF)
        memory = libc.shmget(key, 4096, _READ_AND_WRITE | _CREATE)
        assert memory >= 0
        stack.callback(libc.shmctl, memory, 0, None)
        attempts = {
            "a key": ("read", str(secret)),
            "a key beside the code": ("read", str(code / "key.pem")),
            "a key, by a child": ("read_in_a_child", str(secret)),
            "another run's memory": ("read", str(segment)),
            "into another run's memory": ("write", str(segment)),
            "the environment of a process": ("read", f"/proc/{process.pid}/environ"),
            "a file": ("write", str(folder / "planted")),
            "its own code": ("write", str(function)),
            "an emptied file": ("empty", str(folder / "emptied")),
            "a file emptied by reading": ("empty_while_reading", str(code / "key.pem")),
            "a moved file": ("move", str(folder / "moved")),
            "a removed file": ("remove", str(folder / "removed")),
            "a mode": ("change_mode", str(folder / "opened")),
            "the mode of its own code": ("change_mode_of_an_open_file", str(function)),
            "a port": ("connect", _listener(stack)),
            "a datagram": ("send_datagram", _echo(stack)),
            "a socket in a folder": ("connect_to_file", _socket(stack, f"{folder}/store")),
            "a log's socket": ("send_datagram_to_file", _log_socket(stack, f"{folder}/log")),
            "an abstract socket": ("connect_to_file", _socket(stack, f"\0{uuid.uuid4()}")),
            "the list of processes": ("list_processes", process.pid),
            "limits of a process": ("limit", process.pid),
            "shared memory by its number": ("attach_memory", key),
            "a signal": ("stop", process.pid),
        }
        yield Victim(attempts, process, secret, segment, folder)


def _listener(stack: ExitStack) -> int:
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    return int(server.getsockname()[1])


def _echo(stack: ExitStack) -> int:
    server = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    server.bind(("127.0.0.1", 0))
    server.settimeout(30)

    def answer() -> None:
        with closing(server):
            server.sendto(*server.recvfrom(1))

    threading.Thread(target=_quietly, args=(answer,), daemon=True).start()
    return int(server.getsockname()[1])


def _quietly(work: Any) -> None:
    try:
        work()
    except OSError:
        # No datagram came.
        return


def _socket(stack: ExitStack, path: str) -> str:
    server = stack.enter_context(socket.socket(socket.AF_UNIX))
    server.bind(path)
    server.listen()
    return path


def _log_socket(stack: ExitStack, path: str) -> str:
    server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    server.bind(path)
    return path


async def reached(victim_: Victim, sandbox: Sandbox) -> set[str]:
    """What a function reaches of a victim."""
    name = f"{victim_.folder}/code/{ESCAPING.name}:escape"
    completions = [json.dumps(attempt) for attempt in victim_.attempts.values()]
    judgement = await judged(name, sandbox, *completions)
    assert not judgement.failures, judgement.failures
    tried = zip(victim_.attempts, judgement.rewards, strict=True)
    return {what for what, reward in tried if reward == 1.0}


@pytest.mark.parametrize("sandbox", KINDS)
async def test_a_function_reaches_nothing_of_the_mesh(tmp_path: Path, sandbox: Sandbox) -> None:
    with victim(tmp_path) as it:
        # Before Linux 6.12 Landlock knows no signals, and `find_sandbox` says so.
        known = {"a signal"} if 0 < sandbox.abi < SCOPES_ABI else set()
        # bubblewrap gives a /tmp and a /dev/shm of the function's own.
        private = {"a file", "into another run's memory"}
        found = await reached(it, sandbox)
        assert found - (private if sandbox.kind == "bubblewrap" else set()) == known
        if known:
            it.process.wait(timeout=10)
        assert (it.process.poll() is None) == (not known)
        assert it.secret.read_text() == "a key"
        assert it.segment.read_bytes() == EXPERIENCE
        assert not (tmp_path / "planted").exists()
        assert (tmp_path / "opened").stat().st_mode & 0o777 != 0o666


async def test_without_a_sandbox_a_function_reaches_all_of_it(tmp_path: Path) -> None:
    with victim(tmp_path) as it:
        assert await reached(it, NONE) == set(it.attempts)


# --- what remains possible ----------------------------------------------------------------

HONEST = """
import json, os, pathlib, socket, subprocess, tempfile
import neighbour
from package.inner import THREE

def usual(completions, **columns):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "program.sh")
        path.write_text("echo 2")
        two = int(subprocess.run(["sh", str(path)], check=True, capture_output=True).stdout)
        path.rename(path.with_name("renamed.sh"))
    pathlib.Path.home().joinpath("cache").write_text("x")
    child = subprocess.Popen(["sleep", "100"])
    child.kill()
    assert child.wait() == -9
    assert json.loads(pathlib.Path("/proc/self/stat").read_text().split()[0]) == os.getpid()
    return [float(neighbour.ONE + two + THREE)] * len(completions)

def words(completions, **columns):
    return [float(len(pathlib.Path(text).read_text())) for text in completions]

def connects(completions, **columns):
    socket.create_connection(("127.0.0.1", int(completions[0])), timeout=5).close()
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(completions[1])
    except OSError:
        return [1.0, 1.0]
    return [2.0, 2.0]
"""


@pytest.fixture
def honest(tmp_path: Path) -> Path:
    """A file of functions with a neighbour, a package and a file of words."""
    folder = tmp_path / "honest"
    (folder / "package").mkdir(parents=True)
    (folder / "mine.py").write_text(HONEST)
    (folder / "neighbour.py").write_text("ONE = 1\n")
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "inner.py").write_text("THREE = 3\n")
    (folder / "words.txt").write_text("words")
    return folder


@pytest.mark.parametrize("sandbox", KINDS)
async def test_a_function_has_python_programs_and_a_folder_of_its_own(
    honest: Path, tmp_path: Path, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own := tmp_path / "own").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(own))
    found = await judged(f"{honest}/mine.py:usual", sandbox, "a")
    assert found.rewards == [6.0], found.failures
    assert list(own.iterdir()) == []


@pytest.mark.parametrize("sandbox", KINDS)
async def test_a_function_reads_what_is_shown_to_it(honest: Path, sandbox: Sandbox) -> None:
    name, words = f"{honest}/mine.py:words", honest / "words.txt"
    refused = await judged(name, sandbox, str(words))
    assert "words.txt" in str(refused.failures[0])
    assert "it can read what `readable` names" in str(refused.failures[0])
    assert (await judged(name, sandbox, str(words), readable=(words,))).rewards == [5.0]
    of_owner = replace(sandbox, code_roots=(honest,))
    assert (await judged(name, of_owner, str(words))).rewards == [5.0]
    missing = await judged(name, sandbox, str(words), readable=(honest / "none",))
    assert "in readable, which is not there" in str(missing.failures[0])


@pytest.mark.parametrize("sandbox", KINDS)
async def test_a_function_with_a_network_still_reaches_no_socket_of_a_store(
    honest: Path, tmp_path: Path, sandbox: Sandbox
) -> None:
    with ExitStack() as stack:
        completions = (str(_listener(stack)), _socket(stack, f"{tmp_path}/store"))
        name = f"{honest}/mine.py:connects"
        found = await judged(name, sandbox, *completions, network=True)
        assert found.rewards == [1.0, 1.0], found.failures
        assert (await judged(name, sandbox, *completions)).failures


# --- a run ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode", ["auto", pytest.param("off", marks=pytest.mark.slow)], ids=["sandbox", "control"]
)
def test_a_reward_function_of_a_run_finds_nothing_of_the_run(tmp_path: Path, mode: str) -> None:
    """It looks for the run's keys, its sockets, its ports and its processes."""
    sandbox = find_sandbox("auto")
    if mode == "auto" and not sandbox.is_there:
        pytest.skip(str(sandbox))
    recipe = tiny_recipe(
        tiny_model(tmp_path / "model"),
        run__steps=1,
        run__evaluation__num_prompts=0,
        reward__source=f"python:{ESCAPING}:look_around",
    )
    variables = {"ROLEMESH_SERVICE__SANDBOX": mode}
    run = CliRun(recipe, tmp_path, variables=variables)
    try:
        assert run.wait(RUN_S) == 0, run.output
    finally:
        run.close()
    log = (run.out / "logs" / "reward.log").read_text()
    (found,) = {match[1] for match in re.finditer(r"prints: found ({.*?})", log)}
    if mode == "auto":
        assert json.loads(found) == {"keys": 0, "sockets": 0, "ports": 0, "processes": 0}
        assert f"'reward.sandbox': '{sandbox}'" in log
    else:
        assert all(json.loads(found).values()), found
        assert "functions of users run in the sandbox none" in log


# --- which one ----------------------------------------------------------------------------


def test_the_best_that_the_host_has_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    host = "rolemesh.engine.sandbox.host"
    monkeypatch.setattr(f"{host}.bubblewrap", lambda: "/bin/bwrap")
    monkeypatch.setattr(f"{host}.why_not", lambda program: "")
    monkeypatch.setattr(f"{host}.landlock_abi", lambda: SCOPES_ABI)
    roots = (Path("rewards"),)
    assert find_sandbox("require", roots) == Sandbox(
        kind="bubblewrap", program="/bin/bwrap", abi=SCOPES_ABI, code_roots=roots
    )
    monkeypatch.setattr(f"{host}.why_not", lambda program: "no namespaces")
    assert find_sandbox("require") == Sandbox(kind="landlock", abi=SCOPES_ABI)
    assert find_sandbox("off").kind == "none"
    monkeypatch.setattr(f"{host}.landlock_abi", lambda: SCOPES_ABI - 1)
    assert "can signal" in find_sandbox("auto").lacks
    with pytest.raises(ValueError, match="install bubblewrap"):
        find_sandbox("require")
    monkeypatch.setattr(f"{host}.landlock_abi", lambda: 0)
    assert str(find_sandbox("auto")) == (
        "none (bubblewrap: no namespaces; the kernel offers no Landlock either)"
    )
    with pytest.raises(ValueError, match="no namespaces"):
        find_sandbox("require")


async def test_a_service_does_not_start_without_the_sandbox_that_its_owner_demands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rolemesh.engine.sandbox.host.bubblewrap", lambda: None)
    monkeypatch.setattr("rolemesh.engine.sandbox.host.landlock_abi", lambda: 0)
    with pytest.raises(ServiceStartError, match="sandbox is 'require', and this host has no"):
        async with serving(sandbox="require"):
            pass
    async with serving(sandbox="auto", code_roots=("rewards",)) as server:
        assert server.runtime.role.sandbox.lacks.startswith("bubblewrap: it is not installed")
        assert server.runtime.role.sandbox.code_roots == (Path("rewards"),)


def test_a_program_that_makes_no_namespaces_is_no_sandbox(tmp_path: Path) -> None:
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create namespace' >&2; exit 1\n")
    program.chmod(0o755)
    assert why_not(str(program)) == "bwrap: No permissions to create namespace"
    assert "No such file" in why_not(str(tmp_path / "none"))


# --- single ports -------------------------------------------------------------------------

PORTS = """
import socket, sys

def reached(kind, place, family=socket.AF_INET):
    try:
        with socket.socket(family, kind) as own:
            own.settimeout(2)
            own.connect(place)
        return "reached"
    except PermissionError:
        return "closed"
    except OSError as error:
        return type(error).__name__

open_port, other = map(int, sys.argv[1:])
print(*(reached(socket.SOCK_STREAM, ("127.0.0.1", port)) for port in (open_port, other)),
      reached(socket.SOCK_DGRAM, ("127.0.0.1", open_port)),
      reached(socket.SOCK_STREAM, "/nowhere", socket.AF_UNIX),
      reached(socket.SOCK_STREAM, ("192.0.2.1", 80)))
"""


@pytest.mark.parametrize("network", [False, True])
def test_a_program_reaches_the_port_that_it_is_given(tmp_path: Path, network: bool) -> None:
    sandbox = find_sandbox("auto")
    if not sandbox.is_there or sandbox.abi < PORTS_ABI:
        pytest.skip(f"the sandbox here, {sandbox}, opens no single ports")
    script = tmp_path / "ports.py"
    script.write_text(PORTS)
    prompt = Prompt(prompt_id=0, text="", tokens=[1], answer="", metadata="{}")
    work = AgentWork(
        prompt=prompt, base_url="http://x/v1", session_url="http://x", api_key="k", model="m"
    )
    with (
        socket.create_server(("127.0.0.1", 0)) as given,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        ports = [one.getsockname()[1] for one in (given, other)]
        command = ("python", str(script), *map(str, ports))
        spec = ProgramAgentSpec(command=command, network=network)
        said = run_program(spec, sandbox, ports[0], work, threading.Event()).split()
    if network:
        # Sockets in files never are.
        assert said[:4] == ["reached", "reached", "reached", "closed"]
    else:
        assert said == ["reached", "closed", "closed", "closed", "closed"]


def test_a_kernel_without_ports_is_told(tmp_path: Path) -> None:
    sandbox = Sandbox(kind="landlock", abi=PORTS_ABI - 1)
    with pytest.raises(ValueError, match=r"Linux 6\.7: set network to true"):
        sandbox.show("mine.py:run", (), network=False, ports=(8000,))
