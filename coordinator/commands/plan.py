"""`rolemesh plan`: the best placement of a recipe's roles on devices, before there are any."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rolemesh.coordinator.commands.recipes.cluster_options import (
    Calibrations,
    CompletionTokens,
    Gpu,
    Gpus,
    Network,
    PerMachine,
    PromptTokens,
    basis_of,
    groups_of,
    planned_job,
)
from rolemesh.coordinator.commands.terminal.console import say
from rolemesh.coordinator.commands.terminal.ending import EXIT_BAD_INPUT, EXIT_FAILED, fail
from rolemesh.coordinator.commands.terminal.options import Json, Overrides
from rolemesh.coordinator.mapping.calibration.calibration import (
    Calibration,
    Machine,
    calibrated,
)
from rolemesh.coordinator.mapping.calibration.recorded import RecordedRun
from rolemesh.coordinator.mapping.errors import PlanError
from rolemesh.coordinator.mapping.job.job import Wishes
from rolemesh.coordinator.mapping.job.templates import templates
from rolemesh.coordinator.mapping.machines.devices import device_of
from rolemesh.coordinator.mapping.report.drawing import svg_timeline, text_timeline
from rolemesh.coordinator.mapping.report.report import Plan, phases, plan_of
from rolemesh.coordinator.mapping.report.settings import plan_section, settings_of
from rolemesh.coordinator.mapping.search.search import Search
from rolemesh.coordinator.mapping.search.shortage import shortage
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.hub.hf_files import with_files
from rolemesh.coordinator.recipe.loading import dump_recipe, load_recipe
from rolemesh.coordinator.run.folders.folder import NoRunError
from rolemesh.coordinator.run.folders.recorded_steps import last_settings, recorded_run
from rolemesh.coordinator.run.tuning.calibrations import calibrations_for
from rolemesh.coordinator.state.files import write_atomically

app = typer.Typer(add_completion=False)


@app.command()
def plan(
    gpus: Gpus,
    gpu: Gpu,
    recipe: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RECIPE...", help="YAML files; a later one wins."),
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="In their place: a run that was made on such a device."),
    ] = None,
    per_machine: PerMachine = None,
    network: Network = None,
    prompt_tokens: PromptTokens = None,
    completion_tokens: CompletionTokens = None,
    together: Annotated[
        list[str] | None, typer.Option(metavar="A,B", help="Roles that are to share a pool.")
    ] = None,
    apart: Annotated[
        list[str] | None, typer.Option(metavar="A,B", help="Roles that are not to share one.")
    ] = None,
    at_most: Annotated[
        list[str] | None, typer.Option(metavar="ROLE=N", help="Most devices of a role's pool.")
    ] = None,
    on: Annotated[
        list[str] | None, typer.Option(metavar="ROLE=GPU", help="Kind of device of a role.")
    ] = None,
    offload: Annotated[
        bool, typer.Option(help="Whether moments may lie in host memory between steps.")
    ] = True,
    explain: Annotated[
        bool, typer.Option("--explain", help="Shows why the next best placements lose.")
    ] = False,
    schedules: Annotated[
        bool, typer.Option("--schedules", help="Compares who could sample, and when.")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Draws the predicted step there.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="Writes the planned recipe.")
    ] = None,
    calibration: Calibrations = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Finds the placement and the layouts with the shortest step, by a cost model.

    It needs the config.json of each model, no device and no weights, and takes seconds. It says
    which measurements it stands on (`rolemesh calibrate`), if any: `rolemesh fit` has the last word
    on memory, a run on seconds. Exit code 0: there is a plan; 1: nothing fits; 2: bad input.

    Example: rolemesh plan recipes/gpu/ppo-1500m-4-gpus.yaml --gpus 4 --gpu a100-40 --write my.yaml
    """
    files, changes = list(recipe or ()), list(overrides or ())
    made: RecordedRun | None = None
    try:
        if from_run is None and not files:
            raise RecipeError("no recipe is given: name one, or a run with --from-run")
        measured = calibrations_for(gpu, calibration or ())
        if from_run is not None:
            if files or prompt_tokens is not None or completion_tokens is not None:
                raise RecipeError(
                    f"--from-run is {from_run}, which has a recipe and rows of its own: leave "
                    "RECIPE, --prompt-tokens and --completion-tokens out"
                )
            made = recorded_run(from_run)
            files, changes = [from_run / "config.yaml"], [*last_settings(from_run), *changes]
            # The folder of the next run is another one.
            changes.append("run.directory=null")
            prompt_tokens = round(made.job.work.prompt_tokens)
            completion_tokens = made.job.work.completions.mean
            measured = {gpu[0]: _fitted(gpu, measured, made)}
        groups = groups_of(gpus, gpu, per_machine, network, measured)
        loaded = load_recipe(files, overrides=changes, environment=os.environ)
        loaded = with_files(loaded, weights=False)
        wishes = Wishes(
            together=_pairs("--together", together),
            apart=_pairs("--apart", apart),
            devices=_numbers(at_most),
            on=dict(_equations("--on", on)),
        )
        job = planned_job(
            loaded, groups, prompt_tokens, completion_tokens, wishes=wishes, offload=offload
        )
        search = Search(job, groups)
        found = search.run()
    except (RecipeError, PlanError, NoRunError) as error:
        fail(str(error), EXIT_BAD_INPUT, as_json=as_json)
    if not found.placements:
        fail(shortage(search), EXIT_FAILED, as_json=as_json)
    result = replace(plan_of(search, found), basis=basis_of(gpu, measured))
    settings = settings_of(loaded, result)
    predicted_s = 0.0
    if made is not None:
        fitted = measured[gpu[0]]
        predicted_s = made.predicted(fitted.described_device, fitted.coefficients).period
    compared: dict[str, float | None] = {}
    if schedules:
        for name, variant in templates(loaded):
            other = planned_job(variant, groups, prompt_tokens, completion_tokens, offload=offload)
            plans = Search(other, groups).run(kept=1).placements
            compared[name] = plans[0].period if plans else None
    try:
        if write is not None:
            text = _written(files, changes, settings, result, made)
            write_atomically(write, text)
        if svg is not None:
            write_atomically(svg, svg_timeline(result, f"{loaded.run.name}: predicted step"))
    except RecipeError as error:
        # The plan's own keys do not fit the recipe: ours to mend, so all that is known is said.
        fail(f"the planned recipe is refused: {error}", EXIT_FAILED, as_json=as_json)
    except OSError as error:
        text = f"{error.filename} cannot be written ({error.strerror}): name a file elsewhere"
        fail(text, EXIT_BAD_INPUT, as_json=as_json)
    if as_json:
        run = None
        if made is not None:
            run = {"name": made.name, "measured_s": made.step_s, "predicted_s": predicted_s}
        told = {"settings": settings, "schedules": compared, "from_run": run}
        print(json.dumps({**result.to_dict(), **told}))
        return
    if made is not None:
        print(_told(made, predicted_s))
    _show(Console(), search, result, settings, explain=explain)
    for name, seconds in compared.items():
        print(f"{name}: " + ("does not fit" if seconds is None else f"{seconds:.3g} s a step"))
    if compared:
        print("Ahead and async train on older weights, which changes what is learnt.")
    for path in (write, svg):
        if path is not None:
            print(f"written: {path}")


