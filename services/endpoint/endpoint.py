"""The endpoint of a sampler: HTTP on a loop of its own, and turns on the compute thread."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rolemesh.engine.rollout.base import RolloutBackend
from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.sessions.store import Sessions
from rolemesh.engine.specs import ImagesSpec
from rolemesh.engine.specs.sampling.endpoint import EndpointSpec
from rolemesh.rpc.errors import RolemeshError
from rolemesh.rpc.http.server import HttpServer, serve_app
from rolemesh.rpc.loop_thread import LoopThread
from rolemesh.services.endpoint.replicas import Calls
from rolemesh.services.endpoint.routes.client_images import ClientImages
from rolemesh.services.endpoint.turns import RankTurns, Turns

logger = logging.getLogger(__name__)

RETRY_S = 0.1
"""Calls that cannot be sampled now are tried again so often."""

STOP_S = 10.0
"""How long the front may take to end."""

MAX_CONNECTIONS = 16_384
"""Of clients, at once: each call that waits has one."""


class Endpoint:
    """Serves one sampler, from the compute thread that owns it, while a role holds it.

    Calls are sampled beside a generation of the run, where there is one, and else by turns of their
    own. A turn ends as soon as something else waits for the compute thread, and what it has not
    finished goes on afterwards: training waits for a step of the engine at most. Where the service
    has several ranks, this is rank 0, and all of them take a turn together.

    Invariant: after `close` no thread of it is left, and no call waits for an answer.
    """

    def __init__(
        self,
        spec: EndpointSpec,
        backend: RolloutBackend,
        turns: Turns,
        *,
        calls: Calls | None = None,
        ranks: RankTurns | None = None,
        bring_weights: Callable[[], object],
        may_sample: Callable[[], bool],
        image_bounds: Sequence[ImagesSpec] = (),
    ) -> None:
        """Starts to serve, on the compute thread.

        Args:
            spec: Of the endpoint.
            backend: That samples, made with has_endpoint.
            turns: The thread that owns it.
            calls: Where calls go; None: to the back end's own.
            ranks: Turns of this rank, where it is the first of several; None: it is alone.
            bring_weights: Called there before a turn: sees to it that it holds the weights to
                sample with.
            may_sample: Whether it may be used now; from any thread. False: calls wait.
            image_bounds: Sections `images` of the run's data, whose widest bounds hold for clients;
                none: the defaults do.

        Raises:
            ValueError: The address cannot be bound, or a field of the spec cannot be served.
        """
        if backend.endpoint_calls is None:
            raise RuntimeError(f"{type(backend).__name__} was made without an endpoint")
        self.spec = spec
        self.sessions = Sessions(
            max_sessions=spec.max_sessions, max_bytes=spec.max_memory_mib << 20
        )
        self.url = ""
        """Where it answers, e.g. "http://127.0.0.1:8000"."""
        self.model_name = spec.model_name
        """What it calls the policy."""
        self._backend = backend
        self._calls = backend.endpoint_calls if calls is None else calls
        self._turns = turns
        self._ranks = ranks
        self._bring_weights = bring_weights
        self._may_sample = may_sample
        folder = Path(str(backend.engine.model_config.model))
        self._images = ClientImages.of_folder(folder, image_bounds)
        self._begun = asyncio.Event()
        self._server: HttpServer | None = None
        self._taking_turns: asyncio.Task[None] | None = None
        self._loop = LoopThread("endpoint", "endpoint")
        try:
            self._loop.run(self._start())
        except BaseException:
            self._loop.close(STOP_S)
            raise
        logger.info("the policy answers at %s/v1", self.url)

    async def _start(self) -> None:
        from rolemesh.services.endpoint.routes.app import make_app

        spec = self.spec
        app = make_app(
            spec,
            self._backend.engine,
            self._calls,
            self.sessions,
            key=_key_of(spec),
            begun=self._begun.set,
            images=self._images,
        )
        self._server, port = await serve_app(
            app,
            spec.host,
            port=spec.port,
            certificate=spec.certificate,
            max_connections=MAX_CONNECTIONS,
        )
        scheme = "http" if spec.certificate is None else "https"
        host = f"[{spec.host}]" if ":" in spec.host else spec.host
        self.url = app.state.url = f"{scheme}://{host}:{port}"
        self._taking_turns = asyncio.create_task(self._take_turns())
        # What was loaded stays: the collector must not look at all of it while calls are answered.
        gc.collect()
        gc.freeze()

    async def _take_turns(self) -> None:
        while True:
            await self._begun.wait()
            self._begun.clear()
            while not self._calls.is_empty:
                if not self._may_sample():
                    await asyncio.sleep(RETRY_S)
                    continue
                try:
                    await self._turns.run(self._turn)
                except Exception as error:  # the endpoint outlives what ends a turn
                    # Weights come with the run's next step; of all else `_serve` has told.
                    logger.debug("no turn for the endpoint: %s", error)
                    await asyncio.sleep(RETRY_S)

    def _turn(self) -> None:
        if self._ranks is not None:
            with self._ranks.turn():
                self._serve()
        elif not self._calls.is_empty and self._may_sample():
            self._serve()

    def _serve(self) -> None:
        try:
            self._bring_weights()
            self._backend.serve(self._goes_on)
        except WeightsStaleError:
            raise
        except RolemeshError as error:
            raise WeightsStaleError(str(error)) from error
        except Exception as error:  # each call hears of it, and those that come are tried again
            logger.exception("a turn of the endpoint failed")
            self._calls.fail(self._backend.engine, error)
            if self._ranks is not None:
                # The service must know whether the other ranks have failed alike.
                raise

    def _goes_on(self) -> bool:
        if self._calls.is_empty or self._turns.has_waiting() or not self._may_sample():
            return False
        self._calls.wait()
        return True

    def close(self) -> None:
        """Ends all sessions and calls, on the compute thread; idempotent."""
        if not self._loop.is_running:
            return
        self._calls.close(
            self._backend.engine, EndpointClosedError("the service ends its endpoint")
        )
        try:
            self._loop.run(self._stop(), timeout_s=STOP_S)
        except TimeoutError:
            logger.warning("the endpoint at %s did not end within %.0f s", self.url, STOP_S)
        self._loop.close(STOP_S)

    async def _stop(self) -> None:
        if self._taking_turns is not None:
            self._taking_turns.cancel()
        if self._server is not None:
            await self._server.stop()
        if self._images is not None:
            self._images.close()


class EndpointClosedError(RuntimeError):
    """The endpoint has ended while a call waited."""


def _key_of(spec: EndpointSpec) -> str | None:
    """The endpoint's key.

    Raises:
        ValueError: Its variable is not set.
    """
    if spec.token_variable is None:
        return None
    key = os.environ.get(spec.token_variable, "")
    if not key:
        raise ValueError(
            f"endpoint.token_variable is {spec.token_variable!r}, which is not set in the "
            "service's environment: set it, or leave token_variable out"
        )
    return key
