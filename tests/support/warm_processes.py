"""Processes that have imported what services or commands import, and fork them in no time.

A service that starts by itself imports torch and transformers first, five seconds of computing, and
a command of `rolemesh` computes for a second. A test of something else than that start gives
`services()` or `commands()` to what starts them, be it the test or a coordinator. The process that
is started is then a small one in front of the fork: it has the command line, the parent and the
exit code of the fork, passes signals on to it (but for SIGSTOP), and takes it along when it is
killed. The fork itself has another process id and the warm process as its parent. When its program
ends, a fork waits for its threads and calls what is registered with atexit, as every Python does,
and leaves the objects alone.

On a machine where an import starts a thread, which a fork would lack, the fork begins as a new
Python: everything is the same, and slower.

Where several processes run tests, the one that deals the tests out calls `share`, and all of them
ask the same warm processes.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

MODULES = {
    "SERVICES": (
        *(
            f"rolemesh.services.{role}.servicers"
            for role in ("actor", "cost", "critic", "reference", "reward", "rollout", "teacher")
        ),
        "rolemesh.services.runtime.process",
        "rolemesh.services.runtime.ranks.agent",
        # What trained roles import at Initialize, and a reward that is a classifier.
        "rolemesh.engine.train.trainer",
        # What `rolemesh fit` and `rolemesh evaluate` ask, and what writes a checkpoint as a folder.
        "rolemesh.services.preview.memory",
        "rolemesh.services.evaluation.__main__",
        "rolemesh.engine.train.export",
        # Prompts of most runs here: a second of computing for each actor.
        "rolemesh.engine.reasoning_tasks:reasoning_gym",
        "torch.distributed.fsdp",
        "transformers.models.llama.modeling_llama",
    ),
    "COMMANDS": (
        "rolemesh.coordinator.commands.cli",
        "rolemesh.coordinator.commands.evaluate",
        "rolemesh.coordinator.commands.serve_policy",
        "rolemesh.coordinator.commands.train",
        "rolemesh.coordinator.api.http.app",
        "rolemesh.coordinator.api.http.server",
        # What `rolemesh reward check` becomes.
        "rolemesh.services.reward.outside.check.probes",
        "rolemesh.services.reward.outside.check.samples",
        "rolemesh.services.reward.outside.make",
    ),
    "RANKS": (
        "rolemesh.engine.train.trainer",
        "rolemesh.engine.weights.transfer",
        "torch.distributed.fsdp",
        "transformers.models.llama.modeling_llama",
        # Before vLLM's modules, which read it, as in a service.
        "rolemesh.engine.rollout.vllm.engine.process:leave_uncompiled",
        "vllm.entrypoints.llm",
        "vllm.model_executor.models.llama",
        # What serves a policy.
        "rolemesh.services.endpoint.endpoint",
        "rolemesh.services.endpoint.routes.app",
    ),
}
"""Imported once, by the warm process; what stands behind a colon is called."""
_MAY_LACK = frozenset({"vllm"})
"""Packages that a machine of the GPU tests need not have."""
_FOLDER = "ROLEMESH_TEST_WARM_FOLDER"
"""Variable with the folder of the shared ones."""

_ANEW = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
    "import warm_processes; warm_processes.main()"
)
"""By its own name sitecustomize would hand the new Python over once more."""
_ONE_AT_A_TIME = threading.Lock()
"""Tests start several services at once, from threads."""
PEER = (socket.SOL_SOCKET, socket.SO_PEERCRED)


def services() -> dict[str, str]:
    """Variables for whatever starts services."""
    with _ONE_AT_A_TIME:
        return _environment("SERVICES")


def everything() -> dict[str, str]:
    """Variables for what starts `rolemesh`, which in its turn starts services or reads data."""
    return services() | commands()


def commands() -> dict[str, str]:
    """Variables for what starts `rolemesh`; it must not import torch, and imports none here."""
    with _ONE_AT_A_TIME:
        return _environment("COMMANDS")


def with_vllm() -> dict[str, str]:
    """Variables for what serves a policy, by vLLM and in a process of its own."""
    with _ONE_AT_A_TIME:
        return _environment("RANKS")


def share() -> None:
    """Begins all of them for this process and those that it starts from now on."""
    for kind in MODULES:
        _environment(kind)
    os.environ[_FOLDER] = str(_folder())


class Fork:
    """A fork that this process has asked for itself, without a process in front; ends with it."""

    def __init__(self, kind: str, words: list[str], stdin: int, variables: dict[str, str]) -> None:
        """Starts `python WORDS` with these variables alone, in this process's directory."""
        with _ONE_AT_A_TIME:
            address = _environment(kind)[f"ROLEMESH_TEST_WARM_{kind}"]
        self._warm = socket.socket(socket.AF_UNIX)
        self._warm.connect(address)
        start = json.dumps([words, os.getcwd(), variables]).encode()
        socket.send_fds(self._warm, [len(start).to_bytes(4, "big")], [stdin, 1, 2])
        self._warm.sendall(start)
        answer = self._warm.recv(4, socket.MSG_WAITALL)
        if len(answer) != 4:
            raise RuntimeError(f"the warm process of {kind} ended before it had forked")
        self.pid = int.from_bytes(answer, "big")
        self.exit_code: int | None = None

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, as subprocess counts it; None if it has not ended in time."""
        if self.exit_code is None:
            self._warm.settimeout(timeout_s)
            with contextlib.suppress(TimeoutError, BlockingIOError):
                told = self._warm.recv(4, socket.MSG_WAITALL)
                self.exit_code = int.from_bytes(told, "big", signed=True) if told else 1
        return self.exit_code

    def kill(self) -> None:
        """Ends it at once, and returns when it has ended."""
        while self.wait(0.0) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait(1.0)


def forked(pid: int) -> int:
    """The process id of a fork, by that of the process in front of it.

    That one itself where there is no fork, or none any more.
    """
    told = _folder() / str(pid)
    return int(told.read_text()) if told.exists() else pid


@functools.cache
def _folder() -> Path:
    if shared := os.environ.get(_FOLDER):
        return Path(shared)
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@functools.cache
def _environment(kind: str) -> dict[str, str]:
    """Begins a warm process, which ends with this one, unless it is a shared one."""
    address = str(_folder() / kind)
    added = [str(Path(__file__).with_name("warm")), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, added)), "OMP_NUM_THREADS": "1"}
    if os.environ.get(_FOLDER):
        return {**variables, f"ROLEMESH_TEST_WARM_{kind}": address}
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    # Reads its standard input, which ends with this process.
    process = subprocess.Popen(
        [sys.executable, "-u", str(Path(__file__).resolve()), kind, str(listener.fileno())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[listener.fileno()],
        env={
            **os.environ,
            **variables,
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "0",
            # VLLM looks when it is imported; see rolemesh.engine.rollout.vllm.engine.process.
            "VLLM_CONFIGURE_LOGGING": "0",
        },
    )
    listener.close()

    def end() -> None:
        process.kill()
        process.wait()

    atexit.register(end)
    return {**variables, f"ROLEMESH_TEST_WARM_{kind}": address}


# --- in the warm process ------------------------------------------------------------------


def serve(kind: str, listener: socket.socket) -> list[str] | None:
    """Forks for each process that asks, until standard input ends.

    Returns:
        In a fork: the arguments of Python that say what to run. In the warm process: None.
    """
    for name in MODULES[kind]:
        module, _, function = name.partition(":")
        try:
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)()
        except ModuleNotFoundError as error:
            if error.name not in _MAY_LACK:
                raise
    # Libraries beside ours may start some, e.g. those that scikit-learn brings.
    is_whole = len(os.listdir("/proc/self/task")) == 1
    if not is_whole:
        print(f"the modules of {kind} start threads: no fork has them", file=sys.stderr)
    # A fork that collects garbage would visit, and so copy, all that was imported.
    gc.collect()
    gc.freeze()
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj == sys.stdin.fileno():
                return None
            if key.fileobj is not listener:
                # The end of a fork.
                pid, asked, told = key.data
                _, status = os.waitpid(pid, 0)
                told.unlink(missing_ok=True)
                selector.unregister(key.fileobj)
                os.close(key.fd)
                _tell(asked, os.waitstatus_to_exitcode(status))
                asked.close()
                continue
            asked, _ = listener.accept()
            size, descriptors, _, _ = socket.recv_fds(asked, 4, 3)
            with asked.makefile("rb") as reader:
                words, directory, variables = json.loads(reader.read(int.from_bytes(size, "big")))
            pid = os.fork()
            if pid == 0:
                for other in list(selector.get_map().values()):
                    if other.data is not None:
                        other.data[1].close()
                selector.close()
                listener.close()
                _become(descriptors, words, directory, variables)
                if not is_whole:
                    asked.set_inheritable(True)
                    start = [sys.executable, "-c", _ANEW, "ANEW", str(asked.fileno())]
                    os.execv(sys.executable, [*start, *words])
                threading.Thread(target=_end_with, args=(asked,), daemon=True).start()
                return list(words)
            for descriptor in descriptors:
                os.close(descriptor)
            in_front, *_ = struct.unpack("3i", asked.getsockopt(*PEER, struct.calcsize("3i")))
            told = Path(listener.getsockname()).with_name(str(in_front))
            # Whole at once: a test may read it at any moment.
            written = told.with_suffix(".part")
            written.write_text(str(pid))
            written.replace(told)
            _tell(asked, pid)
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, asked, told))


def _tell(asked: socket.socket, number: int) -> None:
    # Who asked may have been killed.
    with contextlib.suppress(OSError):
        asked.sendall(number.to_bytes(4, "big", signed=True))


def _become(
    descriptors: list[int], words: list[str], directory: str, variables: dict[str, str]
) -> None:
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(variables)
    sys.orig_argv[:] = [sys.executable, *words]
    if variables.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()


def _end_with(asked: socket.socket) -> None:
    """Ends this fork when the process in front of it is gone."""
    asked.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    if sys.argv[1] == "ANEW":
        asked = socket.socket(fileno=int(sys.argv[2]))
        asked.set_inheritable(False)
        words = sys.argv[3:]
        sys.orig_argv[:] = [sys.executable, *words]
        threading.Thread(target=_end_with, args=(asked,), daemon=True).start()
    else:
        with socket.socket(fileno=int(sys.argv[2])) as listener:
            told = serve(sys.argv[1], listener)
        if told is None:
            return
        words = told
    # What a start of its own would find, and nothing of the warm process.
    ours = Path(__file__).parent
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if not os.environ.get("PYTHONSAFEPATH"):
        given.insert(0, os.getcwd() if words[0] == "-m" else os.path.dirname(words[0]))
    kept = [path for path in sys.path if Path(path) not in (ours, ours / "warm")]
    if folder := os.environ.get("ROLEMESH_TEST_AUDIT"):
        sys.path.insert(0, str(ours))
        importlib.import_module("audit").record_into(folder)
    sys.path[:] = list(dict.fromkeys([*filter(None, given), *kept]))
    code = 0
    try:
        _run(words)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        code = ended.code or 0
    # To take all imported modules down takes 1.6 s of computing, which a fork has no use for.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        # Imported by another module; to run it anew is what `python -m` does. Of a package it runs
        # the module __main__, and the package stays.
        is_package = hasattr(sys.modules.get(words[1]), "__path__")
        sys.modules.pop(f"{words[1]}.__main__" if is_package else words[1], None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
