"""`rolemesh export`: a checkpoint's policy as a folder, a file for llama.cpp, or at the hub."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, get_args

import typer

from rolemesh.coordinator.commands.policies.exporting import export_command, step_of
from rolemesh.coordinator.commands.policies.model_card import has_adapter, model_card
from rolemesh.coordinator.commands.policies.publishing import PushError, check_can_push, push
from rolemesh.coordinator.commands.terminal.ending import EXIT_FAILED, fail, refuse
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.run.folders.folder import NoRunError, read_config, read_json
from rolemesh.coordinator.run.reporting.records import SUMMARY_FILE
from rolemesh.coordinator.run.saving.resume import RUN_FILE
from rolemesh.coordinator.state.child_environment import child_environment
from rolemesh.coordinator.state.files import write_atomically
from rolemesh.engine.specs import GgufType

app = typer.Typer(add_completion=False)


@app.command()
def export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.")],
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FOLDER", help="Folder to write, or file.")
    ] = None,
    push_to: Annotated[
        str | None,
        typer.Option(
            "--push",
            metavar="ORG/NAME",
            help="Send it to the Hugging Face hub, with a card that has the run's facts; what is "
            "new there is private. Needs `hf auth login`, or HF_TOKEN.",
        ),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Of --push: a new model may be read by all.")
    ] = False,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; the newest.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16 or float32; bfloat16, but float32 for an adapter's folder."),
    ] = None,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge", help="Of a run that trains an adapter: add it to its base, as a whole model."
        ),
    ] = False,
    gguf: Annotated[
        str | None,
        typer.Option(
            "--gguf",
            metavar="TYPE",
            help="Write one GGUF file, which llama.cpp serves, with matrices of this type: "
            f"{', '.join(get_args(GgufType))}.",
        ),
    ] = None,
) -> None:
    """Writes the policy of a checkpoint as a Hugging Face folder, or as a GGUF file.

    An adapter becomes a folder in PEFT's format, or with --merge a whole model.

    Example: rolemesh export runs/mine-20261128-101500 --push me/my-model
    """
    if to is None and push_to is None:
        refuse("--to is missing: name the folder to write, or a model at the hub with --push")
    if public and push_to is None:
        refuse("--public is given, but not --push: say where to send the model, or leave it out")
    if gguf is not None:
        _check_gguf(gguf, dtype, push_to)
    try:
        if push_to is not None:
            check_can_push(push_to)
        wanted = step_of(directory, step)
        if merge and not has_adapter(read_config(directory)):
            refuse(
                f"--merge is given, but {directory} trains a whole model, without "
                "actor.model.adapter: leave it out"
            )
        if gguf is not None and not merge and has_adapter(read_config(directory)):
            refuse(
                f"--gguf is {gguf}, and {directory} trains an adapter: give --merge, which adds it "
                "to its base"
            )
        with _folder(directory, to) as folder:
            command = [
                *export_command(directory, wanted, folder, is_pushed=push_to is not None),
                *(() if dtype is None else ("--dtype", dtype)),
                *(("--merge",) if merge else ()),
                *(() if gguf is None else ("--gguf", gguf)),
            ]
            # It loads torch, and needs no token.
            environment = {**child_environment(os.environ), "PYTHONSAFEPATH": "1"}
            ended = subprocess.run(command, env=environment, check=False)
            if ended.returncode:
                raise typer.Exit(ended.returncode)
            if push_to is not None:
                write_atomically(folder / "README.md", _card(directory, push_to, wanted, merge))
                told = f"Policy after {wanted} steps, by rolemesh"
                page = push(folder, push_to, is_public=public, message=told)
                print(f"{push_to}: sent to {page}")
    except (NoRunError, RecipeError) as error:
        refuse(str(error))
    except PushError as error:
        fail(str(error), EXIT_FAILED)


def _check_gguf(kind: str, dtype: str | None, push_to: str | None) -> None:
    """Refuses what does not go with a GGUF file."""
    known = get_args(GgufType)
    if kind not in known:
        refuse(f"--gguf is {kind!r}: give one of {', '.join(known)}")
    if dtype is not None:
        refuse(f"--dtype is {dtype} beside --gguf {kind}, which says the type: leave --dtype out")
    if push_to is not None:
        refuse(
            f"--push is {push_to} beside --gguf {kind}, and sends a Hugging Face folder: write the "
            "file with --to, and send it with `hf upload`"
        )


@contextlib.contextmanager
def _folder(run: Path, to: Path | None) -> Iterator[Path]:
    """The folder to write; what is only sent on lies beside the run's files, which are as large."""
    if to is not None:
        yield to
        return
    with tempfile.TemporaryDirectory(prefix=".export-", dir=run) as folder:
        yield Path(folder) / "model"


def _card(directory: Path, name: str, step: int, is_merged: bool) -> str:
    run = read_json(directory / RUN_FILE)
    summary = read_json(directory / SUMMARY_FILE)
    config = read_config(directory)
    return model_card(name, config, summary, str(run["run_id"]), step, is_merged=is_merged)
