"""The kernel's Landlock: a process gives up, for good, what it does not need of files and signals.

https://docs.kernel.org/userspace-api/landlock.html. No privilege is needed for it, and none undoes
it. What Landlock does not know (connections, permissions of files) `seccomp` takes away.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from rolemesh.engine.sandbox import seccomp
from rolemesh.engine.sandbox.view import View

SCOPES_ABI = 6
"""First version that keeps signals from processes outside (Linux 6.12)."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls, on every machine."""

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_MAKE_DEVICES = 1 << 6 | 1 << 11
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
"""Rights that a file can have; all others are of folders."""
_RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All rights to files that a version knows, from this one on."""

PORTS_ABI = 4
"""First version that knows of TCP ports (Linux 6.7)."""
_TCP = 0b11
"""Rights to bind and to connect."""
_CONNECT = 0b10
_SCOPES = 0b11
"""Abstract sockets and signals."""

_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH, _RULE_PORT = 1, 2
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITIES_VERSION_3 = 0x20080522
_CAP_DAC_READ_SEARCH = 1 << 2

_SHOWN_PROC = (
    *("cpuinfo", "meminfo", "stat", "loadavg", "uptime", "version", "filesystems", "sys"),
    # What CUDA asks for.
    *("driver", "devices"),
)
_DEVICES = ("null", "zero", "full", "random", "urandom")


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


class _Port(ctypes.Structure):
    _fields_ = (("allowed", ctypes.c_uint64), ("port", ctypes.c_uint64))


def landlock_abi() -> int:
    """Version of Landlock that this kernel offers; 0: none, or the host does not allow it."""
    if not sys.platform.startswith("linux"):
        return 0
    found = _LIBC.syscall(_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)
    return max(int(found), 0)


def confine(view: View, abi: int) -> None:
    """Confines this process, which has one thread, and all that it starts, to a view.

    Args:
        view: What remains.
        abi: Version of Landlock to use, no later than the kernel's.

    Raises:
        OSError: The kernel refused.
        RuntimeError: The process has further threads, which would stay free.
    """
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("the process has several threads: confine it before it starts any")
    rights = next(_RIGHTS_BY_ABI[first] for first in sorted(_RIGHTS_BY_ABI)[::-1] if first <= abi)
    ruleset = _Ruleset(fs=rights)
    size = 8
    if abi >= PORTS_ABI:
        ruleset.net, size = 0 if view.network else _TCP, 16
    if abi >= SCOPES_ABI:
        ruleset.scoped, size = _SCOPES, 24
    descriptor = _checked(
        "landlock_create_ruleset",
        _LIBC.syscall(_CREATE_RULESET, ctypes.byref(ruleset), size, 0),
    )
    try:
        reading = _EXECUTE | _READ_FILE | _READ_DIR
        # Of this process; /proc itself stays closed, so that others cannot be listed.
        shown = (f"/proc/{os.getpid()}", *(f"/proc/{name}" for name in _SHOWN_PROC))
        devices = (*(f"/dev/{name}" for name in _DEVICES), *view.devices)
        for paths, allowed in (
            ((*view.reads, *shown), reading),
            (view.listed, _READ_DIR),
            (devices, _READ_FILE | _WRITE_FILE | _IOCTL),
            ((view.folder,), rights & ~_MAKE_DEVICES),
        ):
            _allow(descriptor, paths, allowed & rights)
        if ruleset.net:
            _allow_ports(descriptor, view.ports)
        # Both that follow need it, so that programs with more rights cannot be confined.
        _checked("prctl", _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _checked("landlock_restrict_self", _LIBC.syscall(_RESTRICT_SELF, descriptor, 0))
    finally:
        os.close(descriptor)
    _drop_capabilities()
    seccomp.forbid(
        network=view.network,
        tcp=bool(view.ports) and abi >= PORTS_ABI,
        truncation=not rights & _TRUNCATE,
    )


def confine_connections(view: View) -> None:
    """Leaves this process, and all that it starts, no connections but to the view's ports.

    For a process whose files are confined otherwise.

    Raises:
        OSError: The kernel refused.
    """
    ruleset = _Ruleset(fs=0, net=_TCP)
    descriptor = _checked(
        "landlock_create_ruleset",
        _LIBC.syscall(_CREATE_RULESET, ctypes.byref(ruleset), 16, 0),
    )
    try:
        _allow_ports(descriptor, view.ports)
        _checked("prctl", _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _checked("landlock_restrict_self", _LIBC.syscall(_RESTRICT_SELF, descriptor, 0))
    finally:
        os.close(descriptor)
    seccomp.forbid(network=False, tcp=True, truncation=False)


def _allow_ports(ruleset: int, ports: Iterable[int]) -> None:
    for port in ports:
        rule = _Port(allowed=_CONNECT, port=port)
        arguments = (ruleset, _RULE_PORT, ctypes.byref(rule), 0)
        _checked("landlock_add_rule", _LIBC.syscall(_ADD_RULE, *arguments))


def _allow(ruleset: int, paths: Iterable[str], allowed: int) -> None:
    for path in paths:
        # It may have gone since the view was made.
        with suppress(FileNotFoundError):
            parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                is_folder = stat.S_ISDIR(os.fstat(parent).st_mode)
                given = allowed if is_folder else allowed & _OF_FILES
                rule = _PathBeneath(allowed=given, parent=parent)
                arguments = (ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
                if given:
                    _checked("landlock_add_rule", _LIBC.syscall(_ADD_RULE, *arguments))
            finally:
                os.close(parent)


def _drop_capabilities() -> None:
    """Gives up the powers of root, but for reading files of others where the view has them."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION_3, 0)
    # Effective, permitted and inheritable ones; then the same for numbers from 32 on.
    held = (ctypes.c_uint32 * 6)()
    _checked("capget", _LIBC.capget(header, held))
    kept = (ctypes.c_uint32 * 6)(*(held[kind] & _CAP_DAC_READ_SEARCH for kind in range(2)))
    _checked("capset", _LIBC.capset(header, kept))


def _checked(call: str, answer: Any) -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return int(answer)
