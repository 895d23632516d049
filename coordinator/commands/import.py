"""`rolemesh import`: recipes made of settings of TRL, OpenRLHF and verl."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from rolemesh.coordinator.commands.terminal.ending import refuse
from rolemesh.coordinator.imports.forms.reading import read_openrlhf, read_trl, read_verl
from rolemesh.coordinator.imports.recipe import Imported, imported
from rolemesh.coordinator.imports.source import ImportedError, Source
from rolemesh.coordinator.state.files import write_atomically

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Writes a recipe from settings of TRL, OpenRLHF or verl.",
)

Output = Annotated[
    Path | None,
    typer.Option("--output", metavar="FILE", help="Recipe to write; left out, it is printed."),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Of --output: replace a file that is there.")
]
Rows = Annotated[
    int | None,
    typer.Option("--rows", min=1, help="Rows of the training data: passes over it become steps."),
]


@app.command()
def verl(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="YAML of main_ppo, or a shell script (.sh) that calls it."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OVERRIDE]...", help="key=value, +key=value or ~key, as of Hydra."),
    ] = None,
    rows: Rows = None,
    output: Output = None,
    overwrite: Overwrite = False,
) -> None:
    """Writes a recipe from a configuration of verl.

    Each value that has no counterpart is a comment at the end, with the reason.

    Example: rolemesh import verl ppo_trainer.yaml actor_rollout_ref.rollout.n=8
    """
    options = {} if rows is None else {"rows": rows}
    _import("verl", lambda: read_verl(config, overrides or (), options), output, overwrite)


# A flag of OpenRLHF at the beginning is no option of ours.
@app.command(context_settings={"ignore_unknown_options": True})
def openrlhf(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="ARGS",
            help="Flags of train_ppo_ray or a command line with them, in quotes, or a shell script "
            "(.sh).",
        ),
    ],
    rows: Rows = None,
    output: Output = None,
    overwrite: Overwrite = False,
) -> None:
    """Writes a recipe from the arguments of OpenRLHF.

    Takes flags of 0.11, and those that were called otherwise before. Each value that has no
    counterpart is a comment at the end, with the reason.

    Example: rolemesh import openrlhf '--actor.model_name_or_path models/mine --train.seed 1'
    """
    options = {} if rows is None else {"rows": rows}
    _import("openrlhf", lambda: read_openrlhf(arguments, options), output, overwrite)


@app.command()
def trl(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="JSON or YAML of a config of TRL's (GRPO, RLOO, GMPO, distillation, GKD), or of "
            "`trl grpo --config`; or a shell script (.sh).",
        ),
    ],
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="Processes that train; one by default.")
    ] = None,
    rows: Rows = None,
    output: Output = None,
    overwrite: Overwrite = False,
) -> None:
    """Writes a recipe from a configuration of TRL.

    Each value that has no counterpart is a comment at the end, with the reason. Of another config
    than GRPOConfig say so with a key: trainer: rloo, gmpo, distillation, gkd.

    Example: rolemesh import trl grpo.json --gpus 8
    """
    given = {"rows": rows, "gpus": gpus}
    options = {name: value for name, value in given.items() if value is not None}
    _import("trl", lambda: read_trl(config, options), output, overwrite)


def _import(system: str, read: Callable[[], Source], output: Path | None, overwrite: bool) -> None:
    try:
        if output is not None:
            _check_place(output, overwrite)
        made = imported(read(), f"rolemesh import {system}")
        if output is not None:
            write_atomically(output, made.text)
    except ImportedError as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"--output {output} cannot be written: {error.strerror}")
    if output is None:
        print(made.text, end="")
    else:
        _tell(made, output)


def _check_place(output: Path, overwrite: bool) -> None:
    if output.exists() and not overwrite:
        raise ImportedError(f"--output {output} exists: name another file, or give --overwrite")
    if not output.absolute().parent.is_dir():
        raise ImportedError(f"--output {output}: there is no folder {output.parent}: make it first")


def _tell(made: Imported, output: Path) -> None:
    if made.lost:
        print(f"without a counterpart: {len(made.lost)} values, each a comment at the end")
    if made.missing:
        print(f"to fill in: {', '.join(made.missing)}")
    print(f"{output}: written; next:")
    print(f"  rolemesh check {output}    # problems that would stop a run, in seconds")
