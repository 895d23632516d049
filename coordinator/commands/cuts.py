"""`rolemesh cuts`: what runs keep in shared memory, so that they lose no step when they go on."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rolemesh.coordinator.commands.terminal.console import JsonConsole, say
from rolemesh.coordinator.commands.terminal.ending import EXIT_BAD_INPUT, EXIT_FAILED, fail
from rolemesh.coordinator.commands.terminal.options import Json
from rolemesh.coordinator.run.checks.footprint import gib
from rolemesh.coordinator.run.folders.kept_cuts import CutsInUseError, KeptCuts, ago, kept_cuts
from rolemesh.engine.transport.slots.shm_directory import SHM_DIRECTORY

app = typer.Typer(add_completion=False)


@app.command()
def cuts(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Id or folder of a run; all if left out.")
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove what no live run holds from memory.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Lists what runs keep in this host's shared memory, and removes what no live run holds.

    A run that goes on, or is resumed on this host, goes back to its cuts; without them it goes
    back to its newest checkpoint. Exit code 1: cuts of the run that was named are in use.
    """
    known = kept_cuts(run)
    if run is not None and not known:
        text = f"{run} has no cuts in {SHM_DIRECTORY}: name the id or the folder of a run that has"
        fail(text, EXIT_BAD_INPUT, as_json=as_json)
    if prune:
        _prune(known, is_named=run is not None, as_json=as_json)
        return
    if as_json:
        for one in known:
            JsonConsole().write("cuts", one.to_dict())
    else:
        _print(known)


def _prune(known: list[KeptCuts], *, is_named: bool, as_json: bool) -> None:
    for one in known:
        try:
            one.remove()
        except CutsInUseError as error:
            if is_named:
                fail(str(error), EXIT_FAILED, as_json=as_json)
            if as_json:
                JsonConsole().write("kept", one.to_dict())
            else:
                print(error)
            continue
        if as_json:
            JsonConsole().write("removed", one.to_dict())
        else:
            print(f"removed {gib(one.slots.num_bytes)} of {one.slots.run_id or '(unknown)'}")


def _print(known: list[KeptCuts]) -> None:
    console, table = Console(), Table()
    for heading in ("run", "roles", "size", "written"):
        table.add_column(heading, justify="right" if heading == "size" else "left")
    for one in known:
        table.add_row(
            one.slots.run_id or "(unknown)",
            ", ".join(one.slots.roles),
            gib(one.slots.num_bytes),
            f"{ago(one.slots.age_s)} ago",
        )
    console.print(table if known else f"no cuts lie in {SHM_DIRECTORY}")
    for one in known:
        # Below the table, which would wrap the command.
        say(console, f"{one.slots.run_id or '(unknown)'}: {one.state}")
