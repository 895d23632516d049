"""TLS on a coordinator's doors: whom clients take for it, and whom it takes for a member."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
import yaml
from support.coordinator_doors import GIVEN, QUICK, TOKEN, asked, bearer, doors, written
from support.fake_roles import fake_recipe
from typer.testing import CliRunner

from rolemesh.coordinator.api.doors.doors import Doors
from rolemesh.coordinator.commands.train import app
from rolemesh.coordinator.sdk import AsyncClient, Client
from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.errors import ForbiddenError, RolemeshError, UnavailableError
from rolemesh.rpc.members.authority import Authority
from rolemesh.rpc.members.identity import Identity
from rolemesh.v1 import coordinator_pb2, coordinator_pb2_grpc

AUTHORITY = Authority.make()
HOSTS = ("127.0.0.1", "mesh.example")


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This user's coordinators leave their notes where no other test does."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    return written(AUTHORITY.issue("coordinator", hosts=HOSTS), tmp_path / "coordinator.pem")


@pytest.fixture
def trusted(tmp_path: Path) -> Path:
    """What clients trust."""
    place = tmp_path / "authority.crt"
    place.write_bytes(AUTHORITY.issue("actor").authority)
    return place


def write(file: Path, content: bytes) -> None:
    file.write_bytes(content)


async def test_a_certificate_makes_both_doors_speak_tls(
    tmp_path: Path, certificate: Path, trusted: Path
) -> None:
    async with doors(tmp_path, given=GIVEN, certificate=certificate) as opened:
        assert await asked(opened, token=TOKEN, authority=trusted) == "live"
        # The token does not help who cannot be told apart from others, nor the other way round.
        with pytest.raises(ForbiddenError):
            await asked(opened, authority=trusted)
        assert opened.url is not None
        assert opened.url.startswith("https://127.0.0.1:")
        right = bearer(TOKEN)
        verified = ssl.create_default_context(cafile=trusted)
        async with httpx.AsyncClient(base_url=opened.url, verify=verified, headers=right) as client:
            assert (await client.get("api/v1/runs")).status_code == 200
            assert (await client.get("api/v1/runs", headers={"authorization": "x"})).is_error
            # Its own page may change something.
            own = {"origin": opened.url.rstrip("/")}
            answer = await client.post("api/v1/runs/live/pause", headers=own)
            assert answer.status_code == 200
        with pytest.raises(httpx.HTTPError):
            await httpx.AsyncClient(base_url=opened.url.replace("https", "http")).get("healthz")


async def test_own_programs_on_this_host_find_what_to_trust(
    tmp_path: Path, certificate: Path
) -> None:
    async with doors(tmp_path, certificate=certificate) as opened:
        assert await asked(opened) == "live"
    # Also a certificate that knows no address of this host, from someone else's authority.
    own = Authority.make().issue("coordinator")
    write(certificate, own.key + own.certificate)
    async with doors(tmp_path, certificate=certificate) as opened:
        assert await asked(opened) == "live"


def strangers(tmp_path: Path) -> Iterator[tuple[str, Identity]]:
    """Certificates of servers that a client must not take for its coordinator."""
    yield "another authority", Authority.make().issue("coordinator", hosts=HOSTS)
    yield "expired", AUTHORITY.issue("coordinator", hosts=HOSTS, days=-1 / 1440)
    yield "another name", AUTHORITY.issue("coordinator", hosts=("other.example",))
    # It cannot stand in for a server, though the authority is right.
    yield "a client", AUTHORITY.issue("client/admin")


@pytest.mark.parametrize("kind", ["another authority", "expired", "another name", "a client"])
async def test_no_token_goes_to_a_server_that_is_not_the_right_one(
    kind: str, tmp_path: Path, trusted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = dict(strangers(tmp_path))[kind]
    place = written(identity, tmp_path / "theirs.pem")
    # Their tokens are of no interest: what is sent is.
    async with doors(tmp_path, given=GIVEN, certificate=place) as opened:
        with pytest.raises(UnavailableError, match=r"certificate|Hostname|handshake"):
            await asked(opened, token=TOKEN, authority=trusted)
        with pytest.raises(UnavailableError):
            async with AsyncClient(
                f"https://{opened.address}", token=TOKEN, retry=QUICK
            ) as by_public_authorities:
                await by_public_authorities.get_run("live")
        assert opened.url is not None
        verified = ssl.create_default_context(cafile=trusted)
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            async with httpx.AsyncClient(verify=verified) as client:
                await client.get(opened.url)


async def test_a_client_in_clear_learns_nothing_from_a_server_with_tls(
    tmp_path: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with doors(tmp_path, given=GIVEN, certificate=certificate) as opened:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
        with pytest.raises(UnavailableError):
            await asked(opened, token=TOKEN)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_beyond_loopback_the_certificate_of_the_mesh_is_shown(
    host: str, tmp_path: Path, certificate: Path, trusted: Path
) -> None:
    with pytest.raises(ValueError, match=r"travel in clear.*--allow-remote"):
        async with doors(tmp_path, given=GIVEN, host=host):
            pass
    settings = {"given": GIVEN, "host": host, "certificates": tmp_path}
    try:
        async with doors(tmp_path, **settings) as opened:
            assert (opened.url or "").startswith("https:")
            if host == "0.0.0.0":
                assert await asked(opened, token=TOKEN, authority=trusted) == "live"
        async with doors(tmp_path, **settings, allow_remote=True) as opened:
            assert (opened.url or "").startswith("http:")
            assert await asked(opened, token=TOKEN) == "live"
    except ValueError as error:
        if ":" in host and "cannot be bound" in str(error):
            pytest.skip("this host has no IPv6")
        raise


async def test_the_command_line_reaches_a_coordinator_over_tls(
    tmp_path: Path, certificate: Path, trusted: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(fake_recipe().model_dump(mode="json", exclude={"store"})))
    looking = written(AUTHORITY.issue("client/read"), tmp_path / "client-read.pem")

    async def train(*words: object) -> tuple[int, str]:
        done = await asyncio.to_thread(
            CliRunner().invoke, app, [str(recipe), *map(str, words)], env=GIVEN
        )
        return done.exit_code, done.output

    async with doors(tmp_path, given=GIVEN, certificate=certificate, member_port=0) as opened:
        there = f"https://{opened.address}"
        # That it makes no runs is what it says to those whom it lets in.
        code, told = await train("--coordinator", there, "--authority", trusted)
        assert (code, "makes one run alone" in told) == (2, True), told
        member = opened.member_address
        code, told = await train("--coordinator", member, "--identity", looking)
        assert (code, "CreateRun is not for client/read" in told) == (2, True), told
        code, told = await train("--coordinator", member, "--identity", certificate)
        assert (code, "CreateRun is not for coordinator" in told) == (2, True), told
    code, told = await train("--coordinator", "mesh.example:1")
    assert (code, "others could read on its way" in told) == (2, True), told
    for words in (("--authority", trusted), ("--identity", looking), ("--allow-remote",)):
        code, told = await train(*words)
        assert (code, "reach --coordinator, which is missing" in told) == (2, True), told


async def test_a_renewed_certificate_counts_for_new_connections(
    tmp_path: Path, certificate: Path, trusted: Path
) -> None:
    newer = Authority.make()
    newly_trusted = tmp_path / "newer.crt"
    newly_trusted.write_bytes(newer.issue("actor").authority)

    async def get(url: str, authority: Path) -> int:
        verified = ssl.create_default_context(cafile=authority)
        async with httpx.AsyncClient(verify=verified) as client:
            return (await client.get(f"{url}healthz")).status_code

    async with doors(tmp_path, given=GIVEN, certificate=certificate) as opened:
        assert opened.url is not None
        assert await get(opened.url, trusted) == 200
        written(newer.issue("coordinator", hosts=HOSTS), certificate)
        assert await get(opened.url, newly_trusted) == 200
        assert await asked(opened, token=TOKEN, authority=newly_trusted) == "live"
        with pytest.raises(httpx.ConnectError):
            await get(opened.url, trusted)
        # A file that cannot be used, or is gone, changes nothing.
        write(certificate, b"half a file")
        assert await get(opened.url, newly_trusted) == 200
        os.unlink(certificate)
        assert await get(opened.url, newly_trusted) == 200


def test_a_token_is_not_sent_to_another_host_in_clear() -> None:
    with pytest.raises(ValueError, match=r"others could read.*https://mesh\.example:1") as refused:
        Client("mesh.example:1", token=TOKEN)
    assert TOKEN not in str(refused.value)
    Client("mesh.example:1", token=TOKEN, allow_remote=True).close()
    Client("https://mesh.example:1", token=TOKEN).close()
    Client("mesh.example:1").close()
    with pytest.raises(ValueError, match="leave out token and authority"):
        Client("mesh.example:1", token=TOKEN, identity=AUTHORITY.issue("client/read"))
    with pytest.raises(ValueError, match=r"authority .*absent cannot be read"):
        Client("mesh.example:1", authority=Path("absent"))


# --- members of the mesh ----------------------------------------------------------------------


async def may(doors: Doors, member: str, call: str) -> bool:
    assert doors.member_address is not None
    async with AsyncClient(
        doors.member_address, identity=AUTHORITY.issue(member), retry=QUICK
    ) as client:
        try:
            match call:
                case "look":
                    await client.get_run("live")
                case "drive":
                    await client.checkpoint_run("live")
                case "begin":
                    await client.create_run({"run": {}})
        except RolemeshError as error:
            # Whatever else is wrong with the call, it is past the door.
            return (error.reason, error.metadata.get("caller")) != ("CALLER_DENIED", member)
    return True


async def test_members_of_the_mesh_get_what_their_certificate_allows(
    tmp_path: Path, certificate: Path
) -> None:
    async with doors(tmp_path, certificates=tmp_path, member_port=0) as opened:
        found = {
            member: [call for call in ("look", "drive", "begin") if await may(opened, member, call)]
            for member in ("client/read", "client/drive", "client/admin", "actor", "coordinator")
        }
        assert found == {
            "client/read": ["look"],
            "client/drive": ["look", "drive"],
            "client/admin": ["look", "drive", "begin"],
            "actor": [],
            "coordinator": [],
        }
        assert f"gRPC for members of the mesh: {opened.member_address}" in opened.told(
            to_person=False
        )
        # On this host the other doors stay in clear: they have a token.
        assert (opened.url or "").startswith("http:")


@pytest.mark.parametrize(
    "stranger",
    [
        None,
        Authority.make().issue("client/admin"),
        AUTHORITY.issue("client/admin", days=-1 / 1440),
        Identity(
            key=(other := Authority.make().issue("client/admin")).key,
            certificate=other.certificate,
            authority=AUTHORITY.issue("client/admin").authority,
        ),
    ],
    ids=["no certificate", "another mesh", "expired", "forged"],
)
@pytest.mark.parametrize("is_open", [False, True])
async def test_strangers_do_not_get_in_as_members(
    stranger: Identity | None, is_open: bool, tmp_path: Path, certificate: Path
) -> None:
    settings = {"open_to_every_local_user": is_open, "certificates": tmp_path}
    async with doors(tmp_path, member_port=0, **settings) as opened:
        assert opened.member_address is not None
        async with open_channel(opened.member_address, identity=stranger, retries=False) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            with pytest.raises(UnavailableError):
                await stub.ListRuns(coordinator_pb2.ListRunsRequest(), timeout=5)
        # The right token does not take the place of a certificate either.
        credentials = grpc.ssl_channel_credentials(AUTHORITY.issue("actor").authority)
        options = (("grpc.ssl_target_name_override", "rolemesh"),)
        async with grpc.aio.secure_channel(
            opened.member_address, credentials, options=options
        ) as bare:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(bare)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ListRuns(coordinator_pb2.ListRunsRequest(), timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await may(opened, "client/read", "look")
