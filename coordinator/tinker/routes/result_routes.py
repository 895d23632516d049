"""Routes about results that were promised: fetched one by one, told of together, given up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rolemesh.coordinator.tinker.bodies import OfPromise, SampledTogether
from rolemesh.coordinator.tinker.forms import json_forms, proto_forms
from rolemesh.coordinator.tinker.forms.forms import GradientResult, SampleResult
from rolemesh.coordinator.tinker.futures import POLL_S, Failure
from rolemesh.coordinator.tinker.routes.http_parts import PROTOBUF, Handler, read_body
from rolemesh.coordinator.tinker.server import TinkerServer, sampling_group


def result_routes(server: TinkerServer) -> Iterator[tuple[str, str, Handler]]:
    """Method, path and handler of each."""
    routes = _ResultRoutes(server)
    yield "POST", "retrieve_future", routes.retrieve
    yield "POST", "retrieve_futures", routes.ended
    yield "POST", "cancel_future", routes.give_up


class _ResultRoutes:
    def __init__(self, server: TinkerServer) -> None:
        self._server = server

    async def retrieve(self, request: Request, owner: str) -> Response:
        """A result, or that there is none yet."""
        asked = await read_body(request, OfPromise)
        result = await self._server.promises.result(owner, asked.request_id)
        try:
            return _answer(asked.request_id, result, request.headers.get("accept", ""))
        except ValueError as error:
            # No status of HTTP: at one a client would ask again, and without end at 500.
            return JSONResponse({"error": str(error), "category": "user"})

    async def ended(self, request: Request, owner: str) -> Response:
        """Which samples of one copy of a sampling client have ended."""
        asked = await read_body(request, SampledTogether)
        sampler_id = asked.target.sampling_session_id
        self._server.snapshot(owner, sampler_id)
        group = sampling_group(sampler_id, asked.target.cloned_sampler_id)
        wait_s = POLL_S if asked.timeout is None else min(asked.timeout, POLL_S)
        found, cursor = await self._server.promises.ended(owner, group, asked.prev_cursor, wait_s)
        completions = [
            {"request_id": one, "state": "finished" if is_made else "failed"}
            for one, is_made in found
        ]
        return JSONResponse({"completions": completions, "cursor": cursor})

    async def give_up(self, request: Request, owner: str) -> Response:
        """Ends a sample that its client does not want any more."""
        asked = await read_body(request, OfPromise)
        self._server.promises.give_up(owner, asked.request_id)
        return JSONResponse({})


def _answer(request_id: str, result: Any, accept: str) -> Response:
    """A result as the client reads it; raises ValueError where its JSON has no such number."""
    takes_protobuf = PROTOBUF in accept
    match result:
        case None:
            return JSONResponse(
                {
                    "type": "try_again",
                    "request_id": request_id,
                    "queue_state": "active",
                }
            )
        case Failure():
            return JSONResponse({"error": result.text, "category": result.category})
        case GradientResult() if takes_protobuf:
            return Response(proto_forms.write_gradient_result(result), media_type=PROTOBUF)
        case SampleResult() if takes_protobuf:
            return Response(proto_forms.write_sample_result(result), media_type=PROTOBUF)
        case GradientResult():
            return JSONResponse(json_forms.write_gradient_result(result))
        case SampleResult():
            return JSONResponse(json_forms.write_sample_result(result))
        case _:
            return JSONResponse(result)
