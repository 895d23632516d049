"""Runs the checks of a role against a server, and leaves the server as it was found."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rolemesh.coordinator.compliance.check import CHECKS, Check, Finding
from rolemesh.coordinator.compliance.checks import calls as call_checks
from rolemesh.coordinator.compliance.checks import consumer as consumer_checks
from rolemesh.coordinator.compliance.checks import likeliest as likeliest_checks
from rolemesh.coordinator.compliance.checks import producer as producer_checks
from rolemesh.coordinator.compliance.checks import reward as reward_checks
from rolemesh.coordinator.compliance.checks import rollout as rollout_checks
from rolemesh.coordinator.compliance.checks import routes as route_checks
from rolemesh.coordinator.compliance.checks import scoring as scoring_checks
from rolemesh.coordinator.compliance.checks import trainer as trainer_checks
from rolemesh.coordinator.compliance.checks import transport as transport_checks
from rolemesh.coordinator.compliance.checks import worker as worker_checks
from rolemesh.coordinator.compliance.contract import (
    BrokenContractError,
    NotApplicableError,
    Outcome,
    Phase,
    Serves,
)
from rolemesh.coordinator.compliance.producer import Producer
from rolemesh.coordinator.compliance.subject import EPOCH, Subject, describe_error
from rolemesh.coordinator.recipe.roles.placement import plain_address
from rolemesh.rpc.errors import (
    DeadlineError,
    RolemeshError,
    UnavailableError,
    UnsupportedError,
)

logger = logging.getLogger(__name__)

MODULES = (
    transport_checks,
    worker_checks,
    call_checks,
    reward_checks,
    scoring_checks,
    likeliest_checks,
    route_checks,
    rollout_checks,
    consumer_checks,
    producer_checks,
    trainer_checks,
)
"""Importing them fills the list of checks. Within a phase checks run in this order."""

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
LOCAL_SERVE_ADDRESS = "127.0.0.1:0"
ANYWHERE = ("", "0.0.0.0", "[::]")

SETS_UP = ("worker.initialize", "rollout.update-weights")
"""Checks that must pass before later phases have a meaning."""

ALWAYS = (*SETS_UP, "worker.drain")
"""Checks that run whenever a check of a later phase than BEFORE runs."""

PATIENCE = 20
"""Factor on a call's deadline for a whole check, which makes at most about so many calls."""

OnFinding = Callable[[Finding], None]


class SuiteInputError(ValueError):
    """The suite cannot run with these inputs; the text says what to change."""


def checks_of(role: str, names: Sequence[str] = ()) -> list[Check]:
    """The checks of a role in the order in which they run.

    Args:
        role: Role of the server.
        names: Ids or groups of checks; empty for all.

    Raises:
        SuiteInputError: A name is not a check of this role.
    """
    of_role = [one for one in CHECKS if role in one.roles]
    for name in names:
        if not any(one.is_named([name]) for one in of_role):
            groups = sorted({one.check_id.partition(".")[0] for one in of_role})
            raise SuiteInputError(
                f"--only {name}: no check and no group of {role} has that name; groups are "
                f"{', '.join(groups)}, and --list shows all checks"
            )
    return in_order(one for one in of_role if one.is_named(names))


def in_order(checks: Iterable[Check]) -> list[Check]:
    """Checks in the order in which they run."""
    places = {module.__name__: place for place, module in enumerate(MODULES)}
    known = sorted(CHECKS, key=lambda one: (one.phase, places[one.run.__module__]))
    chosen = {one.check_id for one in checks}
    return [one for one in known if one.check_id in chosen]


async def run_suite(
    url: str,
    role: str,
    spec: Mapping[str, Any],
    *,
    names: Sequence[str] = (),
    timeout_s: float = 30.0,
    serve_address: str | None = None,
    identity: Path | None = None,
    on_finding: OnFinding = lambda finding: None,
) -> list[Finding]:
    """Holds a server to the contract of a role.

    Args:
        url: "grpc://host:port" or "host:port".
        role: That the server plays.
        spec: The role's section of a recipe, for servers that take one.
        names: Ids or groups of checks; empty for all.
        timeout_s: Deadline of each call.
        serve_address: "host:port" at which the suite serves experience to the server; None:
            loopback, for a server on this machine.
        identity: File of a coordinator's identity, for a server that has one; None: in clear.
        on_finding: Called with each finding as it comes.

    Raises:
        SuiteInputError: The address or a name is wrong, no server answers, a run holds the server,
            or it could not reach the suite.
    """
    chosen = checks_of(role, names)
    address = plain_address(url)
    try:
        producer = Producer(identity)
        run_id = f"compliance-{uuid.uuid4().hex[:12]}"
        subject = Subject(address, role, run_id, spec, producer, timeout_s)
    except ValueError as error:
        raise SuiteInputError(str(error)) from error
    try:
        await _meet(subject)
        host = address.rpartition(":")[0]
        if serve_address is None and subject.takes_part_in_runs and host not in LOOPBACK:
            raise SuiteInputError(
                f"the server at {address} pulls experience from the suite: give --serve-address "
                "HOST:PORT with a host of this machine that the server reaches"
            )
        if serve_address is not None and serve_address.rpartition(":")[0] in ANYWHERE:
            raise SuiteInputError(
                f"--serve-address {serve_address} names no host: give the one under which the "
                "server reaches this machine"
            )
        try:
            await producer.start(serve_address or LOCAL_SERVE_ADDRESS)
        except ValueError as error:
            raise SuiteInputError(str(error)) from error
        return await _Suite(subject, on_finding).run(chosen)
    finally:
        await _give_back(subject)
        await subject.close()
        await producer.close()


