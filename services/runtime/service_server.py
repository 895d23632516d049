"""The server of a role: it binds, meets its ranks, registers what the role serves, and drains."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from typing import Any

import grpc
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from rolemesh.engine.kernels.choice import unserved
from rolemesh.engine.sandbox.host import find_sandbox
from rolemesh.rpc.address import host_and_port
from rolemesh.rpc.channel import SERVER_OPTIONS
from rolemesh.rpc.limits import MAX_CALLS, REQUEST_S
from rolemesh.rpc.members.identity import Identity, server_credentials
from rolemesh.services.runtime.calls.role import Role
from rolemesh.services.runtime.calls.service_process import ServiceProcess
from rolemesh.services.runtime.ranks.device import select_device
from rolemesh.services.runtime.ranks.face import Face
from rolemesh.services.runtime.ranks.meeting import Meeting, store_of_ranks
from rolemesh.services.runtime.server.config import ServiceConfig
from rolemesh.services.runtime.server.interceptor import ServiceInterceptor
from rolemesh.services.runtime.server.metrics import MetricsPage
from rolemesh.services.runtime.tenants import Tenants

logger = logging.getLogger(__name__)

STOP_GRACE_S = 1.0
"""How long calls in flight may still take to send their last bytes once work is finished."""

FAREWELL_S = 1.0
"""How long a service whose ranks diverged stays to answer its caller."""

EXIT_FAILED = 1
"""Exit code of a process that fails."""

READINESS = "readiness"
LIVENESS = "liveness"
"""Names under which the standard health service answers, beside the empty one."""


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

    def __init__(self, role: Role, config: ServiceConfig, *more_roles: Role) -> None:
        """Prepares.

        Args:
            role: That it plays.
            config: Of the process.
            more_roles: Of the same kind, one for each run that it serves beside the first.
        """
        self.config = config
        self.process = ServiceProcess(role.name, config)
        self.tenants = Tenants((role, *more_roles), self.process)
        self.runtime = self.tenants.runtimes[0]
        """Of the run that it serves; of several, the first."""
        self.metrics = self.process.metrics
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
            self.process.compute.close(0.0)
            raise

    async def _start(self) -> str:
        config, process = self.config, self.process
        try:
            process.identity = None if config.identity is None else Identity.read(config.identity)
            sandbox = await asyncio.to_thread(find_sandbox, config.sandbox, config.code_roots)
            for runtime in self.tenants.runtimes:
                runtime.role.sandbox = sandbox
                runtime.role.is_shared = config.runs > 1
            # Before anything else touches CUDA: the loop's thread and the one that computes.
            device = select_device()
            await process.compute.run(select_device)
        except ValueError as error:  # also of the identity
            raise ServiceStartError(str(error)) from error
        logger.info("computes on %s", device)
        if warning := unserved(device):
            logger.warning(warning)
        server = grpc.aio.server(
            interceptors=[
                ServiceInterceptor(
                    self.runtime.role.name,
                    config.rank,
                    self.metrics,
                    has_identity=process.identity is not None,
                    request_s=REQUEST_S,
                )
            ],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        process.services[:] = self.tenants.register(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        standard = (health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,)
        reflection.enable_server_reflection(
            (*process.services, *standard, reflection.SERVICE_NAME), server
        )
        port = self._bind(server)
        process.address = config.peer_address(port)
        if config.metrics_port is not None:
            listener = _listen(config.host, config.metrics_port, "metrics_port")
            self.metrics_page = MetricsPage(self.metrics, listener)
            self.metrics_page.start()
        runtimes = self.tenants.runtimes
        self.metrics.experience_bytes.set_function(
            lambda: sum(runtime.store.held_bytes for runtime in runtimes)
        )
        self.metrics.policy_version.set_function(self.runtime.role.policy_version)
        # Each thread of Python has its own setting in OpenMP, and threads of its own to go with it.
        # The loop needs none, and libgomp's wait awake for a moment only while the process has no
        # more of them than cores.
        threads = config.threads or torch.get_num_threads()
        torch.set_num_threads(1)
        await process.compute.run(torch.set_num_threads, threads)
        self._background.append(asyncio.create_task(self.metrics.watch_loop()))
        # The standard servicer begins by saying that all is well.
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        await server.start()
        self._server = server
        if config.rank_store is not None and not await self._meet_ranks():
            return process.address
        for name in ("", LIVENESS, READINESS, *process.services):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return process.address

    async def _meet_ranks(self) -> bool:
        """Returns once all ranks have met; False where this one is told to end before."""
        config, process = self.config, self.process
        store = store_of_ranks(config, process.identity)
        process.meeting = Meeting(store, config.rank, config.world_size)
        addresses = await process.meeting.exchange(process.address, process.exit_requested.is_set)
        if addresses is None:
            return False
        process.rank_addresses = addresses
        if process.is_face:
            peers = [process.peer(address) for address in addresses[1:]]
            process.face = Face(config.role, peers, self._ranks_diverged)
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
        self.close_stores()
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
        process, runtimes = self.process, self.tenants.runtimes
        for runtime in runtimes:
            runtime.hold.is_draining = True
        timeout_s = self.config.drain_timeout_s if work_timeout_s is None else work_timeout_s
        for name in ("", READINESS, *process.services):
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        is_finished = all(
            await asyncio.gather(*(runtime.hold.finish_work(timeout_s) for runtime in runtimes))
        )
        if process.face is not None:
            # Until now they were needed: work in progress takes all ranks.
            is_finished = await process.face.leave() and is_finished
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)
        if is_finished:
            for runtime in runtimes:
                await runtime.compute.run(runtime.close_role)
        is_finished = process.compute.close(STOP_GRACE_S) and is_finished
        if self.metrics_page is not None:
            await self.metrics_page.stop()
        await process.close_channels()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self.close_stores()
        return is_finished

    def close_stores(self) -> None:
        """Frees all experience, at once."""
        for runtime in self.tenants.runtimes:
            runtime.store.close()

    def announcement(self) -> dict[str, Any]:
        """What the announce file says."""
        announced: dict[str, Any] = {
            "address": self.process.address,
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
        place = host_and_port(config.host, config.port)
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
