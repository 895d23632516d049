"""Services with identities: who gets in, and what each member may call."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from support.services import operation_key, serving

from rolemesh.coordinator.compliance.contract import Outcome
from rolemesh.coordinator.compliance.suite import SuiteInputError, run_suite
from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import ForbiddenError, PreconditionError, UnavailableError
from rolemesh.rpc.members.authority import Authority
from rolemesh.rpc.members.identity import Identity, IdentityError
from rolemesh.services.reward.servicers import RewardRole
from rolemesh.services.runtime.service_server import ServiceServer, ServiceStartError
from rolemesh.v1 import worker_pb2, worker_pb2_grpc

AUTHORITY = Authority.make()


def written(identity: Identity, place: Path) -> Path:
    place.touch(mode=0o600)
    place.write_bytes(identity.pem())
    return place


@contextlib.asynccontextmanager
async def closed_service(folder: Path) -> AsyncIterator[ServiceServer]:
    """A toy service that serves members of AUTHORITY's mesh only."""
    place = written(AUTHORITY.issue("toy"), folder / "toy.pem")
    async with serving(identity=place) as server:
        yield server


async def status(channel: MeshChannel) -> worker_pb2.GetStatusResponse:
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    answer: worker_pb2.GetStatusResponse = await stub.GetStatus(
        worker_pb2.GetStatusRequest(), timeout=5.0
    )
    return answer


@pytest.mark.parametrize("member", ["coordinator", "toy", "client/read", "client/admin"])
async def test_members_that_may_look_get_an_answer(member: str, tmp_path: Path) -> None:
    async with (
        closed_service(tmp_path) as server,
        open_channel(server.runtime.address, identity=AUTHORITY.issue(member)) as channel,
    ):
        assert (await status(channel)).state == worker_pb2.WORKER_STATE_IDLE


@pytest.mark.parametrize(
    "stranger",
    [
        None,
        Authority.make().issue("coordinator"),
        AUTHORITY.issue("coordinator", days=-1 / 1440),
        # It trusts the right authority, and shows a certificate of another one.
        Identity(
            key=(other := Authority.make().issue("coordinator")).key,
            certificate=other.certificate,
            authority=AUTHORITY.issue("coordinator").authority,
        ),
    ],
    ids=["no certificate", "another mesh", "expired", "forged"],
)
async def test_strangers_do_not_get_in(stranger: Identity | None, tmp_path: Path) -> None:
    async with closed_service(tmp_path) as server:
        async with open_channel(server.runtime.address, identity=stranger, retries=False) as bad:
            with pytest.raises(UnavailableError):
                await status(bad)
        # The service is unharmed.
        async with open_channel(
            server.runtime.address, identity=AUTHORITY.issue("coordinator")
        ) as good:
            assert (await status(good)).state == worker_pb2.WORKER_STATE_IDLE


async def test_a_connection_without_a_certificate_of_its_own_does_not_get_in(
    tmp_path: Path,
) -> None:
    async with closed_service(tmp_path) as server:
        identity = AUTHORITY.issue("coordinator")
        credentials = grpc.ssl_channel_credentials(identity.authority)
        options = (("grpc.ssl_target_name_override", "rolemesh"),)
        async with grpc.aio.secure_channel(
            server.runtime.address, credentials, options=options
        ) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=5.0)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("member", ["client/read", "client/drive", "critic"])
async def test_a_member_may_not_call_what_is_for_others(member: str, tmp_path: Path) -> None:
    async with (
        closed_service(tmp_path) as server,
        open_channel(server.runtime.address, identity=AUTHORITY.issue(member)) as channel,
    ):
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        with pytest.raises(ForbiddenError, match="Drain of the toy is not for") as caught:
            await worker.Drain(worker_pb2.DrainRequest(exit=True))
        assert caught.value.reason == "CALLER_DENIED"
        assert caught.value.metadata["caller"] == member
        assert not server.runtime.process.exit_requested.is_set()


