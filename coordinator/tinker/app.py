"""The routes of Tinker's protocol, `/api/v1`."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from rolemesh.coordinator.tinker import json_forms, proto_forms
from rolemesh.coordinator.tinker.bodies import (
    Body,
    CreateModel,
    CreateSampler,
    LoadWeights,
    OfModel,
    OfPath,
    OfPromise,
    OfSession,
    OptimStep,
    SaveWeights,
)
from rolemesh.coordinator.tinker.checkpoint_routes import checkpoint_routes
from rolemesh.coordinator.tinker.forms import GradientResult, SampleResult, WireError
from rolemesh.coordinator.tinker.futures import Failure, TooManyError, UnknownPromiseError
from rolemesh.coordinator.tinker.held_models import NoPlaceError
from rolemesh.coordinator.tinker.keys import ForbiddenKeyError, Keys
from rolemesh.coordinator.tinker.server import TinkerServer, UnknownError
from rolemesh.coordinator.tinker.store import Kind, UnknownPathError

MOST_BODY_BYTES = 256 * 2**20
"""Of one request."""

PROTOBUF = "application/x-protobuf"

_FLAGS: Mapping[str, Any] = {
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    # Chunks of one call then come one after another, as they are computed.
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
}

Handler = Callable[[Request, str], Awaitable[Response]]
B = TypeVar("B", bound=Body)

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
        "load_weights",
    }
)
"""Routes whose calls a client numbers for each model."""


def make_app(server: TinkerServer, keys: Keys) -> Starlette:
    """The application over a server, for the owners of some keys."""
    routes = _Routes(server, keys)
    return Starlette(routes=[Mount("/api/v1", routes=routes.all())])


class _Routes:
    def __init__(self, server: TinkerServer, keys: Keys) -> None:
        self._server = server
        self._keys = keys

    def all(self) -> list[Route]:
        """Every route that is served."""
        posts: dict[str, Handler] = {
            "client/config": self._config,
            "client/dynamic_config": self._dynamic_config,
            "telemetry": self._telemetry,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session_id}/finish": self._finish,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "unload_model": self._unload,
            "forward": self._gradient(forward_only=True),
            "forward_backward": self._gradient(forward_only=False),
            "optim_step": self._optim_step,
            "save_weights": self._save("weights"),
            "save_weights_for_sampler": self._save("sampler_weights"),
            "load_weights": self._load,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
        }
        gets: dict[str, Handler] = {
            "healthz": self._health,
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler_id}": self._sampler,
        }
        made = [
            Route(f"/{path}", self._answered(one), methods=["POST"]) for path, one in posts.items()
        ]
        made += [
            Route(f"/{path}", self._answered(one), methods=["GET"]) for path, one in gets.items()
        ]
        made += [
            Route(f"/{path}", self._answered(one), methods=[method])
            for method, path, one in checkpoint_routes(self._server)
        ]
        others = ["GET", "POST", "PUT", "DELETE"]
        made.append(Route("/{path:path}", self._answered(self._unserved), methods=others))
        return made

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
                return _error(400, f"{where}: {text}" if where else text)
            except tuple(_STATUS) as error:
                if _STATUS[type(error)] in (400, 404):
                    await self._pass_turn(request, owner)
                return _error(_STATUS[type(error)], str(error))

        return answer

    async def _pass_turn(self, request: Request, owner: str) -> None:
        """Lets the call of a model through that follows one that is refused for good."""
        if request.url.path.rpartition("/")[2] in _ORDERED and (ids := _ids(request)) is not None:
            await self._server.refused(owner, *ids)

    async def _unserved(self, request: Request, owner: str) -> Response:
        what = f"{request.method} {request.url.path}"
        return _error(
            404, f"{what}: this server does not serve it; docs/tinker.md has what it does"
        )

    # --- the client itself ---

    async def _config(self, request: Request, owner: str) -> Response:
        return JSONResponse(dict(_FLAGS))

    async def _dynamic_config(self, request: Request, owner: str) -> Response:
        return JSONResponse({"refresh_interval_sec": 300, "sample_cancel_enabled": False})

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

    # --- sessions ---

    async def _create_session(self, request: Request, owner: str) -> Response:
        session_id = self._server.create_session(owner)
        return JSONResponse({"type": "create_session", "session_id": session_id})

    async def _heartbeat(self, request: Request, owner: str) -> Response:
        asked = await _body(request, OfSession)
        try:
            self._server.heard(owner, asked.session_id)
        except UnknownError as error:
            # By this a client knows that it need not go on.
            return _error(410, str(error))
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish(self, request: Request, owner: str) -> Response:
        await self._server.finish(owner, request.path_params["session_id"])
        return JSONResponse({})

    # --- models ---

    async def _create_model(self, request: Request, owner: str) -> Response:
        asked = await _body(request, CreateModel)
        return _promise(self._server.create_model(owner, asked))

    async def _get_info(self, request: Request, owner: str) -> Response:
        held = self._server.model(owner, (await _body(request, OfModel)).model_id)
        server = self._server
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": held.model_id,
                "model_data": {"model_name": server.name, "tokenizer_id": server.tokenizer},
                "model_name": server.name,
                "is_lora": True,
                "lora_rank": held.shape.rank,
                "optimizer_config": {"type": "adamw"},
            }
        )

    async def _unload(self, request: Request, owner: str) -> Response:
        asked = await _body(request, OfModel)
        return _promise(self._server.unload(owner, asked.model_id), asked.model_id)

    def _gradient(self, *, forward_only: bool) -> Handler:
        async def handler(request: Request, owner: str) -> Response:
            body = await _read(request)
            if _is_protobuf(request):
                call = proto_forms.read_gradient_call(_decompressed(request, body))
            else:
                call = json_forms.read_gradient_call(_json(body), forward_only=forward_only)
            return _promise(self._server.gradient(owner, call), call.model_id)

        return handler

    async def _optim_step(self, request: Request, owner: str) -> Response:
        asked = await _body(request, OptimStep)
        promise = self._server.optim_step(owner, asked.model_id, asked.seq_id, asked.params)
        return _promise(promise, asked.model_id)

    # --- saved weights ---

    def _save(self, kind: Kind) -> Handler:
        async def handler(request: Request, owner: str) -> Response:
            asked = await _body(request, SaveWeights)
            asked = asked.model_copy(update={"kind_of_weights": kind})
            return _promise(self._server.save(owner, asked), asked.model_id)

        return handler

    async def _load(self, request: Request, owner: str) -> Response:
        asked = await _body(request, LoadWeights)
        return _promise(self._server.load(owner, asked), asked.model_id)

    async def _weights_info(self, request: Request, owner: str) -> Response:
        asked = await _body(request, OfPath)
        saved, _ = self._server.store.find(owner, asked.tinker_path)
        return JSONResponse(
            {"base_model": saved.base_model, "is_lora": True, "lora_rank": saved.rank}
        )

    # --- samples ---

    async def _create_sampler(self, request: Request, owner: str) -> Response:
        asked = await _body(request, CreateSampler)
        sampler_id = self._server.create_sampler(
            owner,
            asked.session_id,
            asked.sampling_session_seq_id,
            asked.model_path,
            asked.base_model,
        )
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def _sampler(self, request: Request, owner: str) -> Response:
        sampler_id = request.path_params["sampler_id"]
        snapshot = self._server.snapshot(owner, sampler_id)
        told = {"sampler_id": sampler_id, "base_model": self._server.name}
        return JSONResponse(told | ({"model_path": snapshot.path} if snapshot.path else {}))

    async def _sample(self, request: Request, owner: str) -> Response:
        call = json_forms.read_sample_call(_json(await _read(request)))
        promise = self._server.sample(owner, call)
        ids = [f"{promise}:{number}" for number in range(call.num_samples)]
        return JSONResponse({"request_id": promise, "sample_sequence_ids": ids})

    # --- results ---

    async def _retrieve(self, request: Request, owner: str) -> Response:
        asked = await _body(request, OfPromise)
        result = await self._server.promises.result(owner, asked.request_id)
        try:
            return _answer(asked.request_id, result, request.headers.get("accept", ""))
        except ValueError as error:
            # No status of HTTP: at one a client would ask again, and without end at 500.
            return JSONResponse({"error": str(error), "category": "user"})


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


async def _read(request: Request) -> bytes:
    """The body; raises WireError where it is too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY_BYTES:
            raise WireError("body", f"more than {MOST_BODY_BYTES} bytes", "send smaller chunks")
    whole = bytes(body)
    request.state.body = whole
    return whole


def _ids(request: Request) -> tuple[str, int] | None:
    """Model and number of a call whose body was read; None where it tells neither."""
    body = getattr(request.state, "body", b"")
    try:
        if _is_protobuf(request):
            return proto_forms.ids_of(_decompressed(request, body))
        whole = _json(body)
    except WireError:
        return None
    if not isinstance(whole, dict):
        return None
    model_id, seq_id = whole.get("model_id"), whole.get("seq_id")
    return (model_id, seq_id) if isinstance(model_id, str) and isinstance(seq_id, int) else None


def _is_protobuf(request: Request) -> bool:
    return request.headers.get("content-type", "").startswith(PROTOBUF)


def _decompressed(request: Request, body: bytes) -> bytes:
    return proto_forms.decompress(body, request.headers.get("content-encoding"))


def _json(body: bytes) -> Any:
    try:
        return json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise WireError("body", str(error), "send JSON") from error


async def _body(request: Request, kind: type[B]) -> B:
    return kind.model_validate(_json(await _read(request)))


def _promise(request_id: str, model_id: str | None = None) -> Response:
    return JSONResponse(
        {"request_id": request_id, **({} if model_id is None else {"model_id": model_id})}
    )


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": text, "detail": text}, status_code=status)
