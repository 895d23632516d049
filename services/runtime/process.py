"""The server of a role, and the life of its process from start to drain."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import functools
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from rolemesh.engine.sandbox.host import find_sandbox
from rolemesh.engine.specs.urls import without_passwords
from rolemesh.engine.transport.shm import remove_leftovers
from rolemesh.engine.transport.slots import remove_old_slots
from rolemesh.rpc import tracing
from rolemesh.rpc.channel import SERVER_OPTIONS
from rolemesh.rpc.identity import Identity, IdentityError, server_credentials
from rolemesh.rpc.limits import MAX_CALLS, REQUEST_S
from rolemesh.services.runtime.calls.role import Role
from rolemesh.services.runtime.calls.runtime import Runtime
from rolemesh.services.runtime.experience.fetch import SERVICE_NAME as EXPERIENCE_SERVICE
from rolemesh.services.runtime.experience.fetch import ExperienceServicer
from rolemesh.services.runtime.hosts.interfaces import keep_to_interface, of_this_host
from rolemesh.services.runtime.ranks.agent import as_rank, run_ranks
from rolemesh.services.runtime.ranks.device import select_device
from rolemesh.services.runtime.ranks.face import Face
from rolemesh.services.runtime.ranks.loopback import stay_on_loopback
from rolemesh.services.runtime.ranks.meeting import Meeting, store_of_ranks
from rolemesh.services.runtime.server.config import ConfigError, ServiceConfig, load_config
from rolemesh.services.runtime.server.interceptor import ServiceInterceptor
from rolemesh.services.runtime.server.log import set_up_logging
from rolemesh.services.runtime.server.metrics import MetricsPage
from rolemesh.services.runtime.server.parent import follow_parent
from rolemesh.services.runtime.server.registering import Registering
from rolemesh.services.runtime.servicers.put import put_experience
from rolemesh.services.runtime.servicers.worker import WorkerServicer
from rolemesh.v1 import worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)

STOP_GRACE_S = 1.0
"""How long calls in flight may still take to send their last bytes once work is finished."""

FAREWELL_S = 1.0
"""How long a service whose ranks diverged stays to answer its caller."""

SAME_END_S = 1.0
"""Signals within this time are one: Slurm signals a rank, and its agent, which passes it on."""

CUT_AGE_S = 24 * 3600.0
"""Cuts that no process holds are kept this long, for a run that is started again."""

READINESS = "readiness"
LIVENESS = "liveness"
"""Names under which the standard health service answers, beside the empty one."""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2


class ServiceStartError(RuntimeError):
    """The service cannot listen or register where it was told to, or has no device."""


class ServiceServer:
    """A role behind a gRPC server on the running loop. Owner: that loop.

    Example::

        server = ServiceServer(RewardRole(), ServiceConfig(role="reward"))
        address = await server.start()  # "127.0.0.1:41235"
        ...
        await server.stop()
    """

    def __init__(self, role: Role, config: ServiceConfig) -> None:
        self.config = config
        self.runtime = Runtime(role, config)
        self.metrics = self.runtime.metrics
        self.metrics_page: MetricsPage | None = None
        self._health = health_aio.HealthServicer()
        self._background: list[asyncio.Task[None]] = []
        self._server: grpc.aio.Server | None = None
        self._stopping: asyncio.Task[bool] | None = None

    async def start(self) -> str:
        """Binds, registers everything and serves; returns host:port for peers.

        Raises:
            ServiceStartError: The port is in use, the host is not of this machine, or there are
                fewer GPUs than ranks.
        """
        try:
            return await self._start()
        except BaseException:
            self.runtime.compute.close(0.0)
            raise

    async def _start(self) -> str:
        config, runtime = self.config, self.runtime
        try:
            runtime.identity = None if config.identity is None else Identity.read(config.identity)
        except IdentityError as error:
            raise ServiceStartError(str(error)) from error
        try:
            runtime.role.sandbox = await asyncio.to_thread(
                find_sandbox, config.sandbox, config.code_roots
            )
        except ValueError as error:
            raise ServiceStartError(str(error)) from error
        await self._select_device()
        server = grpc.aio.server(
            interceptors=[
                ServiceInterceptor(
                    runtime.role.name,
                    config.rank,
                    self.metrics,
                    has_identity=runtime.identity is not None,
                    request_s=REQUEST_S,
                )
            ],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(runtime), server)
        ExperienceServicer(
            runtime.store,
            runtime.ledger,
            runtime.host_id,
            runtime.release_others,
            functools.partial(put_experience, runtime),
        ).add_to(server)
        runtime.services[:] = [
            worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name,
            EXPERIENCE_SERVICE,
            *runtime.role.register(server, runtime),
        ]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        standard = (health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,)
        reflection.enable_server_reflection(
            (*runtime.services, *standard, reflection.SERVICE_NAME), server
        )
        port = self._bind(server)
        runtime.address = config.peer_address(port)
        if config.metrics_port is not None:
            listener = _listen(config.host, config.metrics_port, "metrics_port")
            self.metrics_page = MetricsPage(self.metrics, listener)
            self.metrics_page.start()
        self.metrics.experience_bytes.set_function(lambda: runtime.store.held_bytes)
        self.metrics.policy_version.set_function(runtime.role.policy_version)
        if config.threads is not None:
            # Each thread of Python has its own setting in OpenMP.
            torch.set_num_threads(config.threads)
            await runtime.compute.run(torch.set_num_threads, config.threads)
        self._background.append(asyncio.create_task(self.metrics.watch_loop()))
        # The standard servicer begins by saying that all is well.
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        await server.start()
        self._server = server
        if config.rank_store is not None and not await self._meet_ranks():
            return runtime.address
        for name in ("", LIVENESS, READINESS, *runtime.services):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return runtime.address

    async def _select_device(self) -> None:
        """Before anything else touches CUDA: the loop's thread and the one that computes."""
        try:
            device = select_device()
            await self.runtime.compute.run(select_device)
        except ValueError as error:
            raise ServiceStartError(str(error)) from error
        logger.info("computes on %s", device)

    async def _meet_ranks(self) -> bool:
        """Returns once all ranks have met; False where this one is told to end before."""
        config, runtime = self.config, self.runtime
        store = store_of_ranks(config, runtime.identity)
        runtime.meeting = Meeting(store, config.rank, config.world_size)
        addresses = await runtime.meeting.exchange(runtime.address, runtime.exit_requested.is_set)
        if addresses is None:
            return False
        runtime.rank_addresses = addresses
        if runtime.is_face:
            peers = [runtime.peer(address) for address in addresses[1:]]
            runtime.face = Face(config.role, peers, self._ranks_diverged)
        return True

    def _ranks_diverged(self, why: str) -> None:
        logger.critical(
            "the ranks of the %s no longer fit together (%s): the service ends; start the step "
            "again from the newest checkpoint",
            *(self.config.role, why),
        )
        # A rank may hang in a collective operation for good. The caller gets its answer first.
        asyncio.get_running_loop().call_later(FAREWELL_S, self._leave_at_once)

    def _leave_at_once(self) -> None:
        self.runtime.store.close()
        logging.shutdown()
        os._exit(EXIT_FAILED)

    async def stop(self, work_timeout_s: float | None = None) -> bool:
        """Refuses new work, finishes what runs, frees everything. True when all was finished.

        Args:
            work_timeout_s: How long work in progress may take; None takes the configured time.
                A second call waits for the first one.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(work_timeout_s))
        return await asyncio.shield(self._stopping)

    async def _stop(self, work_timeout_s: float | None) -> bool:
        runtime = self.runtime
        runtime.hold.is_draining = True
        timeout_s = self.config.drain_timeout_s if work_timeout_s is None else work_timeout_s
        for name in ("", READINESS, *runtime.services):
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        is_finished = await runtime.hold.finish_work(timeout_s)
        if runtime.face is not None:
            # Until now they were needed: work in progress takes all ranks.
            is_finished = await runtime.face.leave() and is_finished
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)
        if is_finished:
            await runtime.compute.run(runtime.close_role)
        is_finished = runtime.compute.close(STOP_GRACE_S) and is_finished
        if self.metrics_page is not None:
            await self.metrics_page.stop()
        await runtime.close_channels()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        runtime.store.close()
        return is_finished

    def announcement(self) -> dict[str, Any]:
        """What the announce file says."""
        announced: dict[str, Any] = {
            "address": self.runtime.address,
            "pid": os.getpid(),
            "role": self.runtime.role.name,
            "rank": self.config.rank,
        }
        if self.metrics_page is not None:
            announced["metrics_port"] = self.metrics_page.port
        return announced

    def _bind(self, server: grpc.aio.Server) -> int:
        config = self.config
        # gRPC only says "failed to bind": a plain socket finds out why.
        _listen(config.host, config.port, "port").close()
        host = f"[{config.host}]" if ":" in config.host.strip("[]") else config.host
        place = f"{host.replace('[[', '[')}:{config.port}"
        try:
            if config.identity is None:
                return server.add_insecure_port(place)
            return server.add_secure_port(place, server_credentials(config.identity))
        except RuntimeError as error:
            raise ServiceStartError(
                f"gRPC cannot listen on {config.host}:{config.port} ({error}): "
                "choose another --port; 0 takes a free one"
            ) from error


def _listen(host: str, port: int, setting: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # A port in TIME_WAIT after a restart is free; one that a process listens on is still refused.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
        listener.listen()
    except OSError as error:
        listener.close()
        flag = "--" + setting.replace("_", "-")
        if error.errno == errno.EADDRINUSE:
            raise ServiceStartError(
                f"{setting} {port} on {host} is in use by another process "
                f"(`ss -ltnp sport = :{port}` shows it): end it, or choose another {flag}; "
                "0 takes a free one"
            ) from error
        raise ServiceStartError(
            f"cannot listen on {host} with {setting} {port} ({error.strerror or error}): "
            f"give --host an address of this machine and {flag} a port that you may use"
        ) from error
    return listener


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
            is_finished = asyncio.run(_serve(_made(make_role), config))
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


def _made(make_role: Callable[[], Role]) -> Role:
    """The role, with all that it imports outside of what the garbage collector looks at.

    To look at it takes a third of a second each time, once at the end of each run and now and then
    while calls are answered; while it is imported, a tenth of the time goes there.
    """
    gc.disable()
    try:
        return make_role()
    finally:
        gc.freeze()
        gc.enable()


async def _serve(role: Role, config: ServiceConfig) -> bool:
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
    for name, run_id in remove_old_slots(CUT_AGE_S):
        logger.info(
            "removed the cut %s of run %r: no process holds it, and it is old", name, run_id
        )
    service = ServiceServer(role, config)
    runtime = service.runtime
    atexit.register(runtime.store.close)
    request_exit = _exit_on_signal(runtime)
    if config.parent_pid is not None:
        follow_parent(
            config.parent_pid, config.drain_timeout_s + 2 * STOP_GRACE_S, runtime.store.close
        )
        # Ctrl-C reaches the whole process group; the parent decides when we end.
        loop.add_signal_handler(signal.SIGINT, lambda: None)
    else:
        loop.add_signal_handler(signal.SIGINT, request_exit)
    loop.add_signal_handler(signal.SIGTERM, request_exit)
    address = await service.start()
    logger.info("serving %s at %s", role.name, address)
    if config.announce is not None:
        write_announcement(config.announce, service.announcement())
    registering = None
    if config.register_at is not None and runtime.identity is not None:
        registering = Registering(config, address, runtime.identity, runtime.exit_requested.set)
    try:
        await runtime.exit_requested.wait()
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


def _exit_on_signal(runtime: Runtime) -> Callable[[], None]:
    """Handler of the signals that end a service: the first one drains it, a later one ends it."""
    asked_at: float | None = None

    def request_exit() -> None:
        nonlocal asked_at
        now = time.monotonic()
        if asked_at is None:
            asked_at = now
            runtime.exit_requested.set()
        elif now - asked_at >= SAME_END_S:
            logger.warning("told to end a second time: leaving at once")
            runtime.store.close()
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