async def _meet(subject: Subject) -> None:
    """Connects, and asks what the server is."""
    if not await subject.is_there():
        raise SuiteInputError(
            f"no server answers at {subject.address} within {subject.timeout_s:g} s: start the "
            "server, or correct the address"
        )
    try:
        subject.capabilities = await subject.client.get_capabilities()
    except UnsupportedError:
        return
    except RolemeshError as error:
        subject.capabilities_error = error
        return
    if not subject.takes_part_in_runs:
        return
    with contextlib.suppress(RolemeshError):  # worker.idle tells of it
        status = await subject.client.get_status()
        if status.run_id:
            raise SuiteInputError(
                f"run {status.run_id!r} holds the server at {subject.address}: end that run, or "
                "start another server for the suite"
            )


async def _give_back(subject: Subject) -> None:
    """Makes the server forget the suite's run, however the suite ended."""
    if subject.is_held:
        with contextlib.suppress(RolemeshError):  # it is gone, or worker.drain has told
            await subject.client.drain(subject.run_id, EPOCH)


class _Suite:
    def __init__(self, subject: Subject, on_finding: OnFinding) -> None:
        self._subject = subject
        self._on_finding = on_finding
        self._lost = ""
        """Why the server cannot be called any more; empty while it can."""

    async def run(self, chosen: Sequence[Check]) -> list[Finding]:
        needs_run = any(one.phase > Phase.BEFORE for one in chosen)
        extra = [
            one
            for one in CHECKS
            if needs_run and self._subject.role in one.roles and one.check_id in ALWAYS
        ]
        findings = []
        for one in in_order([*chosen, *extra]):
            finding = await self._judge(one)
            findings.append(finding)
            self._on_finding(finding)
        return findings

    async def _judge(self, one: Check) -> Finding:
        subject = self._subject
        started = time.monotonic()

        def found(outcome: Outcome, **texts: str) -> Finding:
            seconds = time.monotonic() - started
            return Finding(check=one, outcome=outcome, seconds=seconds, **texts)

        if self._lost and one.check_id != "errors.reasons":
            return found(Outcome.NOT_RUN, came=self._lost)
        if one.serves is Serves.RUNS and not subject.takes_part_in_runs:
            return found(Outcome.SKIPPED, came="the server takes trajectories inline, and no runs")
        if one.serves is Serves.TRAJECTORIES and subject.takes_part_in_runs:
            return found(Outcome.SKIPPED, came="the server pulls by reference")
        try:
            async with asyncio.timeout(PATIENCE * subject.timeout_s):
                await one.run(subject)
        except NotApplicableError as reason:
            return found(Outcome.SKIPPED, came=str(reason))
        except BrokenContractError as broken:
            finding = found(
                Outcome.BROKEN, sent=broken.sent, came=broken.came, remedy=broken.remedy
            )
        except RolemeshError as error:
            finding = found(
                Outcome.BROKEN,
                sent=str(error.metadata.get("method", "the calls of this check")),
                came=describe_error(error),
                remedy=_remedy(error, subject.timeout_s),
            )
        except TimeoutError:
            finding = found(
                Outcome.BROKEN,
                sent="the calls of this check",
                came=f"nothing within {subject.timeout_s:g} s",
                remedy="answer, or end the call with an error; --timeout gives it longer",
            )
        except Exception as error:
            # An answer of a server may break a check in an unexpected way.
            logger.exception("%s", one.check_id)
            finding = found(
                Outcome.BROKEN,
                sent="the calls of this check",
                came=f"what the check could not read ({type(error).__name__}: {error})",
                remedy="send what the proto describes",
            )
        else:
            return found(Outcome.HOLDS)
        if one.check_id in SETS_UP:
            self._lost = f"{one.check_id} does not hold"
        elif not await subject.is_there():
            self._lost = f"the server has not answered since {one.check_id}"
        return finding


def _remedy(error: RolemeshError, timeout_s: float) -> str:
    match error:
        case UnsupportedError():
            return "serve the method"
        case DeadlineError():
            return f"answer within {timeout_s:g} s, or give the suite a longer --timeout"
        case UnavailableError():
            return "see in the server's log why it ended or refused the connection"
        case _:
            return "answer this request; the server's log says more"
