"""Weights by exchanges between real services: the bits of a fetch, and a fetch where one fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.fake_roles import until
from support.in_flight_checks import halt_at, rows_with_versions
from support.mesh_runs import tiny_model
from support.rollout_services import Caller, process_of, rows_of
from support.services import operation_key, serving
from support.warm_processes import forked

from rolemesh.engine.transport.slots.shm_directory import SHM_DIRECTORY
from rolemesh.engine.weights.exchanges import exchange
from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.errors import (
    DeadlineError,
    ForbiddenError,
    InvalidRequestError,
    PreconditionError,
    UnavailableError,
    UnsupportedError,
)
from rolemesh.rpc.members.authority import Authority
from rolemesh.services.actor.servicers import ActorRole
from rolemesh.services.rollout.servicers import RolloutRole
from rolemesh.v1 import exchange_pb2, exchange_pb2_grpc, worker_pb2, worker_pb2_grpc

HF = {"type": "hf", "max_model_len": 256, "max_num_seqs": 16}
WAY = "shared memory"
NAME = "rollout-0/1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


class Pair:
    """An actor and a rollout service, and what a coordinator does with them."""

    def __init__(self, actor: str, rollout: str) -> None:
        self.actor, self.rollout = Caller(actor), Caller(rollout)
        self.layouts: tuple[Mapping[str, int], Mapping[str, int]] = ({}, {})

    async def initialize(
        self,
        model: Path,
        train: Mapping[str, int],
        take: Mapping[str, int],
        sampler: Mapping[str, Any] | None = None,
    ) -> None:
        self.layouts = (train, take)
        # One after another: two at once import their libraries at the same time.
        await self.actor.initialize(
            model={"path": str(model), "compute_dtype": "float32"},
            optimizer={"learning_rate": 1e-2},
            rollout=HF,
            train=train,
            **({"generate": {"tp": 1}} if train else {}),
        )
        spec = {"model": {"path": str(model)}, "rollout": sampler or HF, "layout": take}
        await self.rollout.initialize(**spec)

    async def meet(self, name: str = NAME, dtype: str = "float32") -> list[Any]:
        """How the two ends of an exchange answered: their transport, or an error."""
        train, take = self.layouts
        theirs = await self.rollout.offer(name, train, dtype)
        ours = await self.actor.offer(name, take, dtype, theirs.plan)
        offers = [*ours.offers, *theirs.offers]
        answers = await asyncio.gather(
            *(one.join(name, offers) for one in (self.actor, self.rollout)), return_exceptions=True
        )
        return [one if isinstance(one, BaseException) else one.transport for one in answers]

    async def bring(self, dtype: str = "float32", name: str = NAME) -> tuple[Any, Any]:
        """What the rollout service and the actor say of one transfer."""
        published = (await self.actor.publish(dtype)).weights
        taken, sent = await asyncio.gather(
            self.rollout.take(published, name), self.actor.send(name)
        )
        return taken, sent

    async def train(self, version: int) -> int:
        return await self.actor.train(
            (await self.actor.generate(0, count=6)).experience, version=version
        )

    async def are_equal(self) -> bool:
        """Whether every rank of the sampler holds the bits that a fetch gives it."""
        exchanged = await self.rollout.checksums()
        await self.rollout.take((await self.actor.publish()).weights)
        fetched = await self.rollout.checksums()
        ranks = zip(
            (exchanged, *exchanged.other_ranks), (fetched, *fetched.other_ranks), strict=True
        )
        return all(
            (mine.checksums, mine.policy_version) == (theirs.checksums, theirs.policy_version)
            for mine, theirs in ranks
        )


@pytest.fixture
async def pair(model: Path) -> AsyncIterator[Pair]:
    """Both on this loop, with one rank each."""
    async with serving(ActorRole()) as actor, serving(RolloutRole()) as rollout:
        made = Pair(actor.runtime.address, rollout.runtime.address)
        made.roles = (actor.runtime.role, rollout.runtime.role)  # type: ignore[attr-defined]
        await made.initialize(model, {}, {})
        yield made
        for caller in (made.actor, made.rollout):
            await caller.channel.close()


def roles_of(pair: Pair) -> tuple[ActorRole, RolloutRole]:
    roles: tuple[ActorRole, RolloutRole] = pair.roles  # type: ignore[attr-defined]
    return roles


async def test_an_exchange_brings_what_a_fetch_brings_at_each_version(pair: Pair) -> None:
    assert await pair.meet() == [WAY, WAY]
    for version in (0, 3):
        taken, sent = await pair.bring()
        assert taken.policy_version == version
        assert (taken.exchange_failure, dict(sent.failures)) == ("", {})
        expected = sent.report.metrics["weights_sent_bytes"]
        assert dict(taken.report.fetched_bytes) == {WAY: expected}
        assert taken.report.metrics["weight_sync_bytes"] == expected > 0
        trainer = (await pair.actor.checksums("TRAINER")).checksums
        # The sampler has its tied head besides.
        assert trainer.items() <= (await pair.rollout.checksums()).checksums.items()
        assert await pair.are_equal()
        if version == 0:
            assert await pair.train(0) == 3


async def test_weights_are_rounded_before_they_travel(pair: Pair) -> None:
    whole = (await pair.rollout.take((await pair.actor.publish()).weights)).report
    await pair.meet(dtype="bfloat16")
    taken, _ = await pair.bring("bfloat16")
    assert taken.report.fetched_bytes[WAY] == whole.metrics["weight_sync_bytes"] / 2
    actor, rollout = roles_of(pair)
    held = dict(rollout.backend._model.named_parameters())  # type: ignore[attr-defined]
    for name, weight in actor.trainer.named_weights():
        assert torch.equal(held[name], weight.bfloat16().float()), name


async def test_weights_that_have_changed_since_their_publication_are_fetched(pair: Pair) -> None:
    """What is sent is what the trainer holds; what is asked for is what was published."""
    await pair.meet()
    published = (await pair.actor.publish()).weights
    await pair.train(0)
    taken, sent = await asyncio.gather(pair.rollout.take(published, NAME), pair.actor.send(NAME))
    assert taken.policy_version == 0
    assert set(taken.report.fetched_bytes) == {"shm"}
    # No fault of the exchange, which goes on.
    assert (taken.exchange_failure, dict(sent.failures)) == ("", {})
    taken, _ = await pair.bring()
    assert taken.policy_version == 3
    assert set(taken.report.fetched_bytes) == {WAY}


async def test_weights_come_while_a_generation_goes_on(pair: Pair) -> None:
    await pair.meet()
    await pair.bring()
    await pair.train(0)
    arrived = halt_at(roles_of(pair)[1], 5)
    generating = asyncio.create_task(pair.rollout.generate(2, max_new_tokens=12))
    await arrived.wait()
    taken, _ = await pair.bring()
    assert set(taken.report.fetched_bytes) == {WAY}
    assert not generating.done()
    rows = await rows_of((await generating).experience)
    for _, completion, versions in rows_with_versions(rows):
        assert versions == [0 if at < 5 else 3 for at in range(len(completion))]


@pytest.mark.parametrize("broken", ["actor", "rollout"])
async def test_an_end_that_breaks_leaves_the_weights_to_a_fetch(pair: Pair, broken: str) -> None:
    await pair.meet()
    role = roles_of(pair)[broken == "rollout"]
    end = role.exchanges.get(NAME)
    assert end is not None
    end.abort()
    taken, sent = await pair.bring()
    assert NAME in sent.failures
    assert "rank 0 of the rollout service" in taken.exchange_failure
    assert set(taken.report.fetched_bytes) == {"shm"}
    assert await pair.are_equal()
    # Nothing of it is left, and what is named again is said to be gone at once.
    assert [one.exchanges.get(NAME) for one in roles_of(pair)] == [None, None]
    taken, sent = await pair.bring()
    assert "not in it" in taken.exchange_failure
    assert "not in it" in sent.failures[NAME]
    # A new meeting has a new name.
    assert await pair.meet("rollout-0/2") == [WAY, WAY]
    taken, _ = await pair.bring(name="rollout-0/2")
    assert set(taken.report.fetched_bytes) == {WAY}


async def test_a_transfer_ends_when_its_call_is_given_up(pair: Pair) -> None:
    """The actor is drained while it waits for a taker that never comes."""
    await pair.meet()
    sending = asyncio.create_task(pair.actor.send(NAME))
    await asyncio.sleep(0.2)
    stub = worker_pb2_grpc.WorkerServiceStub(pair.actor.channel)
    drain = worker_pb2.DrainRequest(run_id="run", fencing_epoch=2)
    # It may end what it does within the deadline less a second.
    draining = asyncio.create_task(_answered(stub.Drain(drain, timeout=1.5)))
    with pytest.raises(UnavailableError, match="given up"):
        await asyncio.wait_for(sending, 20)
    with contextlib.suppress(DeadlineError):
        await draining
    await until(lambda: roles_of(pair)[0].exchanges.get(NAME) is None)


async def _answered(call: Awaitable[Any]) -> None:
    await call


async def test_ends_are_closed_with_sleep_attach_and_leave(pair: Pair) -> None:
    before = set(SHM_DIRECTORY.glob(f"rolemesh-{os.getpid()}-*"))
    for close in ("sleep", "leave", "start over"):
        assert await pair.meet() == [WAY, WAY]
        for role in roles_of(pair):
            assert role.exchanges.get(NAME) is not None
        for caller, role in zip((pair.actor, pair.rollout), roles_of(pair), strict=True):
            if close == "leave":
                assert (await caller.join(NAME, [])).transport == ""
            else:
                role.sleep() if close == "sleep" else role.start_over()
                if close == "sleep":
                    role.wake()
            assert role.exchanges.get(NAME) is None
    assert set(SHM_DIRECTORY.glob(f"rolemesh-{os.getpid()}-*")) == before


# --- what cannot be, is said before a rank connects -------------------------------------------


async def test_a_rank_without_the_library_says_so(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*asked: Any) -> Any:
        raise OSError("cupy finds no libnccl: install rolemesh[gpu]")

    monkeypatch.setattr(exchange, "_make", missing)
    with pytest.raises(PreconditionError, match="no libnccl") as caught:
        await pair.meet()
    assert caught.value.reason == "TRANSPORT_UNAVAILABLE"
    monkeypatch.undo()
    assert await pair.meet("rollout-0/2") == [WAY, WAY]


async def test_services_that_plan_different_transfers_do_not_meet(pair: Pair) -> None:
    theirs = await pair.rollout.offer(NAME, {})
    with pytest.raises(PreconditionError, match="plans another transfer"):
        await pair.actor.offer(NAME, {"dp": 2}, plan=theirs.plan)
    with pytest.raises(PreconditionError, match="has made no offer"):
        await pair.actor.join(NAME, theirs.offers)


async def test_an_end_that_is_left_alone_gives_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange.ExchangeEnd.connect, "__kwdefaults__", {"timeout_s": 0.5})
    theirs = await pair.rollout.offer(NAME, {})
    ours = await pair.actor.offer(NAME, {}, plan=theirs.plan)
    with pytest.raises(PreconditionError, match="did not do its part in time") as caught:
        await pair.actor.join(NAME, [*ours.offers, *theirs.offers])
    assert caught.value.reason == "TRANSPORT_UNAVAILABLE"
    assert roles_of(pair)[0].exchanges.get(NAME) is None


async def test_only_an_actor_sends(pair: Pair) -> None:
    with pytest.raises(UnsupportedError, match="only takes weights"):
        await pair.rollout.send(NAME)
    with pytest.raises(InvalidRequestError, match="tp is 'zwei'"):
        await pair.rollout.offer(NAME, {"tp": "zwei"})  # type: ignore[dict-item]


AUTHORITY = Authority.make()


@pytest.mark.parametrize("member", ["critic", "client/drive", "client/admin", None])
async def test_only_the_coordinator_learns_an_offer_or_joins(
    member: str | None, tmp_path: Path
) -> None:
    place = tmp_path / "actor.pem"
    place.touch(mode=0o600)
    place.write_bytes(AUTHORITY.issue("actor").pem())
    identity = None if member is None else AUTHORITY.issue(member)
    refusal = UnavailableError if member is None else ForbiddenError
    key = operation_key("offer")
    async with serving(ActorRole(), identity=place) as server:
        address = server.runtime.address
        async with open_channel(address, identity=identity, retries=False) as channel:
            stub = exchange_pb2_grpc.ExchangeServiceStub(channel)
            with pytest.raises(refusal):
                await stub.OfferExchange(exchange_pb2.OfferExchangeRequest(key=key))
            with pytest.raises(refusal):
                await stub.JoinExchange(exchange_pb2.JoinExchangeRequest(key=key))
            with pytest.raises(refusal):
                _ = [
                    one async for one in stub.SendWeights(exchange_pb2.SendWeightsRequest(key=key))
                ]
        async with open_channel(address, identity=AUTHORITY.issue("coordinator")) as channel:
            stub = exchange_pb2_grpc.ExchangeServiceStub(channel)
            # Past the door: the service has no run yet.
            with pytest.raises(PreconditionError):
                await stub.OfferExchange(exchange_pb2.OfferExchangeRequest(key=key, dtype=1))


# --- services of several ranks, in processes of their own -------------------------------------

LAYOUTS = [
    ({"dp": 2, "fsdp": 2}, {"dp": 2}),
    pytest.param({"tp": 2}, {"dp": 2}, marks=pytest.mark.slow),
]


def flags(layout: Mapping[str, int]) -> tuple[str, ...]:
    if not layout:
        return ()
    return ("--layout", ",".join(f"{name}={size}" for name, size in layout.items()))


@contextlib.asynccontextmanager
async def processes(
    model: Path,
    folder: Path,
    train: Mapping[str, int],
    take: Mapping[str, int],
    sampler: Mapping[str, Any] | None = None,
) -> AsyncIterator[tuple[Pair, int, int]]:
    """An actor and a rollout service, and the pids of the processes behind them."""
    with contextlib.ExitStack() as stack:
        actor, of_actor = stack.enter_context(process_of("actor", folder, *flags(train)))
        rollout, of_rollout = stack.enter_context(process_of("rollout", folder, *flags(take)))
        pair = Pair(actor, rollout)
        await pair.initialize(model, train, take, sampler)
        yield pair, forked(of_actor.pid), forked(of_rollout.pid)
        for caller in (pair.actor, pair.rollout):
            await caller.channel.close()


@pytest.mark.parametrize(("train", "take"), LAYOUTS)
async def test_ranks_of_two_services_join_one_exchange(
    model: Path, tmp_path: Path, train: Mapping[str, int], take: Mapping[str, int]
) -> None:
    async with processes(model, tmp_path, train, take) as (pair, _, of_rollout):
        assert await pair.meet() == [WAY, WAY]
        taken, sent = await pair.bring()
        assert (taken.exchange_failure, dict(sent.failures)) == ("", {})
        assert taken.report.fetched_bytes[WAY] == sent.report.metrics["weights_sent_bytes"] > 0
        batch = await pair.rollout.generate(0, count=6)
        assert await pair.actor.train(batch.experience, version=0) == 3
        taken, _ = await pair.bring()
        assert set(taken.report.fetched_bytes) == {WAY}
        assert await pair.are_equal()
        # A rank of the rollout service stops in the middle of the next one, and is then killed.
        victim = psutil.Process(forked(psutil.Process(of_rollout).children()[1].pid))
        victim.suspend()
        transfer = asyncio.gather(pair.bring(), return_exceptions=True)
        await asyncio.sleep(1.0)
        assert not transfer.done()
        victim.kill()
        (failure,) = await asyncio.wait_for(transfer, 60)
        assert isinstance(failure, UnavailableError)
        # The actor goes on, and meets the next process of the service.
        folder = tmp_path / "next"
        folder.mkdir()
        with process_of("rollout", folder, *flags(take)) as (address, _):
            await pair.rollout.channel.close()
            pair.rollout = Caller(address)
            spec = {"model": {"path": str(model)}, "rollout": HF, "layout": take}
            await pair.rollout.initialize(**spec)
            assert await pair.meet("rollout-0/2") == [WAY, WAY]
            taken, sent = await pair.bring(name="rollout-0/2")
            assert set(taken.report.fetched_bytes) == {WAY}
            assert await pair.are_equal()


@pytest.mark.slow
async def test_slices_of_vllm_take_their_own_parts(model: Path, tmp_path: Path) -> None:
    sampler = {"type": "vllm", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}
    async with processes(model, tmp_path, {"tp": 2}, {"tp": 2}, sampler) as (pair, *_):
        assert await pair.meet() == [WAY, WAY]
        for version in (0, 3):
            taken, _ = await pair.bring()
            assert taken.policy_version == version
            assert set(taken.report.fetched_bytes) == {WAY}
            assert await pair.are_equal()
            if version == 0:
                assert await pair.train(0) == 3


async def test_an_actor_that_dies_in_a_transfer_leaves_a_service_that_goes_on(
    model: Path, tmp_path: Path
) -> None:
    async with serving(RolloutRole()) as server:
        rollout = server.runtime.address
        with process_of("actor", tmp_path) as (address, process):
            pair = Pair(address, rollout)
            await pair.initialize(model, {}, {})
            assert await pair.meet() == [WAY, WAY]
            await pair.bring()
            published = (await pair.actor.publish()).weights
            pid = forked(process.pid)
            os.kill(pid, signal.SIGSTOP)
            taking = asyncio.create_task(pair.rollout.take(published, NAME))
            await asyncio.sleep(0.5)
            assert not taking.done()
            os.kill(pid, signal.SIGKILL)
            # The exchange ends at once; what it did not bring cannot be fetched either.
            with pytest.raises((UnavailableError, UnsupportedError), match=f"rank 0 at {address}"):
                await asyncio.wait_for(taking, 60)
            assert server.runtime.role.exchanges.get(NAME) is None
            await pair.actor.channel.close()
        folder = tmp_path / "next"
        folder.mkdir()
        with process_of("actor", folder) as (address, _):
            await pair.rollout.channel.close()
            pair = Pair(address, rollout)
            await pair.actor.initialize(
                model={"path": str(model), "compute_dtype": "float32"}, rollout=HF
            )
            assert await pair.meet("rollout-0/2") == [WAY, WAY]
            await pair.bring(name="rollout-0/2")
            trainer = (await pair.actor.checksums("TRAINER")).checksums
            assert trainer.items() <= (await pair.rollout.checksums()).checksums.items()
            for caller in (pair.actor, pair.rollout):
                await caller.channel.close()
