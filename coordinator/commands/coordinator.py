"""`rolemesh coordinator`: takes recipes and makes runs of them until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from rolemesh.coordinator.api.credentials import read_tokens
from rolemesh.coordinator.api.doors.doors import check_doors, open_doors
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.commands.hub.hub import Hub
from rolemesh.coordinator.commands.terminal.console import JsonConsole, log_to
from rolemesh.coordinator.commands.terminal.ending import EXIT_FAILED, fail, refuse
from rolemesh.coordinator.commands.terminal.options import (
    AllowRemote,
    Certificate,
    Host,
    HttpPort,
    Json,
    OpenToEveryLocalUser,
    TokenFile,
)
from rolemesh.coordinator.recipe.sections.api_section import ApiSpec, TokenFiles
from rolemesh.coordinator.recipe.sections.stores import EmbeddedStoreSpec, RedisStoreSpec
from rolemesh.coordinator.state.errors import StateStoreError
from rolemesh.coordinator.state.files import write_atomically
from rolemesh.coordinator.state.opening import open_store
from rolemesh.engine.granted.grants import Grant
from rolemesh.engine.specs.urls import masked_url

DATA_FOLDER = Path("rolemesh-data")
PLACE_FILE = "coordinator.json"
"""In the data folder while the coordinator lives: address, URL and pid."""

_LOCK_FILE = "coordinator.lock"

app = typer.Typer(add_completion=False)


@app.command()
def coordinator(
    data: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of runs and of the embedded store.")
    ] = DATA_FOLDER,
    store_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Redis or Valkey server, which may outlive this process, and its runs with it; "
            "left out, one is started in DIR and ends with this process.",
        ),
    ] = None,
    store_password_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Holds the password of --store-url, which has none."),
    ] = None,
    host: Host = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of CoordinatorService; 0 takes a free one.")
    ] = 50050,
    http_port: HttpPort = 8080,
    max_runs: Annotated[int, typer.Option(min=1, help="Most runs that go on at a time.")] = 4,
    token_file: TokenFile = None,
    read_token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Holds a token with which clients may look only."),
    ] = None,
    drive_token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Holds a token with which clients may steer runs, but begin none."
        ),
    ] = None,
    certificate: Certificate = None,
    member_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Also take clients there that show a certificate of the mesh instead of a token, "
            "and services that register; needs coordinator.pem as --certificate.",
        ),
    ] = None,
    allow_remote: AllowRemote = False,
    open_to_every_local_user: OpenToEveryLocalUser = False,
    folders: Annotated[
        list[Path] | None,
        typer.Option(
            "--folder",
            metavar="DIR",
            help="Models and data in it may be named by recipes; may be repeated. DIR/runs of "
            "--data always may.",
        ),
    ] = None,
    code_roots: Annotated[
        list[Path] | None,
        typer.Option(
            "--code-root",
            metavar="DIR",
            help="Functions and classes of Python files in it may be named by recipes; may "
            "be repeated. Reward functions and environments run in a sandbox, where the host has "
            "one, all others with the rights of this process.",
        ),
    ] = None,
    code_names: Annotated[
        list[str] | None,
        typer.Option(
            "--code-name",
            metavar="NAME",
            help="The same for one function or class, e.g. mypackage.rewards:judge.",
        ),
    ] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="HOST[:PORT]",
            help="Recipes may name addresses there, though it is not public, and send secrets "
            "there; may be repeated.",
        ),
    ] = None,
    variables: Annotated[
        list[str] | None,
        typer.Option(
            "--variable",
            metavar="NAME",
            help="Recipes may use this environment variable as a token; may be repeated.",
        ),
    ] = None,
    function_network: Annotated[
        bool,
        typer.Option(
            "--function-network",
            help="Functions of recipes may open connections, where the recipe asks for that.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Takes recipes over gRPC and REST, and makes each a run in a process of its own.

    What a recipe that is sent here names on this host has to be granted: its folders, code,
    addresses that are not public, and variables.

    SIGTERM or Ctrl-C ends it: with the embedded store its runs first, each after the step in
    progress (a second time: at once); with --store-url they go on, and the next coordinator on the
    same DIR finds them.
    """
    try:
        spec = _store_spec(store_url, store_password_file)
        api = ApiSpec(
            host=host,
            http_port=http_port,
            grpc_port=port,
            member_port=member_port,
            token_file=_absolute(token_file),
            tokens=TokenFiles(read=_absolute(read_token_file), drive=_absolute(drive_token_file)),
            certificate=_absolute(certificate),
            allow_remote=allow_remote,
            open_to_every_local_user=open_to_every_local_user,
        )
        check_doors(api, None, os.environ)
        directory = data.absolute()
        directory.mkdir(parents=True, exist_ok=True)
        log_to(directory / "coordinator.log")
        with _held(directory):
            grant = Grant(
                folders=(directory / "runs", *(folders or ())),
                code_roots=tuple(code_roots or ()),
                code_names=tuple(code_names or ()),
                hosts=tuple(hosts or ()),
                variables=tuple(variables or ()),
                network=function_network,
            )
            asyncio.run(_serve(spec, directory, api, max_runs, grant, as_json))
    except (ValueError, OSError) as error:
        refuse(str(error))
    except StateStoreError as error:
        fail(str(error), EXIT_FAILED)


