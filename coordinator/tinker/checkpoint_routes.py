"""Routes about saved weights: lists, lives, publication."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rolemesh.coordinator.tinker.bodies import Ttl
from rolemesh.coordinator.tinker.server import TinkerServer, UnknownError
from rolemesh.coordinator.tinker.store import Saved, iso_time

T = TypeVar("T")
Handler = Callable[[Request, str], Awaitable[Response]]

MOST_LISTED = 1000
"""Entries of one answer."""


def checkpoint_routes(server: TinkerServer) -> Iterator[tuple[str, str, Handler]]:
    """Method, path and handler of each."""
    routes = _CheckpointRoutes(server)
    one = "training_runs/{run}/checkpoints/{kind}/{name}"
    yield "GET", "training_runs", routes.runs
    yield "GET", "training_runs/{run}", routes.run
    yield "GET", "training_runs/{run}/checkpoints", routes.of_run
    yield "GET", "checkpoints", routes.every
    yield "DELETE", one, routes.remove
    yield "PUT", f"{one}/ttl", routes.set_ttl
    yield "POST", f"{one}/publish", routes.publish(is_public=True)
    yield "DELETE", f"{one}/publish", routes.publish(is_public=False)


class _CheckpointRoutes:
    def __init__(self, server: TinkerServer) -> None:
        self._server = server

    async def runs(self, request: Request, owner: str) -> Response:
        """Models of an owner that are there or have saved weights."""
        names, cursor = _page(request, self._names(owner), usual=20)
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
        found, cursor = _page(request, list(self._server.store.of(owner)), usual=100)
        return JSONResponse({"checkpoints": _messages(found), "cursor": cursor})

    async def remove(self, request: Request, owner: str) -> Response:
        """Removes weights."""
        self._server.store.remove(owner, _path(request))
        return Response(status_code=204)

    async def set_ttl(self, request: Request, owner: str) -> Response:
        """Says how long weights are kept, from now."""
        seconds = Ttl.model_validate_json(await request.body() or b"{}").ttl_seconds
        expires_at = None if seconds is None else time.time() + seconds
        self._server.store.change(owner, _path(request), expires_at=expires_at)
        return Response(status_code=204)

    def publish(self, *, is_public: bool) -> Handler:
        """Lets other owners load weights, or no more."""

        async def handler(request: Request, owner: str) -> Response:
            self._server.store.change(owner, _path(request), is_public=is_public)
            return Response(status_code=204)

        return handler

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
        rank = saved[0][0].rank if held is None else held.shape.rank
        metadata = saved[0][0].user_metadata if held is None else held.metadata
        return {
            "training_run_id": name,
            "base_model": self._server.name,
            "model_owner": owner,
            "is_lora": True,
            "corrupted": False,
            "lora_rank": rank,
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


def _page(request: Request, found: list[T], *, usual: int) -> tuple[list[T], dict[str, int]]:
    """Those that a request asks for, and its cursor; `usual` is its limit where it has none."""
    limit, offset = _count(request, "limit", usual), _count(request, "offset", 0)
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return found[offset : offset + min(limit, MOST_LISTED)], cursor


def _count(request: Request, name: str, usual: int) -> int:
    text = request.query_params.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else usual


def _bytes(folder: Path) -> int:
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())