def _fitted(
    kinds: list[str], measured: Mapping[str, Calibration], made: RecordedRun
) -> Calibration:
    """The cost model of a kind of device, fitted to the calls of a run that was made on it.

    Raises:
        PlanError: There are several kinds, and no run says which one it was made on, or the kind
            is not known.
    """
    if len(set(kinds)) != 1:
        raise PlanError(
            f"--gpu is {', '.join(kinds)}: a plan from a run is for the one kind of device that "
            "the run was made on; give one"
        )
    known = measured.get(kinds[0])
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    machine = Machine(name=f"the machine of {made.name}", threads=1, versions={}, date=today)
    primitives = () if known is None else known.primitives
    machine = machine if known is None else known.machine
    return calibrated(device_of(kinds[0]), primitives, [made], [], machine)


def _told(made: RecordedRun, predicted_s: float) -> str:
    return (
        f"{made.name} as it was placed: {made.step_s:.3g} s a step measured, {predicted_s:.3g} s "
        "predicted"
    )


def _written(
    files: list[Path],
    overrides: list[str],
    settings: list[str],
    result: Plan,
    made: RecordedRun | None,
) -> str:
    """The recipe with the plan's settings and its prediction. It has been validated."""
    planned = load_recipe(files, overrides=[*overrides, *settings], environment=os.environ)
    section = plan_section(planned, result)
    header = [
        f"Planned by: rolemesh plan {' '.join(str(file) for file in files)}",
        *([] if made is None else [f"The run before: {made.step_s:.3g} s a step."]),
        f"Predicted: {section.told}.",
        f"For {result.rows}.",
        "`rolemesh fit` counts what each GPU will hold.",
        *(f"Note: {note}." for note in result.notes),
    ]
    text = dump_recipe(planned.model_copy(update={"plan": section}))
    return "".join(f"# {line}\n" for line in header) + text


