"""The runs that share a service process, and which of them a call belongs to."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc

from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.services.runtime.calls.role import Role, add_servicers
from rolemesh.services.runtime.calls.runtime import Runtime
from rolemesh.services.runtime.calls.service_process import ServiceProcess
from rolemesh.services.runtime.experience.fetch import SERVICE_NAME as EXPERIENCE_SERVICE
from rolemesh.services.runtime.experience.fetch import ExperienceServicer
from rolemesh.services.runtime.servicers.put import put_experience
from rolemesh.services.runtime.servicers.worker import WorkerServicer
from rolemesh.v1 import experience_pb2, worker_pb2

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Tenants:
    """A runtime for each run that a process may serve at once. Owner: the loop.

    Each has a role of its own, with its hold, ledger and experience: a run is served as if it had
    the process for itself, one function of all runs at a time. What does not change (the base of an
    adapter, the engine that samples) the roles share within the engine.

    Invariant: a run has at most one runtime, from its Initialize to the end of its hold.

    Example: with two roles, Initialize of the runs "a" and "b" succeeds, and `of("b")` is the
    runtime of the second; a third run is refused until one of them has ended.
    """

    def __init__(self, roles: Sequence[Role], process: ServiceProcess) -> None:
        """Makes the runtimes, one for each role; the roles are of one kind."""
        self.runtimes = tuple(Runtime(role, process) for role in roles)
        self._starting: dict[str, Runtime] = {}
        """Runs whose Initialize or Attach is in progress, and where."""

    def of(self, run_id: str) -> Runtime:
        """The runtime of a run: the one that it holds, else one that it could take.

        Where others hold all of them, that is the one whose coordinator was silent for longest: it
        refuses, or gives way.
        """
        if run_id in self._starting:
            return self._starting[run_id]
        for runtime in self.runtimes:
            if runtime.hold.run_id == run_id:
                return runtime
        taken = {id(runtime) for runtime in self._starting.values()}
        for runtime in self.runtimes:
            if not runtime.hold.run_id and id(runtime) not in taken:
                return runtime
        return max(self.runtimes, key=lambda runtime: runtime.hold.silence_s)

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Adds all services to a server; returns their full names."""
        recorders = [_Recorder() for _ in self.runtimes]
        names: list[str] = []
        for runtime, recorder in zip(self.runtimes, recorders, strict=True):
            process = runtime.process
            own: Any = recorder
            ExperienceServicer(
                runtime.store,
                runtime.ledger,
                process.host_id,
                runtime.release_others,
                functools.partial(put_experience, self.of),
            ).add_to(own)
            names = [
                *add_servicers(own, WorkerServicer(runtime)),
                EXPERIENCE_SERVICE,
                *runtime.role.register(own, runtime),
            ]
        for service, first in recorders[0].services.items():
            methods = {
                method: self._chosen([recorder.services[service][method] for recorder in recorders])
                for method in first
            }
            server.add_registered_method_handlers(service, methods)
        return names

    def _chosen(self, handlers: Sequence[Handler]) -> Handler:
        """One handler of a method, in place of one for each runtime."""
        first: Any = handlers[0]
        # Whose a stream of requests is says its beginning: who serves it finds the runtime.
        if len(handlers) == 1 or first.request_streaming:
            return handlers[0]
        kind = "unary_stream" if first.response_streaming else "unary_unary"
        behaviors = {
            id(runtime): getattr(handler, kind)
            for runtime, handler in zip(self.runtimes, handlers, strict=True)
        }

        def serve(request: Any, context: Any) -> Any:
            runtime = self._asked(request)
            behavior = behaviors[id(runtime)]
            if isinstance(request, worker_pb2.InitializeRequest | worker_pb2.AttachRequest):
                return self._started(request.key.run_id, runtime, behavior, request, context)
            return behavior(request, context)

        chosen: Handler = first._replace(**{kind: serve})
        return chosen

    async def _started(
        self,
        run_id: str,
        runtime: Runtime,
        behavior: Callable[[Any, Any], AsyncIterator[Any]],
        request: Any,
        context: Any,
    ) -> AsyncIterator[Any]:
        with self._start(run_id, runtime):
            async for response in behavior(request, context):
                yield response

    @contextmanager
    def _start(self, run_id: str, runtime: Runtime) -> Iterator[None]:
        """Keeps other runs from a runtime that this one is about to hold."""
        is_first = self._starting.setdefault(run_id, runtime) is runtime
        try:
            yield
        finally:
            if is_first:
                self._starting.pop(run_id, None)

    def _asked(self, request: Any) -> Runtime:
        """The runtime that a request is for.

        Raises:
            InvalidRequestError: RUN_UNNAMED: it names no run, and several hold the service.
        """
        if isinstance(request, experience_pb2.FetchRequest):
            return self._holding(request.experience_id)
        key = getattr(request, "key", None)
        run_id = str(getattr(request if key is None else key, "run_id", ""))
        if run_id:
            return self.of(run_id)
        held = [runtime for runtime in self.runtimes if runtime.hold.run_id]
        if len(held) > 1 and not isinstance(request, _OF_NO_RUN):
            runs = ", ".join(repr(runtime.hold.run_id) for runtime in held)
            raise InvalidRequestError(
                f"run_id is empty, but the {held[0].role.name} serves the runs {runs}: name one",
                reason="RUN_UNNAMED",
            )
        return held[0] if held else self.runtimes[0]

    def _holding(self, experience_id: str) -> Runtime:
        for runtime in self.runtimes:
            if runtime.store.has(experience_id):
                return runtime
        return self.runtimes[0]


_OF_NO_RUN = (
    worker_pb2.GetCapabilitiesRequest,
    worker_pb2.GetStatusRequest,
    worker_pb2.DrainRequest,
)
"""Requests that concern the process where they name no run."""


class _Recorder:
    """Stands in for a server, and notes the handlers that servicers register."""

    def __init__(self) -> None:
        self.services: dict[str, dict[str, Handler]] = {}
        """By full name of the service and name of the method."""

    def add_registered_method_handlers(self, name: str, handlers: Mapping[str, Handler]) -> None:
        """Of a method the handler that came last counts, as with gRPC."""
        self.services.setdefault(name, {}).update(handlers)

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Leaves them out: what comes so is registered as well."""
