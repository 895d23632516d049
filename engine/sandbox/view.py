"""What a program in a sandbox sees of its host: all else is out of its reach."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import rolemesh
from rolemesh.engine.granted.user_code import ENTRY_POINTS, INSTALLED, files_of

PASSED_VARIABLES = (
    *("PATH", "HOME", "USER", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR"),
    *("PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("HF_HOME", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES"),
    *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
)
"""Environment variables of the service that a worker gets, without tokens and passwords. A recipe
may name further ones."""

_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives"),
    *("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/localtime", "/etc/timezone"),
    *("/etc/os-release", "/etc/mime.types", "/etc/ssl/certs", "/etc/ssl/openssl.cnf"),
    # Beside these lie private keys, which root can read.
    *("/etc/pki/tls/certs", "/etc/pki/tls/cert.pem", "/etc/pki/ca-trust/extracted"),
    *("/etc/ca-certificates", "/etc/hosts", "/etc/resolv.conf"),
    *("/etc/host.conf", "/etc/gai.conf", "/etc/services", "/etc/protocols"),
    # Numbers of processors, which libraries of numerics ask for.
    "/sys/devices/system",
)
"""Programs, libraries and settings of the system that hold no secret."""

_PATH_VARIABLES = ("PYTHONPATH", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What is seen. Everything else of the host's files is not there, or cannot be opened."""

    reads: tuple[str, ...]
    """Absolute paths, with links resolved and as they are written, of files that may be read and
    run, and of folders with all that is in them."""
    listed: tuple[str, ...] = ()
    """Folders whose names of files may be seen, so that Python finds modules there."""
    devices: tuple[str, ...] = ()
    """Devices that may be used, of GPUs."""
    folder: str
    """The only one that may be written to."""
    network: bool = False
    """Whether connections may be opened."""
    ports: tuple[int, ...] = ()
    """TCP ports to which they may be opened where `network` is false, on whichever host."""

    def close(self) -> None:
        """Removes its folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> Self:
        """What `Sandbox.order` tells a worker."""
        paths = {name: tuple(message[name]) for name in ("reads", "listed", "devices")}
        return cls(
            **paths,
            folder=message["folder"],
            network=message["network"],
            ports=tuple(message["ports"]),
        )


def view_of(
    code: str,
    folder: Path,
    reads: Iterable[Path] = (),
    *,
    network: bool = False,
    ports: Sequence[int] = (),
) -> View:
    """The view of a worker that runs a user's code.

    Beside Python, its packages and the system's programs it holds what the code can import: of a
    file the modules and packages beside it, of a module its package. Files of another kind that lie
    there are not in it: they may be anything, e.g. keys.

    Args:
        code: Name of the code, as `load_named` takes it.
        folder: The worker's own, which exists.
        reads: Further files and folders, which its owner granted.
        network: Whether it may open connections.
        ports: To which it may open them, where it may not otherwise.
    """
    listed, imported = _importable(code)
    variables = (os.environ.get(name, "").split(os.pathsep) for name in _PATH_VARIABLES)
    named = [Path(path) for paths in variables for path in paths if path]
    devices = _gpu_devices()
    return View(
        reads=_both_ways(
            (
                *(Path(path) for path in _SYSTEM),
                *_python(),
                *named,
                *imported,
                *reads,
                # Where drivers look for GPUs.
                *((Path("/sys"),) if devices else ()),
            )
        ),
        listed=_both_ways(listed),
        devices=devices,
        folder=str(folder),
        network=network,
        ports=tuple(ports),
    )


def environment_of(view: View | None, variables: Iterable[str]) -> dict[str, str]:
    """Environment of a worker: the usual variables, some that are named, and settings of Python.

    Args:
        view: What the worker sees; None where there is no sandbox.
        variables: Names of those that it gets besides.
    """
    names = (*PASSED_VARIABLES, *variables)
    # Caches and temporary files have one place, where there is a sandbox.
    own = {} if view is None else {"HOME": view.folder, "TMPDIR": view.folder}
    return {
        **{name: os.environ[name] for name in names if name in os.environ},
        **own,
        # No file of the current directory or of a script's may shadow a package.
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        # After a crash in native code, the text of the error has its place.
        "PYTHONFAULTHANDLER": "1",
    }


@functools.cache
def _python() -> tuple[Path, ...]:
    """The interpreter, and all from which a worker imports by itself."""
    # This process may also search where it was started, which holds more than modules.
    asked = [sys.executable, "-P", "-c", "import sys; print(*sys.path, sep='\\n')"]
    found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    # A checkout holds links to folders beside it.
    ours = (path for place in rolemesh.__path__ for path in Path(place).iterdir())
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    return (*map(Path, (*prefixes, *found)), *INSTALLED, *ours)


def _importable(code: str) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The folder in which a user's code looks for modules, and the modules and packages there."""
    place, colon, _ = code.rpartition(":")
    if not colon:
        points = importlib.metadata.entry_points(group=ENTRY_POINTS, name=code)
        place = next((point.module for point in points), "")
    files = files_of(place) if place else []
    if not files:
        # Loading it tells why.
        return (), ()
    if files[0].name == "__init__.py":
        return (), (files[0].parent,)
    folder = files[0].parent
    try:
        beside = [path for path in folder.iterdir() if _is_code(path)]
    except OSError:
        # Loading it tells why.
        beside = []
    return (folder,), (*beside, files[0])


def _is_code(path: Path) -> bool:
    is_module = path.suffix in (".py", ".so") and os.path.isfile(path)
    return is_module or os.path.isfile(path / "__init__.py")


def _both_ways(paths: Iterable[Path]) -> tuple[str, ...]:
    """Those that exist, absolute: as they are written, and with links resolved."""
    found: dict[str, None] = {}
    for path in paths:
        if os.path.exists(path):
            found[os.path.abspath(path)] = found[str(path.resolve())] = None
    return tuple(found)


def _gpu_devices() -> tuple[str, ...]:
    """Devices of NVIDIA's driver, where this process may see a GPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return ()
    return tuple(str(path) for path in sorted(Path("/dev").glob("nvidia*")))
