"""`rolemesh dashboard`: the page over runs that have ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from rolemesh.coordinator.api.credentials import read_token
from rolemesh.coordinator.api.doors.doors import open_doors
from rolemesh.coordinator.api.doors.known_doors import private_folder
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.commands.terminal.ending import refuse
from rolemesh.coordinator.commands.terminal.options import (
    AllowRemote,
    Certificate,
    Host,
    HttpPort,
    OpenToEveryLocalUser,
    TokenFile,
)
from rolemesh.coordinator.recipe.sections.api_section import ApiSpec
from rolemesh.coordinator.run.folders.ended_runs import read_runs
from rolemesh.coordinator.run.folders.folder import RUNS_FOLDER

app = typer.Typer(add_completion=False)


@app.command()
def dashboard(
    runs: Annotated[
        Path, typer.Argument(metavar="[RUNS]", help="Folder of runs, or of one run.")
    ] = RUNS_FOLDER,
    host: Host = "127.0.0.1",
    http_port: HttpPort = 8080,
    token_file: TokenFile = None,
    certificate: Certificate = None,
    allow_remote: AllowRemote = False,
    open_to_every_local_user: OpenToEveryLocalUser = False,
) -> None:
    """Serves the dashboard over runs that have ended, from their folders.

    It starts no service and changes nothing. Folders are read once, when it starts.
    """
    try:
        api = ApiSpec(
            host=host,
            http_port=http_port,
            token_file=token_file,
            certificate=certificate,
            allow_remote=allow_remote,
            open_to_every_local_user=open_to_every_local_user,
        )
        asyncio.run(_serve(runs.absolute(), api))
    except (ValueError, OSError) as error:
        refuse(str(error))


async def _serve(runs: Path, api: ApiSpec) -> None:
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, ending.set)
    found = await read_runs(runs)
    for reason in found.left_out:
        print(f"not shown: {reason}", file=sys.stderr)
    operations = StoreOperations(found.store)
    needs_own = not api.open_to_every_local_user and read_token(api.token_file, os.environ) is None
    try:
        # Nothing is written into the folder of runs.
        folder = private_folder() if needs_own else None
    except OSError as error:
        raise ValueError(
            f"there is no folder for the token ({error}): name one of yours by XDG_STATE_HOME"
        ) from error
    async with open_doors(operations, api, folder=folder) as doors:
        told = doors.told(to_person=sys.stdout.isatty())
        print(f"{len(found.run_ids)} runs - {told}", flush=True)
        await ending.wait()
