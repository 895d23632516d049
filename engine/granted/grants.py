"""What the owner of a process lets others name to it: code, folders, variables, addresses.

A spec that arrives over the wire names things of this host. A service checks it at Initialize, a
coordinator that takes recipes at CreateRun, both before anything that it names is opened or run.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel

from rolemesh.engine.granted.user_code import INSTALLED, defines, files_of
from rolemesh.engine.specs import Named, named_in

_SCHEMES = ("http", "https", "grpc", "grpcs", "redis", "rediss")
"""Schemes of addresses that are a host and a port."""


class NotGrantedError(ValueError):
    """A spec names what the owner of this process has not granted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """What may be named. Nothing, unless it stands here.

    Example::

        grant = Grant(code_roots=(Path("rewards"),), folders=(Path(".models"), Path("runs")))
        grant.check(spec, "reward.")  # spec.source.function is "rewards/mine.py:judge"
        grant.folder("/tmp/model", "directory")  # NotGrantedError: ... start it with --folder /tmp
    """

    code_names: tuple[str, ...] = ()
    """Functions and classes by their exact names, wherever they are."""
    code_roots: tuple[Path, ...] = ()
    """Folders: what a Python file in them defines may be named, as 'path/to/file.py:name' or
    'module:name'. The standard library and installed packages never count as lying in one."""
    folders: tuple[Path, ...] = ()
    """Files and folders that may be read with all that is in them, and folders to write into."""
    variables: tuple[str, ...] = ()
    """Environment variables whose values may be used, e.g. as tokens."""
    hosts: tuple[str, ...] | None = ()
    """Addresses, as host or host:port, that may be connected to beside all public ones; what gets
    a secret along goes to these alone. None: any address."""
    network: bool = False
    """Whether functions may open connections of their own, to any address."""

    def check(self, spec: BaseModel, prefix: str) -> None:
        """Checks all that a spec names. Looks host names up: not on a loop with `hosts`.

        Args:
            spec: A role's section, or a recipe.
            prefix: Stands before fields in messages, e.g. "reward.".

        Raises:
            NotGrantedError: Something is not granted; names field, value and remedy.
        """
        for named in named_in(spec, prefix):
            self.check_named(named)

    def check_named(self, named: Named) -> None:
        """The same for one thing that a spec names."""
        match named.kind:
            case "code":
                self._check_code(named)
            case "path":
                self.folder(named.value, named.field)
            case "variable":
                if named.value not in self.variables:
                    raise _refused(
                        named.field, named.value, "", f"start it with --variable {named.value}"
                    )
            case "command":
                self._check_command(named)
            case "url":
                self._check_address(named)
            case "network" if not self.network:
                raise _refused(named.field, named.value, "", "start it with --function-network")

    def folder(self, path: str, field: str, *, writes: bool = False) -> Path:
        """The path with all links resolved, which lies in one of the folders.

        Args:
            path: A file or folder, which need not exist.
            field: For messages.
            writes: Whether it is made or replaced: then it must lie below a folder, and be none.

        Raises:
            NotGrantedError: It does not.
        """
        try:
            resolved = Path(path).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise _refused(field, path, f", which is no path ({error})", "correct it") from error
        for root in self.folders:
            own = root.resolve()
            if resolved.is_relative_to(own) and not (writes and resolved == own):
                if writes:
                    _check_writable(resolved, path, field)
                return resolved
        found = "" if resolved == Path(path) else f", which is {str(resolved)!r}"
        raise _refused(field, path, found, f"start it with --folder {resolved.parent}")

    def _check_code(self, named: Named) -> None:
        place, colon, attribute = named.value.rpartition(":")
        # Names without a colon are entry points: what the owner installed, offered for this.
        if not colon or named.value in self.code_names:
            return
        files = files_of(place)
        if not files or not all(self._is_in_code_root(file) for file in files):
            where = files[-1].parent if files else "DIR"
            raise _refused(
                named.field,
                named.value,
                "",
                f"put the file into a folder of functions and start it with --code-root {where}",
            )
        if not defines(files[-1], attribute):
            raise _refused(
                named.field,
                named.value,
                f": {files[-1]} does not define {attribute!r}, and what it imports is not granted",
                f"name what the file defines, or start it with --code-name {named.value}",
            )

    def _check_command(self, named: Named) -> None:
        """Of a command each word by itself: files lie in a folder of code, and one at least does.

        "python" is the interpreter. A word that is no file is an argument.
        """
        if named.value in self.code_names:
            return
        if not os.path.isfile(named.value):
            if named.field.endswith(".0") and named.value not in ("python", "python3"):
                remedy = "give the path of a program in a folder of code, or begin with python"
                raise _refused(named.field, named.value, ", which is no file", remedy)
            if named.value.startswith("-") and named.field.endswith(".1"):
                remedy = "give the path of a file in a folder of code"
                raise _refused(named.field, named.value, ", an option of the interpreter", remedy)
            return
        file = Path(named.value).resolve()
        if not self._is_in_code_root(file):
            remedy = (
                "put the file into a folder of functions and start it with --code-root "
                f"{file.parent}"
            )
            raise _refused(named.field, named.value, "", remedy)

    def _is_in_code_root(self, file: Path) -> bool:
        if any(file.is_relative_to(folder) for folder in INSTALLED):
            return False
        return any(file.is_relative_to(root.resolve()) for root in self.code_roots)

    def _check_address(self, named: Named) -> None:
        if self.hosts is None:
            return
        if named.value in self.hosts:
            return
        try:
            host, port = _place_of(named.value)
        except ValueError as error:
            # A file, for example, as some trackers take.
            remedy = f"start it with --allow-host {named.value}"
            raise _refused(named.field, named.value, f" ({error})", remedy) from None
        # A granted host may be a name or a number; both are compared as they are written.
        if {host, f"{host}:{port}", f"[{host}]:{port}"} & {*self.hosts}:
            return
        remedy = f"start it with --allow-host {host}"
        if named.gets_secret:
            raise _refused(named.field, named.value, ", to which a secret goes along", remedy)
        for address in _addresses_of(host, named):
            if not is_public(address):
                found = f", which is {address}, an address that is not public"
                raise _refused(named.field, named.value, found, remedy)


