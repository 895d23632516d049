"""The doors of a coordinator as its own user, another user and a stranger find them."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from support.fake_run import fill_store

from rolemesh.coordinator.api.credentials import TOKEN_FILE
from rolemesh.coordinator.api.doors import Doors, open_doors
from rolemesh.coordinator.api.known_doors import known_door
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.recipe.api_section import ApiSpec
from rolemesh.coordinator.sdk import AsyncClient, Client, RetryPolicy
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.rpc.authority import Authority
from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.errors import (
    ForbiddenError,
    PreconditionError,
    RolemeshError,
    UnavailableError,
)
from rolemesh.rpc.identity import Identity
from rolemesh.v1 import coordinator_pb2, coordinator_pb2_grpc

QUICK = RetryPolicy(budget_s=0)
AUTHORITY = Authority.make()
HOSTS = ("127.0.0.1", "mesh.example")
TOKEN = "s3cret"
GIVEN = {"ROLEMESH_API_TOKEN": TOKEN}


def written(identity: Identity, place: Path) -> Path:
    place.touch(mode=0o600)
    place.write_bytes(identity.pem())
    return place


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this user's coordinators leave notes; no other test's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "rolemesh"


@contextlib.asynccontextmanager
async def doors(
    folder: Path,
    *,
    given: dict[str, str] | None = None,
    certificates: Path | None = None,
    **api: Any,
) -> AsyncIterator[Doors]:
    store = MemoryStateStore()
    await fill_store(store, "live", folder / "live", num_steps=2, is_live=True)
    async with open_doors(
        StoreOperations(store),
        ApiSpec.model_validate(api),
        folder=folder,
        certificates=certificates,
        environment=given or {},
    ) as opened:
        yield opened


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    return written(AUTHORITY.issue("coordinator", hosts=HOSTS), tmp_path / "coordinator.pem")


@pytest.fixture
def trusted(tmp_path: Path) -> Path:
    """What clients trust."""
    place = tmp_path / "authority.crt"
    place.write_bytes(AUTHORITY.issue("actor").authority)
    return place


async def asked(doors: Doors, **settings: Any) -> str:
    """The run's id, as a client of the SDK gets it."""
    async with AsyncClient(doors.address, retry=QUICK, **settings) as client:
        return (await client.get_run("live")).run_id


# --- a token without ceremony -----------------------------------------------------------------