def _show(
    console: Console, search: Search, result: Plan, settings: list[str], *, explain: bool
) -> None:
    table = Table(title=f"{result.period:.3g} s a step, {result.tokens_per_s:,.0f} tokens/s")
    for heading in ("pool", "devices", "role", "layout p-t-d", "samples", "GiB", "busy"):
        table.add_column(heading, justify="right" if heading in ("GiB", "busy") else "left")
    for pool in result.pools:
        for number, role in enumerate(pool.roles):
            layout = role.option.layout
            sampled = f"tp {layout.generate_tp}, {role.rows_together} rows"
            table.add_row(
                pool.name if not number else "",
                f"{pool.size} {pool.device}" if not number else "",
                role.role,
                role.layout,
                sampled if role.sampler_bytes else "-",
                f"{role.peak_bytes / 2**30:.1f}",
                f"{pool.busy:.0%}" if not number else "",
            )
    console.print(table)
    for pool in result.pools:
        say(
            console,
            f"{pool.name}: at most {pool.most_bytes / 2**30:.1f} of "
            f"{pool.device_bytes / 2**30:.1f} GiB on a device",
        )
    parts = ", ".join(f"{name} {s:.3g} s" for name, s in phases(result, search).items())
    say(console, f"by phase, overlapping or not: {parts}; devices at work {result.utilisation:.0%}")
    if result.idle_devices:
        say(console, f"{result.idle_devices} devices would change nothing")
    say(console, *text_timeline(result), f"for {result.rows}", f"predicted: {result.basis}")
    say(console, *(f"note: {note}" for note in result.notes))
    if explain:
        say(console, f"{result.partitions} placements were looked at; the next best:")
        for other in result.runners_up:
            pools = ", ".join(
                f"{'+'.join(roles)} on {size}"
                for roles, size in zip(other.sets, other.sizes, strict=True)
            )
            say(console, f"  {other.period:.3g} s  {pools}: {other.reason}")
        say(console, "settings:", *(f"  --set {json.dumps(setting)}" for setting in settings))


def _pairs(option: str, texts: list[str] | None) -> tuple[tuple[str, str], ...]:
    pairs = []
    for text in texts or ():
        names = [name.strip() for name in text.split(",")]
        if len(names) < 2 or not all(names):
            raise RecipeError(f"{option} is {text!r}: give roles, e.g. {option} actor,critic")
        first, *others = names
        if option == "--together":
            pairs += [(first, other) for other in others]
        else:
            pairs += [(a, b) for index, a in enumerate(names) for b in names[index + 1 :]]
    return tuple(pairs)


def _equations(option: str, texts: list[str] | None) -> list[tuple[str, str]]:
    found = []
    for text in texts or ():
        role, sign, value = text.partition("=")
        if not sign or not role or not value:
            raise RecipeError(f"{option} is {text!r}: give ROLE=VALUE, e.g. {option} actor=h100")
        found.append((role, value))
    return found


def _numbers(texts: list[str] | None) -> dict[str, int]:
    found = {}
    for role, value in _equations("--at-most", texts):
        if not value.isdecimal():
            raise RecipeError(f"--at-most is {role}={value!r}: give a whole number")
        found[role] = int(value)
    return found
