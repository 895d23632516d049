"""Routes about saved weights: lists, lives, publication, copies, files."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rolemesh.coordinator.tinker.bodies import CopyWeights, Ttl
from rolemesh.coordinator.tinker.downloads import ARCHIVE
from rolemesh.coordinator.tinker.routes.http_parts import (
    MOST_LISTED,
    ROOT,
    Handler,
    page,
    read_body,
)
from rolemesh.coordinator.tinker.routes.keys import Keys
from rolemesh.coordinator.tinker.server import TinkerServer
from rolemesh.coordinator.tinker.sessions import UnknownError
from rolemesh.coordinator.tinker.store import Saved, iso_time

FILES = "files"
"""Path of the route that gives files."""


def checkpoint_routes(server: TinkerServer, keys: Keys) -> Iterator[tuple[str, str, Handler]]:
    """Method, path and handler of each."""
    routes = _CheckpointRoutes(server, keys)
    one = "training_runs/{run}/checkpoints/{kind}/{name}"
    yield "GET", "training_runs", routes.runs
    yield "GET", "training_runs/{run}", routes.run
    yield "GET", "training_runs/{run}/checkpoints", routes.of_run
    yield "GET", "checkpoints", routes.every
    yield "DELETE", one, routes.remove
    yield "PUT", f"{one}/ttl", routes.set_ttl
    yield "POST", f"{one}/publish", routes.publish(is_public=True)
    yield "DELETE", f"{one}/publish", routes.publish(is_public=False)
    yield "POST", "copy_weights", routes.copy
    yield "GET", f"{one}/external_weights_urls", routes.addresses
    yield "GET", f"{one}/archive", routes.archive


class _CheckpointRoutes:
    def __init__(self, server: TinkerServer, keys: Keys) -> None:
        self._server = server
        self._keys = keys

    async def runs(self, request: Request, owner: str) -> Response:
        """Models of an owner that are there or have saved weights."""
        names, cursor = page(request, self._names(owner), usual=20)
        found = [self._run(owner, name) for name in names]
        return JSONResponse({"training_runs": found, "cursor": cursor})

    async def run(self, request: Request, owner: str) -> Response:
        """One of them."""
        name = request.path_params["run"]
        if name not in self._names(owner):
            raise UnknownError(f"training run {name!r}: there is none")
        return JSONResponse(self._run(owner, name))

    async def of_run(self, request: Request, owner: str) -> Response:
        """Saved weights of one."""
        found = list(self._server.store.of(owner, request.path_params["run"]))
        return JSONResponse({"checkpoints": _messages(found[:MOST_LISTED])})

    async def every(self, request: Request, owner: str) -> Response:
        """Saved weights of all."""
        found, cursor = page(request, list(self._server.store.of(owner)), usual=100)
        return JSONResponse({"checkpoints": _messages(found), "cursor": cursor})

    async def remove(self, request: Request, owner: str) -> Response:
        """Removes weights."""
        self._server.store.remove(owner, _path(request))
        return Response(status_code=204)

    async def set_ttl(self, request: Request, owner: str) -> Response:
        """Says how long weights are kept, from now."""
        seconds = (await read_body(request, Ttl)).ttl_seconds
        expires_at = None if seconds is None else time.time() + seconds
        self._server.store.change(owner, _path(request), expires_at=expires_at)
        return Response(status_code=204)

    def publish(self, *, is_public: bool) -> Handler:
        """Lets other owners load weights, or no more."""

        async def handler(request: Request, owner: str) -> Response:
            self._server.store.change(owner, _path(request), is_public=is_public)
            return Response(status_code=204)

        return handler

    async def copy(self, request: Request, owner: str) -> Response:
        """Weights as those of another run, of a session or of a project."""
        asked = await read_body(request, CopyWeights)
        token = asked.weights_access_token or request.headers.get("x-tinker-weights-access-token")
        reader = owner if token is None else self._keys.owner(token)
        return JSONResponse({"tinker_path": self._server.copy(owner, asked, reader=reader).path})

    async def addresses(self, request: Request, owner: str) -> Response:
        """Addresses of an adapter's files, for programs without a key."""
        token, names, expires_at = self._offered(request, owner)
        urls = {name: self._url(request, token, name) for name in names}
        return JSONResponse({"urls": urls, "expires": iso_time(expires_at)})

    async def archive(self, request: Request, owner: str) -> Response:
        """The address of one archive with all of them."""
        token, _, expires_at = self._offered(request, owner)
        return JSONResponse(
            {"url": self._url(request, token, ARCHIVE), "expires": iso_time(expires_at)}
        )

    def _offered(self, request: Request, owner: str) -> tuple[str, list[str], float]:
        saved, folder = self._server.store.find(owner, _path(request))
        return self._server.downloads.offer(folder / saved.shape.files)

    @staticmethod
    def _url(request: Request, token: str, name: str) -> str:
        return str(request.base_url.replace(path=f"{ROOT}/{FILES}/{token}/{name}"))

    def _names(self, owner: str) -> list[str]:
        held = [one.model_id for one in self._server.models.by_id.values() if one.owner == owner]
        saved = [saved.run for saved, _ in self._server.store.of(owner)]
        return list(dict.fromkeys([*held, *saved]))

    def _run(self, owner: str, name: str) -> dict[str, Any]:
        held = self._server.models.by_id.get(name)
        saved = list(self._server.store.of(owner, name))
        newest: dict[str, Saved] = {}
        for one, _ in reversed(saved):
            newest[one.kind] = one
        times = [one.saved_at for one, _ in saved] + ([] if held is None else [held.used_at])
        shape = saved[0][0].shape if held is None else held.shape
        metadata = saved[0][0].user_metadata if held is None else held.metadata
        return {
            "training_run_id": name,
            "base_model": self._server.name,
            "model_owner": owner,
            **shape.told(),
            "corrupted": False,
            "last_request_time": iso_time(max(times)),
            "last_checkpoint": _message(newest.get("weights")),
            "last_sampler_checkpoint": _message(newest.get("sampler_weights")),
            "user_metadata": dict(metadata) or None,
        }


def _message(saved: Saved | None) -> dict[str, Any] | None:
    return None if saved is None else saved.message(0)


def _path(request: Request) -> str:
    parts = request.path_params
    return f"tinker://{parts['run']}/{parts['kind']}/{parts['name']}"


def _messages(found: Iterable[tuple[Saved, Path]]) -> list[dict[str, Any]]:
    return [saved.message(_bytes(folder)) for saved, folder in found]


def _bytes(folder: Path) -> int:
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())
