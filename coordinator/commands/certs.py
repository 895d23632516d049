"""`rolemesh certs`: certificates for services that start by themselves, kept in a folder."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from rich.console import Console
from rich.table import Table

from rolemesh.coordinator.commands.terminal.ending import refuse
from rolemesh.coordinator.state.files import write_atomically
from rolemesh.rpc.members.authority import Authority
from rolemesh.rpc.members.identity import SERVER_NAME, URI_PREFIX, Identity, IdentityError

AUTHORITY_FILE = "authority.pem"
"""The key that signs. No service needs it: keep it away from the hosts of the mesh."""

TRUST_FILE = "authority.crt"
"""The authority's certificate alone, which is no secret: for browsers, curl and clients with a
token."""

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Certificates of a mesh's members."
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the certificates.")]
Days = Annotated[float, typer.Option(min=0.01, help="How long they are good.")]


@app.command()
def init(directory: Folder, days: Days = 3650) -> None:
    """Makes an authority: DIR/authority.pem, which signs certificates and stays with you.

    DIR/authority.crt is its certificate, by which clients of a coordinator know that they can trust
    the coordinator's.
    """
    place = directory / AUTHORITY_FILE
    if place.exists():
        refuse(
            f"{place} is there: members trust that one; use `issue`, or another folder for "
            "another mesh"
        )
    directory.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    authority = Authority.make(days=days)
    write_atomically(place, authority.pem().decode(), is_private=True)
    public = authority.certificate.public_bytes(Encoding.PEM).decode()
    write_atomically(directory / TRUST_FILE, public)
    print(f"wrote {place}: keep it to yourself, and give members only what `issue` writes")


@app.command()
def issue(
    directory: Folder,
    members: Annotated[
        list[str],
        typer.Argument(
            metavar="MEMBER...",
            help="coordinator, a role (actor, critic, ...), client/read, client/drive, "
            "client/admin.",
        ),
    ],
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="NAME",
            help="Name or address by which programs outside of the mesh call these members; may "
            "be repeated.",
        ),
    ] = None,
    days: Days = 90,
) -> None:
    """Writes an identity for each member: DIR/actor.pem, DIR/client-read.pem."""
    authority = _authority(directory)
    for member in members:
        place = _place(directory, member)
        if place.exists():
            refuse(f"{place} is there: `rolemesh certs renew {directory} {member}` replaces it")
        _write(authority, place, member, hosts or (), days)


@app.command()
def renew(
    directory: Folder,
    members: Annotated[
        list[str] | None, typer.Argument(metavar="MEMBER...", help="Which; all by default.")
    ] = None,
    days: Days = 90,
) -> None:
    """Replaces identities by new ones, with new keys, of the same members.

    Servers take the new file for the connections they get from then on. A service that is started
    again takes it for the connections that it makes, too.
    """
    authority = _authority(directory)
    places = [_place(directory, member) for member in members or ()] or _identities(directory)
    for place in places:
        try:
            member, hosts, _ = _facts(Identity.read(place))
        except IdentityError as error:
            refuse(str(error))
        _write(authority, place, member, hosts, days)


@app.command("list")
def show(directory: Folder) -> None:
    """Shows the members that have an identity, and how long it is good."""
    table = Table("file", "member", "hosts", "good until")
    for place in _identities(directory):
        member, hosts, end = _facts(Identity.read(place))
        table.add_row(place.name, member, ", ".join(hosts), end)
    Console().print(table)


def _authority(directory: Path) -> Authority:
    place = directory / AUTHORITY_FILE
    try:
        return Authority.parse(place.read_bytes(), str(place))
    except OSError as error:
        refuse(
            f"{place} cannot be read ({error.strerror}): make it with `rolemesh certs init "
            f"{directory}`"
        )
    except IdentityError as error:
        refuse(str(error))


def _place(directory: Path, member: str) -> Path:
    return directory / f"{member.replace('/', '-')}.pem"


def _identities(directory: Path) -> list[Path]:
    return [place for place in sorted(directory.glob("*.pem")) if place.name != AUTHORITY_FILE]


def _facts(identity: Identity) -> tuple[str, list[str], str]:
    """Member, hosts and end of an identity."""
    certificate = x509.load_pem_x509_certificate(identity.certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
    hosts = [name for name in names.get_values_for_type(x509.DNSName) if name != SERVER_NAME]
    hosts += map(str, names.get_values_for_type(x509.IPAddress))
    end = f"{certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    return uri.removeprefix(URI_PREFIX), hosts, end


def _write(
    authority: Authority, place: Path, member: str, hosts: Iterable[str], days: float
) -> None:
    try:
        identity = authority.issue(member, hosts=tuple(hosts), days=days)
    except ValueError as error:
        refuse(str(error))
    write_atomically(place, identity.pem().decode(), is_private=True)
    print(f"wrote {place}: {member}, good until {_facts(identity)[2]}")