async def test_the_coordinator_may_call_what_a_reader_may_not(tmp_path: Path) -> None:
    request = worker_pb2.SleepRequest(key=operation_key("sleep"))
    async with closed_service(tmp_path) as server:
        address = server.runtime.address
        async with open_channel(address, identity=AUTHORITY.issue("client/read")) as channel:
            with pytest.raises(ForbiddenError):
                await worker_pb2_grpc.WorkerServiceStub(channel).Sleep(request)
        async with open_channel(address, identity=AUTHORITY.issue("coordinator")) as channel:
            # Past the door: the service has no run yet.
            with pytest.raises(PreconditionError):
                await worker_pb2_grpc.WorkerServiceStub(channel).Sleep(request)


async def test_a_client_cannot_stand_in_for_a_server(tmp_path: Path) -> None:
    place = written(AUTHORITY.issue("client/admin"), tmp_path / "client.pem")
    async with (
        serving(identity=place) as server,
        open_channel(
            server.runtime.address, identity=AUTHORITY.issue("coordinator"), retries=False
        ) as channel,
    ):
        with pytest.raises(UnavailableError):
            await status(channel)


async def test_a_renewed_identity_counts_for_new_connections(tmp_path: Path) -> None:
    async with closed_service(tmp_path) as server:
        address = server.runtime.address
        newer = Authority.make()
        async with open_channel(
            address, identity=AUTHORITY.issue("coordinator"), retries=False
        ) as before:
            await status(before)
            written(newer.issue("toy"), tmp_path / "toy.pem")
            # Nothing is lost: the connection that is there goes on.
            await status(before)
            async with open_channel(address, identity=newer.issue("coordinator")) as after:
                await status(after)
            # A file that cannot be used changes nothing.
            (tmp_path / "toy.pem").write_text("half a file")
            async with open_channel(address, identity=newer.issue("coordinator")) as after:
                await status(after)
        async with open_channel(
            address, identity=AUTHORITY.issue("coordinator"), retries=False
        ) as late:
            with pytest.raises(UnavailableError):
                await status(late)


async def test_the_compliance_suite_plays_the_coordinator_of_a_closed_mesh(
    tmp_path: Path,
) -> None:
    place = written(AUTHORITY.issue("reward"), tmp_path / "reward.pem")
    own = written(AUTHORITY.issue("coordinator"), tmp_path / "coordinator.pem")
    spec = {"source": {"type": "arithmetic"}}
    async with serving(RewardRole(), identity=place) as server:
        address = server.runtime.address
        findings = await run_suite(
            address, "reward", spec, names=("transport", "experience", "reward.order"), identity=own
        )
        assert {finding.outcome for finding in findings} == {Outcome.HOLDS}
        with pytest.raises(SuiteInputError, match="no server answers"):
            await run_suite(address, "reward", spec, names=("reward.order",), timeout_s=1.0)


async def test_a_service_says_what_is_wrong_with_its_identity(tmp_path: Path) -> None:
    place = tmp_path / "toy.pem"
    with pytest.raises(ServiceStartError, match=r"toy\.pem cannot be read"):
        async with serving(identity=place):
            pass
    place.write_text("nothing")
    with pytest.raises(ServiceStartError, match=r"can be read by others .* chmod 600"):
        async with serving(identity=place):
            pass
    place.chmod(0o600)
    with pytest.raises(ServiceStartError, match="0 keys and 0 certificates: give one key"):
        async with serving(identity=place):
            pass


def test_an_identity_does_not_show_its_key() -> None:
    identity = AUTHORITY.issue("actor")
    assert "PRIVATE" not in repr(identity)
    assert Identity.parse(identity.pem(), "here") == identity
    with pytest.raises(IdentityError, match="here holds 1 keys and 1 certificates"):
        Identity.parse(identity.key + identity.certificate, "here")
