"""The life of a service's process, from its settings to its drain."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import json
import logging
import os
import pkgutil
import signal
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rolemesh.engine.specs.urls import without_passwords
from rolemesh.engine.transport.slots.shm import remove_leftovers
from rolemesh.engine.transport.slots.slot_files import KEPT_UNHELD_S
from rolemesh.engine.transport.slots.slots import remove_old_slots
from rolemesh.rpc import tracing
from rolemesh.services.runtime.calls.role import Role
from rolemesh.services.runtime.hosts.interfaces import keep_to_interface, of_this_host
from rolemesh.services.runtime.ranks.agent import as_rank, run_ranks
from rolemesh.services.runtime.ranks.loopback import stay_on_loopback
from rolemesh.services.runtime.server.config import ConfigError, ServiceConfig, load_config
from rolemesh.services.runtime.server.log import set_up_logging
from rolemesh.services.runtime.server.parent import follow_parent
from rolemesh.services.runtime.server.registering import Registering
from rolemesh.services.runtime.service_server import (
    EXIT_FAILED,
    STOP_GRACE_S,
    ServiceServer,
    ServiceStartError,
)

logger = logging.getLogger(__name__)

SAME_END_S = 1.0
"""Signals within this time are one: Slurm signals a rank, and its agent, which passes it on."""

EXIT_OK = 0
EXIT_USAGE = 2


def serve_role(name: str, place: str) -> int:
    """Runs a role of ours as this process; see `run_service`.

    Args:
        name: The role's name.
        place: "module:Class" of the role, imported when it is made: an agent of several ranks runs
            no model.
    """

    def make_role() -> Role:
        role: Role = pkgutil.resolve_name(place)()
        return role

    return run_service(name, make_role)


def run_service(
    name: str, make_role: Callable[[], Role], arguments: Sequence[str] | None = None
) -> int:
    """Runs a role as this process until it is told to end.

    Args:
        name: The role's name, e.g. "actor".
        make_role: Imports and makes it. Not called in the agent of several ranks, nor where the
            settings are wrong.
        arguments: Command line without the program's name; None takes the process's own.

    Returns:
        Exit code: 0 after a clean drain, 1 after a failure, 2 for wrong settings.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        config = of_this_host(load_config(name, arguments, os.environ))
        keep_to_interface(config, os.environ)
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_USAGE
    if config.rank_store is not None:
        config = as_rank(config, os.environ)
    set_up_logging(config)
    stay_on_loopback(os.environ)
    if config.world_size > 1 and config.rank_store is None:
        return run_ranks(config)
    try:
        with tracing.from_environment(f"rolemesh-{config.role}", os.environ):
            is_finished = asyncio.run(_serve(_made(make_role, config.runs), config))
    except tracing.TracingError as error:
        logger.error("%s", error)
        return EXIT_USAGE
    except ServiceStartError as error:
        logger.error("%s", error)
        return EXIT_FAILED
    except BaseException as error:
        logger.critical("the service fails: %s: %s", type(error).__name__, error, exc_info=error)
        return EXIT_FAILED
    if is_finished:
        logger.info("the service ends")
        return EXIT_OK
    logger.error("the service ends although work was still running")
    logging.shutdown()
    # The interpreter cannot end in order while the compute thread is inside native code.
    os._exit(EXIT_FAILED)


def _made(make_role: Callable[[], Role], runs: int) -> list[Role]:
    """A role for each run, with all that they import outside of what is looked at for garbage.

    To look at it takes a third of a second each time, once at the end of each run and now and then
    while calls are answered; while it is imported, a tenth of the time goes there.
    """
    gc.disable()
    try:
        return [make_role() for _ in range(runs)]
    finally:
        gc.freeze()
        gc.enable()


async def _serve(roles: Sequence[Role], config: ServiceConfig) -> bool:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_log_loop_error)
    if not config.is_loopback and config.identity is None:
        logger.warning(
            "listening on %s without encryption or authentication: everybody who reaches this "
            "address can use the service; keep the network private",
            config.host,
        )
    logger.info("settings: %s", json.dumps(without_passwords(config.model_dump(mode="json"))))
    for name in remove_leftovers():
        logger.info("removed shared memory %s, left behind by a dead process", name)
    for name, run_id in remove_old_slots(KEPT_UNHELD_S):
        logger.info(
            "removed the cut %s of run %r: no process holds it, and it is old", name, run_id
        )
    service = ServiceServer(roles[0], config, *roles[1:])
    process = service.process
    atexit.register(service.close_stores)
    request_exit = _exit_on_signal(service)
    if config.parent_pid is not None:
        follow_parent(
            config.parent_pid, config.drain_timeout_s + 2 * STOP_GRACE_S, service.close_stores
        )
        # Ctrl-C reaches the whole process group; the parent decides when we end.
        loop.add_signal_handler(signal.SIGINT, lambda: None)
    else:
        loop.add_signal_handler(signal.SIGINT, request_exit)
    loop.add_signal_handler(signal.SIGTERM, request_exit)
    address = await service.start()
    logger.info("serving %s at %s", config.role, address)
    if config.announce is not None:
        write_announcement(config.announce, service.announcement())
    registering = None
    if config.register_at is not None and process.identity is not None:
        registering = Registering(config, address, process.identity, process.exit_requested.set)
    try:
        await process.exit_requested.wait()
        logger.info("draining")
        started = time.monotonic()
        if registering is not None:
            await registering.leave()
        is_finished = await service.stop()
        logger.info("drained in %.1f s", time.monotonic() - started)
        if registering is not None:
            await registering.end()
            if registering.refusal:
                raise ServiceStartError(registering.refusal)
        return is_finished
    finally:
        if config.announce is not None:
            config.announce.unlink(missing_ok=True)


def _exit_on_signal(service: ServiceServer) -> Callable[[], None]:
    """Handler of the signals that end a service: the first one drains it, a later one ends it."""
    asked_at: float | None = None

    def request_exit() -> None:
        nonlocal asked_at
        now = time.monotonic()
        if asked_at is None:
            asked_at = now
            service.process.exit_requested.set()
        elif now - asked_at >= SAME_END_S:
            logger.warning("told to end a second time: leaving at once")
            service.close_stores()
            logging.shutdown()
            os._exit(EXIT_FAILED)

    return request_exit


def write_announcement(path: Path, announced: dict[str, Any]) -> None:
    """Writes the announce file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_text(json.dumps(announced))
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def _log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    logger.error("event loop: %s", context.get("message"), exc_info=context.get("exception"))
