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
from rolemesh.coordinator.api.doors import open_doors
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.commands.ending import refuse
from rolemesh.coordinator.commands.options import Host, HttpPort, TokenFile
from rolemesh.coordinator.run.ended_runs import read_runs
from rolemesh.coordinator.run.folder import RUNS_FOLDER

app = typer.Typer(add_completion=False)


@app.command()
def dashboard(
    runs: Annotated[
        Path, typer.Argument(metavar="[RUNS]", help="Folder of runs, or of one run.")
    ] = RUNS_FOLDER,
    host: Host = "127.0.0.1",
    http_port: HttpPort = 8080,
    token_file: TokenFile = None,
) -> None:
    """Serves the dashboard over runs that have ended, from their folders.

    It starts no service and changes nothing. Folders are read once, when it starts.
    """
    try:
        token = read_token(None if token_file is None else token_file.absolute(), os.environ)
        asyncio.run(_serve(runs.absolute(), host, http_port, token))
    except (ValueError, OSError) as error:
        refuse(str(error))


async def _serve(runs: Path, host: str, http_port: int, token: str | None) -> None:
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, ending.set)
    found = await read_runs(runs)
    for reason in found.left_out:
        print(f"not shown: {reason}", file=sys.stderr)
    operations = StoreOperations(found.store)
    async with open_doors(
        operations, host=host, grpc_port=0, http_port=http_port, token=token
    ) as doors:
        print(f"{len(found.run_ids)} runs - dashboard and REST: {doors.url}", flush=True)
        await ending.wait()
