"""`rolemesh calibrate`: measures this machine, and fits the cost model of `rolemesh plan` to it."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rolemesh.coordinator.commands.terminal.console import say
from rolemesh.coordinator.commands.terminal.ending import EXIT_BAD_INPUT, EXIT_FAILED, fail
from rolemesh.coordinator.commands.terminal.options import Json
from rolemesh.coordinator.commands.terminal.processes import PreviewError, told_by
from rolemesh.coordinator.mapping.calibration.calibration import (
    Calibration,
    CalibrationError,
    Machine,
    calibrated,
    read_calibration,
)
from rolemesh.coordinator.mapping.calibration.primitives import Primitive
from rolemesh.coordinator.mapping.calibration.recorded import RecordedRun
from rolemesh.coordinator.mapping.errors import PlanError
from rolemesh.coordinator.mapping.machines.devices import DEVICES, device_of
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.run.folders.folder import NoRunError
from rolemesh.coordinator.run.folders.recorded_steps import recorded_run
from rolemesh.coordinator.run.services.host_gpus import host_gpus
from rolemesh.coordinator.run.tuning.calibrations import default_place
from rolemesh.coordinator.state.files import write_atomically

app = typer.Typer(add_completion=False)


@app.command()
def calibrate(
    gpu: Annotated[
        str, typer.Option(metavar="NAME", help=f"What is measured: {', '.join(DEVICES)}.")
    ] = "cpu",
    threads: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of a rank on a CPU, as services get them.")
    ] = 1,
    run: Annotated[
        list[Path] | None,
        typer.Option("--run", metavar="DIR", help="A run made here: its calls are fitted too."),
    ] = None,
    keep_out: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR", help="A run made here that is only predicted, to see how well."
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option(help="Measures; else takes what the file has from the last time.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Written; where `rolemesh plan` looks."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measures this machine in about a minute, and writes what `rolemesh plan` then predicts with.

    Products of matrices, memory, collective operations, passes, updates and decoding of small
    models. Other programs should be idle meanwhile. Exit code 0: the file is written; 1: measuring
    failed; 2: bad input.

    Example: rolemesh calibrate --run runs/my-run
    """
    file = default_place(gpu) if out is None else out
    try:
        device = device_of(gpu)
        runs = [recorded_run(directory) for directory in run or ()]
        kept_out = [recorded_run(directory) for directory in keep_out or ()]
        _check_apart(run or [], keep_out or [])
        if measure:
            primitives, machine = _measured(device.kind, threads)
        else:
            before = read_calibration(file)
            if before.device != gpu:
                raise CalibrationError(f"{file} is of {before.device}, but --gpu is {gpu}")
            primitives, machine = list(before.primitives), before.machine
        found = calibrated(device, primitives, runs, kept_out, machine)
        write_atomically(file, json.dumps(found.to_dict(), indent=1) + "\n")
    except (RecipeError, PlanError, NoRunError) as error:
        fail(str(error), EXIT_BAD_INPUT, as_json=as_json)
    except PreviewError as error:
        fail(str(error), EXIT_FAILED, as_json=as_json)
    except OSError as error:
        text = f"{error.filename} cannot be written ({error.strerror}): name a file with --out"
        fail(text, EXIT_BAD_INPUT, as_json=as_json)
    if as_json:
        print(json.dumps({"file": str(file), **found.to_dict(), "basis": found.basis()}))
        return
    _show(Console(), found, runs, kept_out)
    print(f"written: {file}")


def _check_apart(runs: list[Path], kept_out: list[Path]) -> None:
    both = {one.resolve() for one in runs} & {one.resolve() for one in kept_out}
    if both:
        raise CalibrationError(
            f"{min(both)} is named by --run and --keep-out: a run that is fitted cannot show how "
            "well others are predicted; take one of them back"
        )


def _measured(kind: str, threads: int) -> tuple[list[Primitive], Machine]:
    """What a process of the engine's side measures."""
    if kind == "gpu":
        here = host_gpus()
        if not here.count:
            raise CalibrationError(
                "this host has no GPU that services could use"
                + (f" ({here.unusable})" if here.unusable else "")
                + ": calibrate on one that has, or give --gpu cpu"
            )
    primitives = []
    module, device = "rolemesh.services.preview.primitives", "cuda" if kind == "gpu" else "cpu"
    environment = {"OMP_NUM_THREADS": str(threads)}
    environment |= {} if kind == "gpu" else {"CUDA_VISIBLE_DEVICES": ""}
    for told in told_by(module, device, str(threads), work="measures", environment=environment):
        what = told.pop("type")
        if what == "primitive":
            primitives.append(Primitive(**told))
            if sys.stderr.isatty():
                print(f"{primitives[-1].name}: {told['seconds']:.3g} s", file=sys.stderr)
        else:
            date = datetime.datetime.now(datetime.UTC).date().isoformat()
            return primitives, Machine(**told, date=date)
    raise PreviewError("the process that measures ended early: `rolemesh doctor` looks at torch")


def _show(
    console: Console, found: Calibration, runs: list[RecordedRun], kept_out: list[RecordedRun]
) -> None:
    table = Table(title=f"{found.machine.name}, {found.device}: measured and predicted")
    for heading in ("what", "measured, ms", "predicted, ms", "error"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for row in found.rows:
        kept = "" if row.is_fitted else " (kept out)"
        _add(table, f"{row.name}{kept}", row.seconds, row.predicted)
    device, coefficients = found.described_device, found.coefficients
    for one, kept in [(one, "") for one in runs] + [(one, " (kept out)") for one in kept_out]:
        predicted = one.predicted(device, coefficients).period
        _add(table, f"{one.name}: step{kept}", one.step_s, predicted)
    console.print(table)
    for name, value in coefficients.to_dict().items():
        source = "" if name in found.measured else " (assumed)"
        console.print(f"{name} {value:.4g}{source}", highlight=False)
    say(console, found.basis())


def _add(table: Table, name: str, seconds: float, predicted: float) -> None:
    error = predicted / seconds - 1
    table.add_row(name, f"{1e3 * seconds:.3f}", f"{1e3 * predicted:.3f}", f"{100 * error:+.0f} %")