def _store_spec(url: str | None, password_file: Path | None) -> EmbeddedStoreSpec | RedisStoreSpec:
    if url is None:
        if password_file is not None:
            raise ValueError(
                "--store-password-file is given without --store-url: the store that is started "
                "here has no password, and only you can open its socket"
            )
        return EmbeddedStoreSpec()
    absolute = None if password_file is None else password_file.absolute()
    try:
        return RedisStoreSpec(url=url, password_file=absolute)
    except ValidationError as error:
        reason = error.errors()[0].get("ctx", {}).get("error")
        cause = f" ({reason})" if reason else ""
        raise ValueError(
            f"--store-url is {masked_url(url)!r}{cause}: give e.g. redis://127.0.0.1:6379/0"
        ) from None


async def _serve(
    spec: EmbeddedStoreSpec | RedisStoreSpec,
    directory: Path,
    api: ApiSpec,
    max_runs: int,
    grant: Grant,
    as_json: bool,
) -> None:
    ending = asyncio.Event()
    async with open_store(spec, directory) as store:
        hub = Hub(
            store,
            directory,
            outlives=isinstance(spec, RedisStoreSpec),
            password_file=spec.password_file if isinstance(spec, RedisStoreSpec) else None,
            max_runs=max_runs,
            api=_of_runs(api, directory),
            grant=grant,
        )

        def end() -> None:
            if ending.is_set():
                hub.hurry()
            ending.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # The parent process may want a signal ignored, e.g. nohup or a shell's background job.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, end)
        await hub.adopt()
        operations = StoreOperations(store, creator=hub)
        async with open_doors(operations, api, folder=directory) as doors:
            facts = doors.facts()
            place = directory / PLACE_FILE
            write_atomically(place, json.dumps(facts) + "\n")
            told = doors.told(to_person=sys.stdout.isatty())
            _say(f"{told} - runs in {directory / 'runs'}", facts, as_json)
            try:
                await ending.wait()
                # Its runs can be asked for and watched until they have ended.
                await hub.close()
            finally:
                place.unlink(missing_ok=True)


def _of_runs(api: ApiSpec, directory: Path) -> ApiSpec:
    """The doors of its runs: they have its tokens, and answer on this machine alone."""
    return ApiSpec(
        http_port=None,
        # Made now if none is given, so that the runs of an earlier coordinator find it.
        token_file=read_tokens(api, os.environ, folder=directory).file,
        tokens=api.tokens,
        open_to_every_local_user=api.open_to_every_local_user,
    )


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


def _say(text: str, facts: dict[str, str | int | None], as_json: bool) -> None:
    if as_json:
        JsonConsole().write("coordinator", facts)
    else:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


@contextlib.contextmanager
def _held(directory: Path) -> Iterator[None]:
    """Holds the folder against another coordinator, until the end of the block or the process."""
    # The file stays: see session.py.
    with (directory / _LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"--data: another coordinator uses {directory}: stop it, or give another folder"
            ) from error
        yield