async def test_programs_of_this_user_find_the_token_and_those_of_others_do_not(
    tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with doors(tmp_path) as opened:
        assert await asked(opened) == "live"
        port = opened.address.rpartition(":")[2]
        async with AsyncClient(f"localhost:{port}", retry=QUICK) as client:
            assert (await client.get_run("live")).run_id == "live"
        # A note says where the token is, and who may read either.
        (note,) = notes.iterdir()
        token = (tmp_path / TOKEN_FILE).read_text().strip()
        assert token not in note.read_text()
        assert (notes.stat().st_mode & 0o777, note.stat().st_mode & 0o777) == (0o700, 0o600)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
        with pytest.raises(ForbiddenError, match="file api-token of the folder") as refused:
            await asked(opened)
        assert refused.value.reason == "TOKEN_MISSING"
        assert await asked(opened, token=token) == "live"
        assert opened.url is not None
        async with httpx.AsyncClient(base_url=opened.url) as client_of_rest:
            assert (await client_of_rest.get("api/v1/runs")).status_code == 401
            answer = await client_of_rest.post("api/v1/runs/live/stop")
            assert answer.status_code == 401
            right = {"authorization": f"Bearer {token}"}
            assert (await client_of_rest.get("api/v1/runs", headers=right)).status_code == 200
            # A page that rebinds its name does not get as far as that.
            rebound = {**right, "host": "evil.example"}
            answer = await client_of_rest.get("api/v1/runs", headers=rebound)
            assert answer.json()["reason"] == "HOST_REFUSED"
            elsewhere = {**right, "origin": "http://evil.example"}
            answer = await client_of_rest.post("api/v1/runs/live/stop", headers=elsewhere)
            assert answer.json()["reason"] == "ORIGIN_REFUSED"
    assert list(notes.iterdir()) == []


async def test_a_client_that_came_before_its_coordinator_finds_the_token(tmp_path: Path) -> None:
    async with doors(tmp_path) as first:
        port = int(first.address.rpartition(":")[2])
    async with AsyncClient(f"127.0.0.1:{port}", retry=RetryPolicy()) as client:
        with pytest.raises(UnavailableError):
            await asked(first)
        async with doors(tmp_path, grpc_port=port):
            assert (await client.get_run("live")).run_id == "live"
        # It has the same token when it comes back.
        async with doors(tmp_path, grpc_port=port):
            assert (await client.get_run("live")).run_id == "live"


async def test_the_note_of_a_dead_coordinator_is_not_followed(tmp_path: Path, notes: Path) -> None:
    async with doors(tmp_path) as opened:
        assert known_door(opened.address) is not None
        (note,) = notes.iterdir()
        text = note.read_text()
    # Its process was killed, and another user's listens on its port now.
    note.write_text(text)
    assert known_door(opened.address) is None
    for other in ("127.0.0.1:1", "nowhere", "../../etc/passwd:1", ""):
        assert known_door(other) is None


async def test_what_is_told_holds_the_token_for_the_owner_alone(tmp_path: Path) -> None:
    async with doors(tmp_path) as opened:
        token = (tmp_path / TOKEN_FILE).read_text().strip()
        assert opened.told(to_person=True).startswith(
            f"dashboard and REST: {opened.url}#token={token} - gRPC: {opened.address}"
        )
        told = opened.told(to_person=False)
        assert told.endswith(f"token: {tmp_path / TOKEN_FILE}")
        for text in (told, repr(opened), json.dumps(opened.facts())):
            assert token not in text
        assert opened.facts()["token_file"] == str(tmp_path / TOKEN_FILE)
    async with doors(tmp_path, given=GIVEN) as opened:
        # One that the owner has chosen may be good for more than this.
        assert TOKEN not in opened.told(to_person=True)


async def test_the_doors_are_open_where_the_owner_says_so(tmp_path: Path) -> None:
    async with doors(tmp_path, open_to_every_local_user=True, http_port=None) as opened:
        async with open_channel(opened.address) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            await stub.StopRun(coordinator_pb2.StopRunRequest(run_id="live"))
    assert not (tmp_path / TOKEN_FILE).exists()


# --- scopes -----------------------------------------------------------------------------------


async def test_a_client_gets_no_further_than_its_token(tmp_path: Path) -> None:
    files = {scope: tmp_path / scope for scope in ("read", "drive")}
    for scope, file in files.items():
        file.write_text(f"may-{scope}")
    async with doors(tmp_path, given=GIVEN, tokens=files) as opened:
        async with AsyncClient(opened.address, token="may-read", retry=QUICK) as reader:
            assert (await reader.get_run("live")).run_id == "live"
            with pytest.raises(ForbiddenError, match="StopRun is not for client/read") as refused:
                await reader.stop_run("live")
            assert refused.value.reason == "CALLER_DENIED"
            with pytest.raises(ForbiddenError, match="AttachRun is not for client/read"):
                await reader.attach("live")
        async with AsyncClient(opened.address, token="may-drive", retry=QUICK) as driver:
            await driver.pause_run("live")
            with pytest.raises(ForbiddenError, match="needs the scope admin"):
                await driver.create_run({"run": {}})
            with pytest.raises(ForbiddenError, match="needs the scope admin"):
                await driver.resume_run("live")
            # Past the door: the run is no external one.
            with pytest.raises(PreconditionError, match="whose steps its coordinator makes"):
                await driver.attach("live")
        async with AsyncClient(opened.address, token=TOKEN, retry=QUICK) as admin:
            await admin.resume_run("live")


# --- TLS --------------------------------------------------------------------------------------


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
        right = {"authorization": f"Bearer {TOKEN}"}
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
    certificate.write_bytes(own.key + own.certificate)
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
        with pytest.raises(UnavailableError, match="certificate|Hostname|handshake"):
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
        certificate.write_text("half a file")
        assert await get(opened.url, newly_trusted) == 200
        certificate.unlink()
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
        except ForbiddenError as error:
            assert error.reason == "CALLER_DENIED"
            assert error.metadata["caller"] == member
            return False
        except RolemeshError:
            # Past the door.
            return True
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
        async with open_channel(
            opened.member_address, identity=stranger, retries=False
        ) as channel:
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
