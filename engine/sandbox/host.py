"""The sandbox that this host has for functions of users, chosen from what is there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rolemesh.engine.sandbox.bubblewrap import bubblewrap, why_not, wrapped
from rolemesh.engine.sandbox.landlock import SCOPES_ABI, landlock_abi
from rolemesh.engine.sandbox.seccomp import has_filters
from rolemesh.engine.sandbox.view import View, view_of

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
        subprocess.Popen(sandbox.command([sys.executable, "worker.py"], view))
        # and the worker begins with `inside.begin`, which reads sandbox.order(view)
    """

    kind: SandboxKind
    lacks: str = ""
    """What it does not keep from functions, and why; empty: it is complete."""
    program: str = ""
    """Path of bwrap, where that makes it."""
    abi: int = 0
    """Version of Landlock, where that makes it."""
    code_roots: tuple[Path, ...] = ()
    """Folders of functions, which functions may read as a whole."""

    def __str__(self) -> str:
        return f"{self.kind} ({self.lacks})" if self.lacks else self.kind

    @property
    def is_there(self) -> bool:
        """Whether there is any."""
        return self.kind != "none"

    def show(self, code: str, readable: Sequence[Path], *, network: bool) -> View | None:
        """What a new worker sees that runs a user's code; see `view_of`. Makes its folder.

        Returns:
            The view, for which `View.close` has to be called; None where there is no sandbox.

        Raises:
            ValueError: A path of `readable` is not there.
        """
        for path in readable:
            if not os.path.exists(path):
                raise ValueError(f"{str(path)!r} in readable, which is not there")
        if not self.is_there:
            return None
        folder = Path(tempfile.mkdtemp(prefix="rolemesh-worker-"))
        return view_of(code, folder, (*self.code_roots, *readable), network=network)

    @property
    def parent_pid(self) -> int:
        """Process id of a worker's parent, as the worker sees it."""
        return 1 if self.kind == "bubblewrap" else os.getpid()

    def command(self, command: Sequence[str], view: View | None) -> list[str]:
        """The command line that runs a worker's; without a sandbox there is no view."""
        if self.kind == "bubblewrap" and view is not None:
            return wrapped(self.program, command, view)
        return list(command)

    def order(self, view: View) -> dict[str, Any]:
        """What a worker has to be told, as JSON."""
        return {"kind": self.kind, "abi": self.abi, "view": view.message()}


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
        return Sandbox(kind="bubblewrap", program=program)
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
