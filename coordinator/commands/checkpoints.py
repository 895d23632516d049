"""`rolemesh checkpoints`: what a run could be resumed from."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from rolemesh.coordinator.commands.terminal.console import JsonConsole
from rolemesh.coordinator.commands.terminal.ending import EXIT_BAD_INPUT, EXIT_FAILED, fail
from rolemesh.coordinator.commands.terminal.options import Json
from rolemesh.coordinator.run.folders import folder as run_files
from rolemesh.coordinator.run.folders.ownership import living_coordinator
from rolemesh.coordinator.run.saving.checkpoints import folders_aside
from rolemesh.coordinator.run.saving.kept_checkpoints import (
    KeptCheckpoint,
    best_kept,
    kept_checkpoints,
    prune,
)
from rolemesh.coordinator.run.saving.resume import CHECKPOINTS_FOLDER

app = typer.Typer(add_completion=False)


@app.command()
def checkpoints(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte and compare its hash.")
    ] = False,
    keep: Annotated[
        int | None,
        typer.Option(
            "--prune",
            metavar="N",
            help="Verify, and remove all but the best and the newest N; what is damaged stays.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Lists the checkpoints of a run, verifies and prunes them. Exit code 1: one is damaged."""
    if not run_files.is_run(directory):
        text = f"{directory} holds no run: name the folder of one"
        fail(text, EXIT_BAD_INPUT, as_json=as_json)
    folder = directory / CHECKPOINTS_FOLDER
    try:
        known: Iterable[KeptCheckpoint] = kept_checkpoints(
            folder, verify=verify or keep is not None, best=best_kept(directory)
        )
        if keep is not None:
            if living_coordinator(directory) is not None:
                raise ValueError(
                    "--prune: the run goes on and keeps run.checkpoint.keep checkpoints itself: "
                    "wait until it has ended"
                )
            gone, known = prune(folder, keep, known)
            for step in gone:
                if as_json:
                    JsonConsole().write("removed", {"step": step})
                else:
                    print(f"removed the checkpoint of step {step}")
        listed = list(known)
    except ValueError as error:
        fail(str(error), EXIT_BAD_INPUT, as_json=as_json)
    if as_json:
        for one in listed:
            JsonConsole().write("checkpoint", one.to_dict())
        for aside in folders_aside(folder):
            JsonConsole().write("set_aside", {"folder": str(aside)})
    else:
        _print(listed)
        for aside in folders_aside(folder):
            print(f"{aside}: damaged, and set aside by the run; remove it once you do not need it")
    if any(one.damage for one in listed):
        raise typer.Exit(EXIT_FAILED)


def _print(known: list[KeptCheckpoint]) -> None:
    table = Table()
    for heading in ("step", "roles", "GiB", "saved", "state"):
        # A shortened path would not say which file is damaged.
        justify: Literal["left", "right"] = "right" if heading in ("step", "GiB") else "left"
        table.add_column(heading, justify=justify, overflow="fold")
    for one in known:
        state = {None: "complete", "": "verified"}.get(one.damage, one.damage)
        table.add_row(
            str(one.step),
            ", ".join(one.roles),
            f"{one.num_bytes / 2**30:.2f}",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.committed_at)),
            f"{state}, best" if one.is_best else state,
        )
    Console().print(table if known else "no checkpoint is complete yet")
