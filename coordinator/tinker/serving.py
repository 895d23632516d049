"""The server's process: the actor service, the HTTP server, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.tinker.models.actor_place import ActorPlace
from rolemesh.coordinator.tinker.routes.app import make_app
from rolemesh.coordinator.tinker.routes.keys import Keys
from rolemesh.coordinator.tinker.server import TinkerServer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingWish:
    """What is to be served, and where."""

    recipe: Recipe
    folder: Path
    """Absolute."""
    host: str
    port: int
    name: str | None
    places: int
    most_rank: int
    trains_whole: bool
    keys: Path | None


async def serve(wish: ServingWish, *, as_json: bool = False) -> None:
    """Serves until SIGINT or SIGTERM.

    Raises:
        ValueError: An option is wrong.
        LaunchError: The service does not start.
        OSError: The port is taken, or the folder cannot be written to.
    """
    recipe = wish.recipe
    assert recipe.actor is not None
    assert recipe.actor.rollout is not None
    keys = Keys() if wish.keys is None else Keys.read(wish.keys)
    if wish.keys is None and not _is_loopback(wish.host):
        raise ValueError(
            f"--host is {wish.host}, which others reach, and there are no --keys: give both"
        )
    wish.folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server((wish.host, wish.port)) as listener:
        async with (
            ActorPlace(recipe, wish.folder, runs=wish.places) as place,
            TinkerServer(
                place,
                recipe,
                wish.folder,
                name=wish.name or recipe.actor.model.path.name,
                places=wish.places,
                longest=recipe.actor.rollout.max_model_len,
                most_rank=wish.most_rank,
                trains_whole=wish.trains_whole,
            ) as server,
        ):
            place.on_lost = lambda reason: _tell_of_loss(reason, as_json=as_json)
            http = uvicorn.Server(
                uvicorn.Config(
                    make_app(server, keys),
                    log_level="warning",
                    timeout_graceful_shutdown=5,
                    lifespan="off",
                )
            )
            url = f"http://{wish.host}:{listener.getsockname()[1]}"
            _show(url, server.name, as_json=as_json)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, _end, http, server)
            # It handles no signals itself where it is not run by `run`.
            with contextlib.suppress(asyncio.CancelledError):
                await http._serve([listener])  # the public serve() takes signals over


def _is_loopback(host: str) -> bool:
    return host == "localhost" or ipaddress.ip_address(host).is_loopback


def _end(http: uvicorn.Server, server: TinkerServer) -> None:
    # A poll that is held would be cancelled, and told as an error.
    server.promises.end_polls()
    http.should_exit = True


def _tell_of_loss(reason: str, *, as_json: bool) -> None:
    text = f"the actor is started again: {reason}"
    print(json.dumps({"type": "event", "text": text}) if as_json else text, flush=True)


def _show(url: str, name: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"type": "serving", "url": url, "model": name}), flush=True)
        return
    print(f"Tinker's API for {name} at {url}")
    print(f"  use it: TINKER_BASE_URL={url} TINKER_API_KEY=tml-...; Ctrl-C ends it", flush=True)