def _check_writable(resolved: Path, path: str, field: str) -> None:
    """Refuses a folder that could not be made, before work is done for it."""
    nearest = next(parent for parent in resolved.parents if os.path.exists(parent))
    if not os.access(nearest, os.W_OK):
        remedy = (
            f"let user {os.geteuid()} write into {nearest} (in containers a reward may write if "
            "the file of `rolemesh render compose` says so, for a recipe that trains it)"
        )
        raise _refused(field, path, ", where this process may not write", remedy)


def _place_of(address: str) -> tuple[str, int | None]:
    """Host and port of a URL, or of host:port.

    Raises:
        ValueError: It has none, or programs may read it in different ways.
    """
    if not address.isprintable() or set(address) & set("\\@ "):
        raise ValueError("with a user, a space or another character that URLs lack")
    parts = urlsplit(address if "//" in address else f"//{address}")
    if "//" in address and parts.scheme not in _SCHEMES:
        raise ValueError("no host and port")
    if not parts.hostname:
        raise ValueError("no host")
    return parts.hostname, parts.port


def is_public(address: str) -> bool:
    """Whether an address, as numbers, is one of the public internet.

    Private, loopback, link-local (where clouds keep their metadata), shared, multicast and reserved
    ones are not, nor are IPv6 addresses that carry an IPv4 address which is not, or that
    translators and tunnels take apart.
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        elif found.sixtofour or found.teredo or found in _TRANSLATED:
            return False
    return found.is_global and not found.is_multicast


_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses that stand for IPv4 ones (RFC 6052)."""


def _addresses_of(host: str, named: Named) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _refused(
            named.field, named.value, f", whose host cannot be looked up ({error})", "correct it"
        ) from error
    return sorted({str(address[0]) for *_, address in found})


def _refused(field: str, value: str, found: str, remedy: str) -> NotGrantedError:
    return NotGrantedError(
        f"{field} is {value!r}{found}, and the owner of this process has not granted that: "
        f"{remedy}, if you are the owner, or name something that is granted"
    )
