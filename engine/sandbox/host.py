"""The sandbox that this host has for functions of users, chosen from what is there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rolemesh.engine.sandbox.bubblewrap import bubblewrap, why_not, wrapped
from rolemesh.engine.sandbox.landlock import PORTS_ABI, SCOPES_ABI, landlock_abi
from rolemesh.engine.sandbox.seccomp import has_filters
from rolemesh.engine.sandbox.view import View, environment_of, view_of

SandboxMode = Literal["auto", "require", "off"]
"""The best that there is, maybe none; a complete one, or an error; none."""

SandboxKind = Literal["bubblewrap", "landlock", "none"]

MAY_BE_SANDBOX = (
    "in its sandbox it can read what `readable` names, write below TMPDIR, and open connections if "
    "`network` is true"
)
"""For a user whose code the system has refused something."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sandbox:
    """A kind of sandbox, what it lacks, and what the owner of this process shows in it.

    Example::

        sandbox = find_sandbox("auto", code_roots=(Path("rewards"),))
        view = sandbox.show("rewards/mine.py:judge", (), network=False)
        process, connection = sandbox.start("rolemesh.my_worker", view, ())
        # and the worker begins with `inside.begin`, which reads sandbox.order(view)
    """

    kind: SandboxKind
    lacks: str = ""
    """What it does not keep from functions, and why; empty: it is complete."""
    program: str = ""
    """Path of bwrap, where that makes it."""
    abi: int = 0
    """Version of Landlock that the kernel has; 0: none, or there is no sandbox."""
    code_roots: tuple[Path, ...] = ()
    """Folders of functions, which functions may read as a whole."""

    def __str__(self) -> str:
        return f"{self.kind} ({self.lacks})" if self.lacks else self.kind

    @property
    def is_there(self) -> bool:
        """Whether there is any."""
        return self.kind != "none"

    def show(
        self, code: str, readable: Sequence[Path], *, network: bool, ports: Sequence[int] = ()
    ) -> View | None:
        """What a new worker sees that runs a user's code; see `view_of`. Makes its folder.

        Returns:
            The view, for which `View.close` has to be called; None where there is no sandbox.

        Raises:
            ValueError: A path of `readable` is not there, or the kernel cannot open single ports.
        """
        for path in readable:
            if not os.path.exists(path):
                raise ValueError(f"{str(path)!r} in readable, which is not there")
        if not self.is_there:
            return None
        if ports and not network and self.abi < PORTS_ABI:
            raise ValueError(
                "network false, but this kernel cannot open single ports to a sandbox, which takes "
                "Landlock of Linux 6.7: set network to true, where the service's owner grants it"
            )
        folder = Path(tempfile.mkdtemp(prefix="rolemesh-worker-"))
        reads = (*self.code_roots, *readable)
        return view_of(code, folder, reads, network=network, ports=ports)

    def start(
        self, module: str, view: View | None, variables: Iterable[str]
    ) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Starts a worker, in a session of its own.

        Args:
            module: Of Python, which calls `inside.begin` with its arguments.
            view: What the worker sees; without a sandbox there is none.
            variables: Names of environment variables that it gets besides the usual ones.

        Returns:
            The process, whose `stdout` is all that it prints, and our end of its connection.

        Raises:
            OSError: The system has no process for it.
        """
        ours, theirs = socket.socketpair()
        # As the worker sees it.
        parent_pid = 1 if self.kind == "bubblewrap" else os.getpid()
        command = [sys.executable, "-m", module, str(theirs.fileno()), str(parent_pid)]
        if self.kind == "bubblewrap" and view is not None:
            command = wrapped(self.program, command, view)
        try:
            process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                env=environment_of(view, variables),
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return process, ours

    def order(self, view: View) -> dict[str, Any]:
        """What a worker has to be told, as JSON."""
        return {"kind": self.kind, "abi": self.abi, "view": asdict(view)}


def find_sandbox(mode: SandboxMode, code_roots: tuple[Path, ...] = ()) -> Sandbox:
    """The sandbox for a mode: bubblewrap before Landlock before none.

    Args:
        mode: What the owner of this process wants.
        code_roots: Folders that the owner opens to functions.

    Raises:
        ValueError: One is required, and there is none that is complete.
    """
    if mode == "off":
        return Sandbox(kind="none", lacks="the owner of this process set sandbox to off")
    found = replace(_best(), code_roots=code_roots)
    if mode == "require" and found.lacks:
        raise ValueError(
            f"sandbox is 'require', and this host has no complete one: {found}; install "
            "bubblewrap, take a kernel with Landlock (Linux 6.12), or set sandbox to 'auto'"
        )
    return found


def _best() -> Sandbox:
    program = bubblewrap()
    refusal = "it is not installed" if program is None else why_not(program)
    if program is not None and not refusal:
        abi = landlock_abi() if has_filters() else 0
        return Sandbox(kind="bubblewrap", program=program, abi=abi)
    abi = landlock_abi()
    if abi == 0 or not has_filters():
        what = "Landlock" if abi == 0 else "filters of system calls for this machine"
        return Sandbox(
            kind="none", lacks=f"bubblewrap: {refusal}; the kernel offers no {what} either"
        )
    if abi < SCOPES_ABI:
        lacks = "functions can signal other processes of this user, which takes Linux 6.12"
        return Sandbox(kind="landlock", abi=abi, lacks=lacks)
    return Sandbox(kind="landlock", abi=abi)
