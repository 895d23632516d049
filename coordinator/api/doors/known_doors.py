"""Notes for this user's other programs: how a coordinator that runs here lets them in.

A coordinator on this host leaves a note in a folder of its user, under the address of its gRPC
server. A client of the same user that knows this address alone finds the token by it, and what to
trust where the coordinator speaks TLS. The note holds no secret itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rolemesh.coordinator.state.files import read_secret
from rolemesh.rpc.members.identity import Trust, read_certificate


@dataclass(frozen=True, slots=True)
class KnownDoor:
    """How a coordinator of this user on this host lets its clients in."""

    token_file: Path | None
    """Holds the token of the scope admin; None where no file does."""
    trust: Trust | None
    """Which server is the right one; None: it speaks in clear."""

    def token(self) -> str | None:
        """The token; None where it cannot be read."""
        try:
            return None if self.token_file is None else read_secret(self.token_file, "token")
        except ValueError:
            return None


def private_folder() -> Path:
    """The folder of this user for the notes, which no other user may enter.

    Raises:
        OSError: There is none, and none can be made.
    """
    folder = _folder()
    folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is no folder of this user")
    folder.chmod(stat.S_IRWXU)
    return folder


@contextlib.contextmanager
def noted(address: str, *, token_file: Path | None, certificate: Path | None) -> Iterator[None]:
    """Leaves a note on a coordinator until the end of the block, or of the process.

    Args:
        address: "host:port" of its gRPC server, as seen from this host.
        token_file: Holds its token.
        certificate: What it shows, where it speaks TLS.

    Raises:
        OSError: The folder cannot be written.
    """
    facts: dict[str, str | None] = {"token_file": None if token_file is None else str(token_file)}
    if certificate is not None:
        facts |= _trusted(certificate)
    _remove_leftovers(private_folder())
    place = _place(address)
    draft = place.with_suffix(f".{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        # Locked as long as this process lives: the port of a dead one may be another user's by now.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        json.dump(facts, file)
        file.flush()
        draft.replace(place)
        try:
            yield
        finally:
            place.unlink(missing_ok=True)


def known_door(address: str) -> KnownDoor | None:
    """What this user's coordinator at an address has noted; None where there is no such note.

    Args:
        address: "host:port". What names of hosts lead to is not known here: see Connection.
    """
    try:
        with _place(address).open(encoding="utf-8") as file:
            is_ours = os.fstat(file.fileno()).st_uid == os.geteuid()
            if not is_ours or not _is_held(file.fileno()):
                return None
            facts = json.load(file)
    except (OSError, ValueError):
        return None
    token_file, pem = facts["token_file"], facts.get("authority")
    return KnownDoor(
        None if token_file is None else Path(token_file),
        None if pem is None else Trust(pem.encode(), facts["server_name"]),
    )


def _folder() -> Path:
    # By the user's home, as the XDG base directories are: in /tmp others could take the name.
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "rolemesh"


def _place(address: str) -> Path:
    if "/" in address:
        raise ValueError(f"{address!r} is no address")
    # A home folder may be that of several hosts.
    return _folder() / f"{platform.node()} {address}.json"


def _remove_leftovers(folder: Path) -> None:
    """Removes the notes of processes of this host that are gone."""
    for left in folder.glob(f"{platform.node()} *.json"):
        with contextlib.suppress(OSError), left.open() as file:
            if not _is_held(file.fileno()):
                left.unlink()


def _is_held(descriptor: int) -> bool:
    """Whether the process that wrote a note lives."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _trusted(certificate: Path) -> dict[str, str | None]:
    """What a client has to trust to find that certificate right, whatever the address is."""
    # Takes 60 ms to import, which a coordinator in clear need not wait for.
    from cryptography import x509

    _, chain = read_certificate(certificate)
    own = x509.load_pem_x509_certificate(chain[0])
    try:
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    hosts = names.get_values_for_type(x509.DNSName)
    hosts += map(str, names.get_values_for_type(x509.IPAddress))
    return {"authority": chain[-1].decode(), "server_name": hosts[0] if hosts else None}
