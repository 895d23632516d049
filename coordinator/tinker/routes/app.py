"""The routes of Tinker's protocol, `/api/v1`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import IO, Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from rolemesh.coordinator.tinker.bodies import (
    CreateCustomLoss,
    CreateModel,
    CreateSampler,
    LoadWeights,
    OfModel,
    OfPath,
    OfSampler,
    OptimStep,
    SaveWeights,
)
from rolemesh.coordinator.tinker.downloads import ARCHIVE
from rolemesh.coordinator.tinker.forms import json_forms, proto_forms
from rolemesh.coordinator.tinker.forms.forms import WireError
from rolemesh.coordinator.tinker.futures import TooManyError, UnknownPromiseError
from rolemesh.coordinator.tinker.models.held_models import NoPlaceError
from rolemesh.coordinator.tinker.routes import http_parts
from rolemesh.coordinator.tinker.routes.checkpoint_routes import FILES, checkpoint_routes
from rolemesh.coordinator.tinker.routes.http_parts import ROOT, Handler, promise, read_body
from rolemesh.coordinator.tinker.routes.keys import ForbiddenKeyError, Keys
from rolemesh.coordinator.tinker.routes.result_routes import result_routes
from rolemesh.coordinator.tinker.routes.session_routes import session_routes
from rolemesh.coordinator.tinker.server import TinkerServer
from rolemesh.coordinator.tinker.sessions import UnknownError
from rolemesh.coordinator.tinker.store import Kind, UnknownPathError

_FLAGS: Mapping[str, Any] = {
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    # Chunks of one call then come one after another, as they are computed.
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": True,
    "custom_loss_server_side": True,
    "sample_join_sampling_session": True,
}

_STATUS: Mapping[type[Exception], int] = {
    WireError: 400,
    ForbiddenKeyError: 401,
    UnknownError: 404,
    UnknownPathError: 404,
    # By this a client knows that the server was started anew, and asks for samples again.
    UnknownPromiseError: 410,
    TooManyError: 429,
    NoPlaceError: 429,
}
"""What an error of a request is answered with. Clients try 429 again, and give up at the others."""


_ORDERED = frozenset(
    {
        "forward",
        "forward_backward",
        "optim_step",
        "save_weights",
        "save_weights_for_sampler",
        "save_weights_external",
        "load_weights",
    }
)
"""Routes whose calls a client numbers for each model."""


def make_app(server: TinkerServer, keys: Keys) -> Starlette:
    """The application over a server, for the owners of some keys."""
    routes = _Routes(server, keys)
    return Starlette(routes=[Mount(ROOT, routes=routes.all())])


class _Routes:
    def __init__(self, server: TinkerServer, keys: Keys) -> None:
        self._server = server
        self._keys = keys

    def all(self) -> list[Route]:
        """Every route that is served."""
        made = [
            Route(f"/{path}", self._answered(handler), methods=[method])
            for routes in (
                self._own(),
                session_routes(self._server),
                result_routes(self._server),
                checkpoint_routes(self._server, self._keys),
            )
            for method, path, handler in routes
        ]
        made.append(Route(f"/{FILES}/{{token}}/{{name:path}}", self._file, methods=["GET"]))
        others = ["GET", "POST", "PUT", "DELETE"]
        made.append(Route("/{path:path}", self._answered(self._unserved), methods=others))
        return made

    def _own(self) -> Iterator[tuple[str, str, Handler]]:
        yield "GET", "healthz", self._health
        yield "GET", "get_server_capabilities", self._capabilities
        yield "POST", "client/config", self._config
        yield "POST", "client/dynamic_config", self._dynamic_config
        yield "POST", "telemetry", self._telemetry
        yield "POST", "create_model", self._create_model
        yield "POST", "get_info", self._get_info
        yield "POST", "unload_model", self._unload
        yield "POST", "forward", self._gradient(forward_only=True)
        yield "POST", "forward_backward", self._gradient(forward_only=False)
        yield "POST", "create_custom_loss", self._create_loss
        yield "POST", "optim_step", self._optim_step
        yield "POST", "save_weights", self._save("weights")
        yield "POST", "save_weights_for_sampler", self._save("sampler_weights")
        yield "POST", "save_weights_external", self._save("external_weights")
        yield "POST", "load_weights", self._load
        yield "POST", "weights_info", self._weights_info
        yield "POST", "create_sampling_session", self._create_sampler
        yield "POST", "join_sampling_session", self._join
        yield "GET", "samplers/{sampler_id}", self._sampler
        yield "POST", "asample", self._sample

    def _answered(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                owner = self._keys.owner(request.headers.get("x-api-key", ""))
                return await handler(request, owner)
            except ValidationError as error:
                await self._pass_turn(request, owner)
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"]))
                text = first["msg"].removeprefix("Value error, ")
                return http_parts.error(400, f"{where}: {text}" if where else text)
            except tuple(_STATUS) as error:
                if _STATUS[type(error)] in (400, 404):
                    await self._pass_turn(request, owner)
                return http_parts.error(_STATUS[type(error)], str(error))

        return answer

    async def _pass_turn(self, request: Request, owner: str) -> None:
        """Lets the call of a model through that follows one that is refused for good."""
        if (
            request.url.path.rpartition("/")[2] in _ORDERED
            and (ids := http_parts.ids_of(request)) is not None
        ):
            await self._server.refused(owner, *ids)

    async def _unserved(self, request: Request, owner: str) -> Response:
        what = f"{request.method} {request.url.path}"
        return http_parts.error(
            404, f"{what}: this server does not serve it; docs/tinker.md has what it does"
        )

    # --- the client itself ---

    async def _config(self, request: Request, owner: str) -> Response:
        return JSONResponse(dict(_FLAGS))

    async def _dynamic_config(self, request: Request, owner: str) -> Response:
        return JSONResponse({"refresh_interval_sec": 300, "sample_cancel_enabled": True})

    async def _telemetry(self, request: Request, owner: str) -> Response:
        return JSONResponse({"status": "accepted"})

    async def _health(self, request: Request, owner: str) -> Response:
        return JSONResponse({"status": "ok"})

    async def _capabilities(self, request: Request, owner: str) -> Response:
        model = {
            "model_name": self._server.name,
            "max_context_length": self._server.longest,
            "trainable": True,
            "sampleable": True,
        }
        return JSONResponse({"supported_models": [model]})

    # --- models ---

    async def _create_model(self, request: Request, owner: str) -> Response:
        asked = await read_body(request, CreateModel)
        return promise(self._server.create_model(owner, asked))

    async def _get_info(self, request: Request, owner: str) -> Response:
        held = self._server.model(owner, (await read_body(request, OfModel)).model_id)
        server = self._server
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": held.model_id,
                "model_data": {"model_name": server.name, "tokenizer_id": server.tokenizer},
                "model_name": server.name,
                **held.shape.told(),
                "optimizer_config": {"type": "adamw"},
            }
        )

    async def _unload(self, request: Request, owner: str) -> Response:
        asked = await read_body(request, OfModel)
        return promise(self._server.unload(owner, asked.model_id), asked.model_id)

    def _gradient(self, *, forward_only: bool) -> Handler:
        async def handler(request: Request, owner: str) -> Response:
            body = await http_parts.read(request)
            if http_parts.is_protobuf(request):
                call = proto_forms.read_gradient_call(http_parts.decompressed(request, body))
            else:
                call = json_forms.read_gradient_call(
                    http_parts.as_json(body), forward_only=forward_only
                )
            return promise(self._server.gradient(owner, call), call.model_id)

        return handler

    async def _create_loss(self, request: Request, owner: str) -> Response:
        asked = await read_body(request, CreateCustomLoss)
        return promise(self._server.create_loss(owner, asked))

    async def _optim_step(self, request: Request, owner: str) -> Response:
        asked = await read_body(request, OptimStep)
        made = self._server.optim_step(owner, asked.model_id, asked.seq_id, asked.params)
        return promise(made, asked.model_id)

    # --- saved weights ---

    def _save(self, kind: Kind) -> Handler:
        async def handler(request: Request, owner: str) -> Response:
            asked = await read_body(request, SaveWeights)
            asked = asked.model_copy(update={"kind_of_weights": kind})
            return promise(self._server.save(owner, asked), asked.model_id)

        return handler

    async def _load(self, request: Request, owner: str) -> Response:
        asked = await read_body(request, LoadWeights)
        token = asked.weights_access_token
        reader = None if token is None else self._keys.owner(token)
        return promise(self._server.load(owner, asked, reader=reader), asked.model_id)

    async def _weights_info(self, request: Request, owner: str) -> Response:
        asked = await read_body(request, OfPath)
        saved, _ = self._server.store.find(owner, asked.tinker_path)
        return JSONResponse({"base_model": saved.base_model, **saved.shape.told()})

    # --- samples ---

    async def _create_sampler(self, request: Request, owner: str) -> Response:
        asked = await read_body(request, CreateSampler)
        sampler_id = self._server.create_sampler(
            owner,
            asked.session_id,
            asked.sampling_session_seq_id,
            asked.model_path,
            asked.base_model,
        )
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def _join(self, request: Request, owner: str) -> Response:
        asked = await read_body(request, OfSampler)
        number = self._server.join(owner, asked.sampling_session_id)
        return JSONResponse({"type": "join_sampling_session", "client_counter": number})

    async def _sampler(self, request: Request, owner: str) -> Response:
        sampler_id = request.path_params["sampler_id"]
        snapshot = self._server.snapshot(owner, sampler_id)
        told = {"sampler_id": sampler_id, "base_model": self._server.name}
        return JSONResponse(told | ({"model_path": snapshot.path} if snapshot.path else {}))

    async def _sample(self, request: Request, owner: str) -> Response:
        call = json_forms.read_sample_call(http_parts.as_json(await http_parts.read(request)))
        made = self._server.sample(owner, call)
        ids = [f"{made}:{number}" for number in range(call.num_samples)]
        return JSONResponse({"request_id": made, "sample_sequence_ids": ids})

    # --- files ---

    async def _file(self, request: Request) -> Response:
        """A file of an adapter, or the archive of all: the address is the right to it."""
        token, name = request.path_params["token"], request.path_params["name"]
        downloads = self._server.downloads
        try:
            if name != ARCHIVE:
                return FileResponse(downloads.file(token, name))
            whole = await asyncio.to_thread(downloads.archive, token)
        except UnknownError as error:
            return http_parts.error(404, str(error))
        headers = {"content-disposition": f'attachment; filename="{ARCHIVE}"'}
        return StreamingResponse(
            _parts(whole),
            media_type="application/x-tar",
            headers=headers,
            background=BackgroundTask(whole.close),
        )


def _parts(file: IO[bytes]) -> Iterator[bytes]:
    while part := file.read(2**20):
        yield part
