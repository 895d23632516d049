"""Names for the shared memory through which ranks of a vLLM engine on one CPU host add and gather.

vLLM 0.32 takes the name from VLLM_DIST_IDENT, which its CPU worker sets to the same text for every
engine under an external launcher. A second service on the host, or files that a killed one left,
then end the start with "create shm in SHMManager failed. errno: 17". Here each start has a name of
its own, and nothing of it is left behind once all ranks have opened each other's files.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from rolemesh.engine.parallel.mesh import RankGroup
from rolemesh.engine.transport.slots.shm import (
    SEGMENT_NAME,
    Segment,
    host_identity,
    remove_leftovers,
)
from rolemesh.engine.transport.slots.shm_directory import SHM_DIRECTORY

_FILE_NAME = re.compile(rf"(?P<owner>{SEGMENT_NAME.pattern})-[a-z]+:[0-9]+-\[[-0-9]+\]-cpushm.*")
"""What vLLM makes of our name: group, members, and a number."""

_MESSAGE_BYTES = 128
"""Room for a name and a digest."""


@contextmanager
def shared_memory_name(group: RankGroup, first: int) -> Iterator[str]:
    """The name that the ranks of a group give to their shared memory while they start an engine.

    Ranks that share no /dev/shm get different names; vLLM then uses torch's collectives. All
    ranks of the group enter together. Leaving removes the files: those who opened them keep them.

    Args:
        group: Ranks of one generation replica, more than one.
        first: Torch's number of the group's first rank.
    """
    remove_dead_files()
    remove_leftovers()
    # Locked while this process lives, so that others can tell our files from leftovers.
    owner = Segment.create(1)
    name = owner.name
    try:
        name = _agreed_name(owner.name, group, first)
        yield name
    finally:
        for path in SHM_DIRECTORY.glob(f"{name}-*"):
            path.unlink(missing_ok=True)
        owner.unlink()


def remove_dead_files() -> list[str]:
    """Removes what vLLM left behind in processes of ours that died in the middle of a start.

    Returns:
        Names of the files removed.
    """
    removed = []
    for path in SHM_DIRECTORY.iterdir():
        match = _FILE_NAME.fullmatch(path.name)
        if match is None or _is_locked(match["owner"]):
            continue
        try:
            is_ours = path.lstat().st_uid == os.geteuid()
        except FileNotFoundError:
            continue
        if is_ours:
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


def _agreed_name(own_name: str, group: RankGroup, first: int) -> str:
    host = hashlib.sha256(host_identity().encode()).hexdigest()
    text = f"{own_name} {host}".ljust(_MESSAGE_BYTES).encode("ascii")
    message = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dist.broadcast(message, src=first, group=group.process_group)
    name, first_host = bytes(message.tolist()).decode("ascii").split()
    return name if first_host == host else own_name


def _is_locked(owner: str) -> bool:
    """Whether a live process holds that segment, possibly in another pid namespace."""
    try:
        descriptor = os.open(SHM_DIRECTORY / owner, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        if error.errno in (errno.EACCES, errno.ELOOP):
            return True  # Another user's: not for us to judge.
        raise
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
