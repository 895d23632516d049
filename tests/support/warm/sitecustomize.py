"""Hands the start of a process to a warm one, where one is named; see support.warm_processes.

Every Python that has this folder on its PYTHONPATH runs this file before its own work.
"""

import os
import re
import sys


def hand_over(address: str) -> None:
    """Lets the warm process fork, and ends as that one ends. Does not return."""
    import contextlib
    import json
    import signal
    import socket

    warm = socket.socket(socket.AF_UNIX)
    try:
        warm.connect(address)
    except OSError as error:
        # Started by itself it would work too, and the tests would only be slow.
        sys.stderr.write(f"the warm process at {address} is gone: {error}\n")
        os._exit(70)
    start = json.dumps([sys.orig_argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(warm, [len(start).to_bytes(4, "big")], [0, 1, 2])
    warm.sendall(start)
    answer = warm.recv(4, socket.MSG_WAITALL)
    if len(answer) != 4:
        sys.stderr.write("the warm process ended before it had forked\n")
        os._exit(70)
    pid = int.from_bytes(answer, "big")

    def pass_on(number: int, frame: object) -> None:
        # An end that this process has not been told of yet is told next.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, pass_on)
    told = warm.recv(4)
    code = int.from_bytes(told, "big", signed=True) if told else 1
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


_words = sys.orig_argv[1:3]
_module = _words[1] if _words[:1] == ["-m"] and len(_words) == 2 else ""
_services = r"rolemesh\.(services\.\w+|services\.preview\.(guess|memory)|quickstart\.tiny_model)"
if _module == "rolemesh.services.endpoint":
    # The one service that is nothing without vLLM.
    _kind = "RANKS"
elif (
    re.fullmatch(_services, _module)
    or _module == "rolemesh.engine.train.export"
    or (_words and os.path.dirname(_words[0]).endswith("/tests/support"))
):
    _kind = "SERVICES"
elif _module in (
    *("rolemesh", "rolemesh.coordinator.commands.cli"),
    "rolemesh.services.reward.outside.check",
):
    _kind = "COMMANDS"
else:
    _kind = "NONE"
if _warm := os.environ.get(f"ROLEMESH_TEST_WARM_{_kind}"):
    hand_over(_warm)


def run_next() -> None:
    """Runs the sitecustomize that this one hides: the next on the path, where there is one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    ours = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path) != ours]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


run_next()
