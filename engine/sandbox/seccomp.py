"""A filter of system calls, beside Landlock: what that does not know of is refused here.

https://docs.kernel.org/userspace-api/seccomp_filter.html. Sockets need no path that Landlock would
see, and permissions and times of files may be changed without a right to write.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""How the kernel names the machines whose numbers of calls are below."""

_REFUSED = {
    # Ways around `socket`, and to files by a number instead of a path.
    "io_uring_setup": (425, 425),
    "open_by_handle_at": (304, 265),
    # Permissions, owners, attributes and times of files. An owner may change them without a right
    # to write, by path or through a file that was opened to read.
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchown": (93, 55),
    "fsetxattr": (190, 7),
    "fremovexattr": (199, 16),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    # Memory, messages and keys of other processes of the same user.
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
"""Calls that are refused: their numbers on x86_64 and aarch64."""

_SOCKET, _SOCKETPAIR, _PRLIMIT = (41, 198), (53, 199), (302, 261)
_TRUNCATE, _OPEN, _OPENAT, _OPENAT2 = (76, 45), (2, None), (257, 56), (437, 437)

_INTERNET = (2, 10, 16)
"""AF_INET, AF_INET6, and AF_NETLINK, by which a machine's own addresses are asked for."""
_STREAM = (1,)
"""SOCK_STREAM, and of the internet's protocols TCP. Others are not seen by Landlock."""

_PAIRED = (1, 5)
"""SOCK_STREAM and SOCK_SEQPACKET. One of a pair of datagram sockets can send to any path."""
_SOCKET_TYPE = 0xF
"""Bits of a socket's type that are no flags."""

_LOAD, _AND, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_JUMP = 0x05
"""Operations of the kernel's BPF, on 32 bits."""
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
_X32 = 0x40000000
"""Added to numbers of calls in the form of a third machine."""

_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
_MOST = 0xFFFFFFFF

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2


class Condition(NamedTuple):
    """A call that is refused depending on one of its arguments, of 32 bits."""

    number: int
    argument: int
    """Its place, from 0."""
    mask: int
    values: Sequence[int]
    """Values of the masked argument."""
    refuses: bool
    """Whether these values are refused, or all others."""
    goes_on: bool = False
    """Whether what is not refused is looked at by further conditions, or allowed."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def has_filters() -> bool:
    """Whether the calls of this machine are known, and its kernel has filters."""
    return platform.machine() in _AUDIT_ARCH and os.path.exists("/proc/sys/kernel/seccomp")


def forbid(*, network: bool, truncation: bool, tcp: bool = False) -> None:
    """Refuses calls of this process, which has one thread, and of all that it starts, for good.

    The process must have no way to new privileges any more (PR_SET_NO_NEW_PRIVS).

    Args:
        network: Whether sockets to the network may be opened. Those of files never may.
        tcp: Whether sockets of TCP may be opened all the same: Landlock knows their ports.
        truncation: Whether files must not be emptied by a path, for the kernel's Landlock does
            not know that.

    Raises:
        OSError: The kernel refused.
    """
    program = b"".join(_instructions(network=network, truncation=truncation, tcp=tcp))
    libc = ctypes.CDLL(None, use_errno=True)
    filter_ = _Program(length=len(program) // 8, filter=program)
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(filter_), 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")


def _instructions(*, network: bool, truncation: bool, tcp: bool) -> Iterator[bytes]:
    place = list(_AUDIT_ARCH).index(platform.machine())
    refused = [numbers[place] for numbers in _REFUSED.values()]
    families = _INTERNET if network or tcp else ()
    conditions = [
        *(
            ()
            if network
            else (Condition(_SOCKET[place], 1, _SOCKET_TYPE, _STREAM, refuses=False, goes_on=True),)
        ),
        Condition(_SOCKET[place], 0, _MOST, families, refuses=False),
        Condition(_SOCKETPAIR[place], 1, _SOCKET_TYPE, _PAIRED, refuses=False),
        # Limits of other processes; 0 is the caller itself.
        Condition(_PRLIMIT[place], 0, _MOST, (0,), refuses=False),
    ]
    if truncation:
        refused += [_TRUNCATE[place], _OPENAT2[place]]
        flags = os.O_ACCMODE | os.O_TRUNC
        for numbers, argument in ((_OPEN, 1), (_OPENAT, 2)):
            number = numbers[place]
            if number is not None:
                # Opened to read, and emptied all the same.
                conditions.append(Condition(number, argument, flags, (os.O_TRUNC,), refuses=True))
    yield _operation(_LOAD, _ARCH_AT)
    yield _operation(_IF_EQUAL, _AUDIT_ARCH[platform.machine()], if_true=1)
    yield _operation(_RETURN, _KILL)
    yield _operation(_LOAD, _NUMBER_AT)
    yield _operation(_IF_AT_LEAST, _X32, if_false=1)
    yield _operation(_RETURN, _REFUSE)
    for number in refused:
        if number is not None:
            yield _operation(_IF_EQUAL, number, if_false=1)
            yield _operation(_RETURN, _REFUSE)
    for condition in conditions:
        yield from _conditional(condition)
    yield _operation(_RETURN, _ALLOW)


def _conditional(condition: Condition) -> Iterator[bytes]:
    others, listed = (
        [[_operation(_RETURN, _REFUSE)], [_operation(_RETURN, _ALLOW)]]
        if not condition.refuses
        else [[_operation(_RETURN, _ALLOW)], [_operation(_RETURN, _REFUSE)]]
    )
    if condition.goes_on:
        # What is allowed goes on, with the number of the call looked at once more.
        again = [_operation(_LOAD, _NUMBER_AT)]
        if condition.refuses:
            others = [*again, _operation(_JUMP, len(listed))]
        else:
            listed = again
    num_values = len(condition.values)
    length = 2 + num_values + len(others) + len(listed)
    yield _operation(_IF_EQUAL, condition.number, if_false=length)
    # Little-endian on both machines, so the lower half comes first.
    yield _operation(_LOAD, _ARGUMENTS_AT + 8 * condition.argument)
    yield _operation(_AND, condition.mask)
    for place in range(num_values):
        to_listed = num_values - 1 - place + len(others)
        yield _operation(_IF_EQUAL, condition.values[place], if_true=to_listed)
    yield from others
    yield from listed


def _operation(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
