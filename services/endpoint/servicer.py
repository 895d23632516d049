"""What rank 0 of a service with an endpoint asks of the other ranks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

from rolemesh.engine.rollout.endpoint.calls import EndpointCall, EndpointCalls
from rolemesh.engine.rollout.endpoint.wire import pack_output, unpack_call
from rolemesh.rpc.errors import PreconditionError
from rolemesh.services.endpoint.role import EndpointRole
from rolemesh.services.endpoint.turns import RankTurns
from rolemesh.services.runtime.calls.runtime import Context, RoleServicer, Runtime
from rolemesh.v1 import endpoint_pb2, endpoint_pb2_grpc


class EndpointServicer(RoleServicer[EndpointRole], endpoint_pb2_grpc.EndpointServiceServicer):
    """EndpointService over a role whose sampler may answer at an endpoint."""

    def __init__(self, role: EndpointRole, runtime: Runtime) -> None:
        super().__init__(role, runtime)
        self._numbers = itertools.count()

    async def TakeTurn(
        self, request: endpoint_pb2.TakeTurnRequest, context: Context
    ) -> endpoint_pb2.TakeTurnResponse:
        """See endpoint.proto."""
        self._calls_and_turns(request.run_id)
        await self._runtime.compute.run(self._role.take_turn)
        return endpoint_pb2.TakeTurnResponse()

    async def EndTurn(
        self, request: endpoint_pb2.EndTurnRequest, context: Context
    ) -> endpoint_pb2.EndTurnResponse:
        """See endpoint.proto."""
        _, turns = self._calls_and_turns(request.run_id)
        turns.end(request.turn)
        return endpoint_pb2.EndTurnResponse()

    async def SampleCall(
        self, request: endpoint_pb2.SampleCallRequest, context: Context
    ) -> AsyncIterator[endpoint_pb2.SampleCallResponse]:
        """See endpoint.proto."""
        calls, _ = self._calls_and_turns(request.run_id)
        prompt, params, images = unpack_call(request.call)
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def told(output: Any) -> None:
            loop.call_soon_threadsafe(outputs.put_nowait, output)

        call_id = f"of-rank-0-{next(self._numbers)}"
        is_over = False
        calls.begin(
            EndpointCall(call_id=call_id, prompt=prompt, params=params, told=told, images=images)
        )
        try:
            while not is_over:
                output = await outputs.get()
                if isinstance(output, BaseException):
                    is_over = True
                    raise output
                is_over = output.finished
                yield endpoint_pb2.SampleCallResponse(output=pack_output(output))
        finally:
            if not is_over:
                calls.cancel(call_id)

    def _calls_and_turns(self, run_id: str) -> tuple[EndpointCalls, RankTurns]:
        """What this rank samples of a run, and when.

        Raises:
            PreconditionError: NOT_INITIALIZED or RUN_MISMATCH: it has no such run, or no endpoint.
        """
        self._runtime.hold.check_is_of(run_id)
        turns = self._role.turns
        if turns is None:
            raise PreconditionError(
                f"the {self._runtime.role.name} shares no endpoint over its ranks: rank 0 asks for "
                "turns of one after Initialize with an endpoint",
                reason="NOT_INITIALIZED",
            )
        return turns.calls, turns
